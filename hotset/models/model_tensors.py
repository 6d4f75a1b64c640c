"""All tensors of a model, and what one worker's weights take. Needs neither torch nor the weights.

`weight_plan.py` computes the bytes from the decoder itself and from the files. A test compares the two.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from hotset.models.feed_forward import ROUTED, MlpTensors, MoeTensors, mlp_tensors
from hotset.models.spec import ModelSpec
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.tensors import WeightTensor, layer_of, shard_slice, vector

CACHED_WORKERS = 256  # a plan asks for the same weights again for every context and load


class EndTensors(NamedTuple):
    """What a model has besides its layers. Tensor parallel ranks divide the vocabulary."""

    embedding: WeightTensor
    norm: WeightTensor
    head: WeightTensor  # the same tensor as the embedding, if the model ties them


class LayerNorms(NamedTuple):
    input: WeightTensor
    post_attention: WeightTensor


class MtpTensors(NamedTuple):
    """What the MTP layer has in addition to a decoder layer."""

    token_norm: WeightTensor
    hidden_norm: WeightTensor
    projection: WeightTensor
    norm: WeightTensor


def end_tensors(spec: ModelSpec, split: Split = WHOLE_MODEL) -> EndTensors:
    shard = shard_slice(0, split.vocabulary(spec.vocab))

    def vocabulary(name: str) -> WeightTensor:
        return WeightTensor(name, (spec.vocab, spec.hidden), tensor_slice=shard, storage="plain")

    head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    norm = vector("model.norm.weight", spec.hidden)
    return EndTensors(vocabulary("model.embed_tokens.weight"), norm, vocabulary(head))


def layer_norms(spec: ModelSpec, layer: int) -> LayerNorms:
    names = ("input_layernorm", "post_attention_layernorm")
    return LayerNorms(*(vector(f"model.layers.{layer}.{name}.weight", spec.hidden) for name in names))


def feed_forward_tensors(spec: ModelSpec, layer: int, split: Split) -> MlpTensors | MoeTensors:
    prefix = f"model.layers.{layer}.mlp"
    if spec.moe is not None and layer in spec.moe.layers:
        return spec.moe.tensors(prefix, spec.hidden, split)
    return mlp_tensors(prefix, spec.hidden, spec.mlp_width, split, bias=spec.mlp_bias)


def layer_tensors(spec: ModelSpec, layer: int, split: Split = WHOLE_MODEL) -> list[WeightTensor]:
    """Returns all tensors of a decoder layer."""
    attention = (tensor for tensor in spec.attention.tensors(spec.hidden, layer, split) if tensor is not None)
    return [*layer_norms(spec, layer), *attention, *feed_forward_tensors(spec, layer, split).all()]


def mtp_tensors(spec: ModelSpec) -> MtpTensors:
    prefix, hidden = f"model.layers.{spec.layers}", spec.hidden
    return MtpTensors(
        token_norm=vector(f"{prefix}.enorm.weight", hidden),
        hidden_norm=vector(f"{prefix}.hnorm.weight", hidden),
        projection=WeightTensor(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), "MTP projection"),
        norm=vector(f"{prefix}.shared_head.norm.weight", hidden),
    )


def tensor_names(spec: ModelSpec) -> set[str]:
    """Returns the names of all tensors of the model, those of its MTP layer included."""
    names = set()
    layers = [layer_tensors(spec, layer) for layer in range(spec.layers)]
    if spec.mtp is not None:
        layers += [layer_tensors(spec.with_mtp_layer, spec.layers), list(mtp_tensors(spec))]
    for tensor in (*end_tensors(spec), *chain.from_iterable(layers)):
        names |= {tensor.expert_name(expert) for expert in range(tensor.copies)}
        names |= {tensor.bias_name} if tensor.bias else set()
    return names


def is_unused(spec: ModelSpec, name: str) -> bool:
    """Returns whether a checkpoint of the model may have the tensor `name` although nothing reads it.

    These are rotary frequencies, which are computed; the LM head of tied embeddings; what the kind of attention leaves
    out; and the copies of embedding and LM head that belong to an MTP layer.
    """
    layer = layer_of(name)
    copies = tuple(f"model.layers.{spec.layers}.{copy}.weight" for copy in ("embed_tokens", "shared_head.head"))
    return (
        name.endswith("rotary_emb.inv_freq")
        or (spec.tied_embeddings and name == "lm_head.weight")
        or (layer is not None and spec.attention.is_unused(name, layer))
        or (spec.mtp is not None and name.startswith(copies))
    )


def matrix_values(tensors: Iterable[WeightTensor]) -> int:
    """Returns the number of values in the matrices among `tensors`."""
    return sum(tensor.values for tensor in tensors if tensor.product is not None)


@lru_cache(CACHED_WORKERS)
def worker_weight_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of the weights of the worker that holds this part of the model.

    `dtype_bytes` is the size of a value in the model's dtype. The second, packed copies that linear layers have on a
    CPU in float32 are not counted.
    """
    layers = split.layer_range(spec.layers)
    first, last = layers.start == 0, layers.stop == spec.layers
    tensors = [tensor for layer in layers for tensor in layer_tensors(spec, layer, split)]
    if last:
        tensors.append(end_tensors(spec).norm)
    if last and spec.mtp is not None:
        # Data parallel ranks do not divide the experts of this layer.
        tensors += layer_tensors(spec.with_mtp_layer, spec.layers, WHOLE_MODEL if split.dp_size > 1 else split)
        tensors += mtp_tensors(spec)
    embeds = first or (last and spec.mtp is not None)
    vocabularies = 1 if embeds and last and spec.tied_embeddings else embeds + last
    return _bytes(spec, tensors, dtype_bytes) + vocabularies * _vocabulary_values(spec, split) * dtype_bytes


@lru_cache(CACHED_WORKERS)
def routed_expert_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of the worker's routed experts. A step reads only the experts that it uses."""
    tensors = (tensor for layer in split.layer_range(spec.layers) for tensor in layer_tensors(spec, layer, split))
    return _bytes(spec, (tensor for tensor in tensors if tensor.product == ROUTED), dtype_bytes)


def embedding_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of an embedding that is not the LM head too. A step reads only a few of its rows."""
    return 0 if spec.tied_embeddings or split.first_layer > 0 else _vocabulary_values(spec, split) * dtype_bytes


def _vocabulary_values(spec: ModelSpec, split: Split) -> int:
    """Returns the number of values in a rank's slice of the embedding, or of the LM head."""
    return split.vocabulary_shard_size(spec.vocab) * spec.hidden


def _bytes(spec: ModelSpec, tensors: Iterable[WeightTensor], dtype_bytes: int) -> int:
    return sum(_tensor_bytes(spec, tensor, dtype_bytes) for tensor in tensors)


def _tensor_bytes(spec: ModelSpec, tensor: WeightTensor, dtype_bytes: int) -> int:
    biases = tensor.local_shape[0] if tensor.bias else 0
    if tensor.storage == "matrix":
        outputs, inputs = tensor.local_shape
        matrix = spec.weight_formats.of(tensor.name).matrix_bytes(outputs, inputs, dtype_bytes)
        return matrix * tensor.copies + biases * dtype_bytes
    value_bytes = max(4, dtype_bytes) if tensor.storage == "fp32" else dtype_bytes
    return tensor.values * value_bytes + biases * dtype_bytes
