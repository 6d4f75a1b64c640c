"""Computes the bytes of one worker's weights from the model's configuration. Needs neither torch nor the weights.

`weight_plan.py` computes the same from the decoder itself and from the files. A test compares the two.
"""

from dataclasses import dataclass

from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec, MoeSpec
from hotset.models.split import WHOLE_MODEL, Split


@dataclass(frozen=True, slots=True)
class _Counts:
    """Numbers of weights, by the way in which they are stored."""

    matrices: int = 0  # of linear layers and experts: in fp8, or in the model's dtype
    plain: int = 0  # in the model's dtype: norms, biases, embedding, LM head and absorbed matrices
    fp32: int = 0  # in the accumulation dtype: routers, and the head weights of indexers

    def __add__(self, other: "_Counts") -> "_Counts":
        return _Counts(self.matrices + other.matrices, self.plain + other.plain, self.fp32 + other.fp32)


def worker_weight_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of the weights of the worker that holds this part of the model.

    `dtype_bytes` is the size of a value in the model's dtype. The second, packed copies that linear layers have on a
    CPU in float32 are not counted.
    """
    layers = split.layer_range(spec.layers)
    counts = _vocabulary(spec, split, first=layers.start == 0, last=layers.stop == spec.layers)
    for layer in layers:
        counts += _layer(spec, split, layer)
    if spec.mtp is not None and layers.stop == spec.layers:
        glue = _Counts(matrices=2 * spec.hidden**2, plain=3 * spec.hidden)  # the projection, and norms
        # Data parallel ranks do not divide the experts of this layer.
        counts += _layer(spec.with_mtp_layer, WHOLE_MODEL if split.dp_size > 1 else split, spec.layers) + glue
    matrices = round(counts.matrices * _matrix_bytes(spec, dtype_bytes))
    return matrices + counts.plain * dtype_bytes + counts.fp32 * max(4, dtype_bytes)


def routed_expert_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of the worker's routed experts. A step reads only the experts that it uses."""
    if spec.moe is None:
        return 0
    layers = len(set(split.layer_range(spec.layers)) & set(spec.moe.layers))
    weights = layers * _routed(spec.hidden, split, spec.moe)
    return round(weights * _matrix_bytes(spec, dtype_bytes))


def embedding_bytes(spec: ModelSpec, split: Split, dtype_bytes: int) -> int:
    """Returns the bytes of an embedding that is not the LM head too. A step reads only a few of its rows."""
    if spec.tied_embeddings or split.first_layer > 0:
        return 0
    return split.vocabulary_shard_size(spec.vocab) * spec.hidden * dtype_bytes


def _matrix_bytes(spec: ModelSpec, dtype_bytes: int) -> float:
    """Returns the bytes of one value of a large matrix."""
    whole = 128
    name = "model.layers.0.self_attn.o_proj.weight"
    return spec.weight_formats.matrix_bytes(name, whole, whole, dtype_bytes) / whole**2


def _layer(spec: ModelSpec, split: Split, layer: int) -> _Counts:
    norms = _Counts(plain=2 * spec.hidden)
    return _attention(spec, split, layer) + _feed_forward(spec, split, layer) + norms


def _vocabulary(spec: ModelSpec, split: Split, *, first: bool, last: bool) -> _Counts:
    embeds = first or (last and spec.mtp is not None)
    matrices = 1 if embeds and last and spec.tied_embeddings else embeds + last
    norm = spec.hidden if last else 0
    return _Counts(plain=matrices * split.vocabulary_shard_size(spec.vocab) * spec.hidden + norm)


def _attention(spec: ModelSpec, split: Split, layer: int) -> _Counts:
    if isinstance(spec.attention, GqaSpec):
        return _gqa(spec, split, spec.attention)
    indexer = _indexer(spec, spec.attention) if layer in spec.attention.index.full_layers else _Counts()
    return _mla(spec, split, spec.attention) + indexer


def _gqa(spec: ModelSpec, split: Split, attention: GqaSpec) -> _Counts:
    heads, kv_heads = len(split.tp_shard(attention.heads)), len(split.kv_heads(attention.kv_heads))
    outputs = attention.head_dim * (heads + 2 * kv_heads)
    norms = 2 * attention.head_dim if attention.qk_norm else 0
    biases = (outputs if attention.qkv_bias else 0) + (spec.hidden if attention.out_bias else 0)
    return _Counts(matrices=spec.hidden * (outputs + attention.head_dim * heads), plain=norms + biases)


def _mla(spec: ModelSpec, split: Split, attention: MlaSpec) -> _Counts:
    heads, rank = len(split.tp_shard(attention.heads)), attention.kv_lora_rank
    down_outputs = attention.q_lora_rank + rank + attention.rope_dim
    up = attention.q_lora_rank * heads * (attention.nope_dim + attention.rope_dim)
    out = heads * attention.v_dim * spec.hidden
    absorbed = rank * heads * (attention.nope_dim + attention.v_dim)
    biases = down_outputs + spec.hidden if attention.bias else 0
    return _Counts(
        matrices=spec.hidden * down_outputs + up + out, plain=absorbed + attention.q_lora_rank + rank + biases
    )


def _indexer(spec: ModelSpec, attention: MlaSpec) -> _Counts:
    """Every tensor parallel rank holds the whole indexer."""
    index = attention.index
    return _Counts(
        matrices=index.head_dim * (index.heads * attention.q_lora_rank + spec.hidden),
        plain=2 * index.head_dim,
        fp32=index.heads * spec.hidden,
    )


def _feed_forward(spec: ModelSpec, split: Split, layer: int) -> _Counts:
    if spec.moe is None or layer not in spec.moe.layers:
        return _mlp(spec.hidden, len(split.tp_shard(spec.mlp_width)), spec.mlp_bias)
    return _moe(spec.hidden, split, spec.moe)


def _mlp(hidden: int, width: int, bias: bool) -> _Counts:
    return _Counts(matrices=3 * hidden * width, plain=2 * width + hidden if bias else 0)


def _moe(hidden: int, split: Split, moe: MoeSpec) -> _Counts:
    """Tensor and data parallel ranks divide the experts. Only tensor parallel ranks divide the shared experts."""
    shared = _mlp(hidden, len(split.tp_shard(moe.width * moe.shared)), bias=False)
    return shared + _Counts(matrices=_routed(hidden, split, moe), fp32=moe.experts * (hidden + 1))


def _routed(hidden: int, split: Split, moe: MoeSpec) -> int:
    return 3 * hidden * moe.width * len(split.experts(moe.experts))
