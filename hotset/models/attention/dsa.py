"""DeepSeek sparse attention (DSA) over multi-head latent attention (MLA): DeepSeek-V3.2, GLM-5."""

from functools import partial

import torch
from torch import Tensor

from hotset.kernels.index_append import index_append
from hotset.kernels.index_topk import index_topk
from hotset.kernels.linear import Fp32Linear, per_head_matmul
from hotset.kernels.mla_append import mla_append
from hotset.kernels.rope import Rotation, rope_query
from hotset.kernels.rows import index_key_row, mla_row
from hotset.kernels.sparse_attention import sparse_attention
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.attention.dsa_spec import IndexSpec, IndexTensors, MlaSpec
from hotset.models.beside import Beside, beside
from hotset.models.layer_step import StepInputs
from hotset.models.layers import ShardLoader
from hotset.models.rope import softmax_gain
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split

LATENT_NORM_EPS = 1e-6  # for the norms of the query latent and the KV latent, instead of the model's norm_eps
INDEX_NORM_EPS = 1e-6  # for the layer norm of index keys
MIN_HEADS_TO_DECODE = 64  # with fewer heads, attention over fp8 rows is as fast as over decoded ones


class Indexer:
    """Selects the top-k positions of each token's context, given the outputs of its projections.

    Every tensor parallel rank holds the whole indexer. The indexer's inputs have the same bits on every rank, because
    they come from all_reduce; its weights and kernels are the same too. Therefore every rank writes the same index keys
    and selects the same positions, ties included, without communication.
    """

    def __init__(self, loader: ShardLoader, tensors: IndexTensors, group: int, spec: IndexSpec) -> None:
        """Loads the indexer of the worker's index group `group`."""
        self._spec = spec
        self._group = group
        self._norm_weight, self._norm_bias = loader.load(tensors.key_norm), loader.load_bias(tensors.key_norm)
        self.head_weights = Fp32Linear(loader.load_fp32(tensors.head_weights), spec.heads**-0.5)

    def begin_head_weights(self, x: Tensor, computed: Tensor | None) -> Beside[Tensor]:
        """Starts to compute the head weights [tokens, heads] from the layer's input, unless they are already in
        `computed`."""
        return beside(partial(self.head_weights, x), x.device) if computed is None else Beside(computed)

    def __call__(
        self,
        head_weights: Beside[Tensor],  # [tokens, heads]
        query: Tensor,  # [tokens, heads * head_dim]
        key: Tensor,  # [tokens, head_dim]
        rotation: Rotation,
        view: View,
    ) -> Tensor:
        """Appends this step's index keys. Returns positions [tokens, topk], ascending, EMPTY-padded."""
        spec, keys, segments = self._spec, view.keys(self._group), view.segments
        q = index_append(
            query.unflatten(1, (spec.heads, spec.head_dim)),
            key,
            self._norm_weight,
            self._norm_bias,
            INDEX_NORM_EPS,
            rotation,
            spec.interleaved_rope,
            keys,
            segments.positions,
        )
        return index_topk(q, head_weights.join(), keys, segments, spec.topk, spec.head_dim**-0.5)


class DsaAttention:
    """One layer's attention, always in the absorbed form: queries are projected into the latent space of the rows.

    A row holds the normed latent, then the rope key. Two products compute all projections of the input and of the query
    latent, those of the layer's indexer included.
    """

    def __init__(self, loader: ShardLoader, layer: int, local_layer: int, model: ModelSpec) -> None:
        """Loads layer `layer` of the whole model, which this worker's views number `local_layer`."""
        spec = model.attention
        assert isinstance(spec, MlaSpec)
        tensors = spec.projections(model.hidden, layer, loader.split)
        index_tensors = spec.index_tensors(model.hidden, layer)
        self._layer, self._spec = local_layer, spec
        self._heads = len(loader.split.tp_shard(spec.heads))
        # kv_a comes last: in published models, the other parts end at the end of a block of scales, but kv_a does not.
        down, up = [tensors.q_down, tensors.kv_down], [tensors.q_up]
        self._indexer: Indexer | None = None
        if index_tensors is not None:
            down.insert(1, index_tensors.key)
            up.append(index_tensors.query)
            group = len(spec.local_index_layers(range(layer - local_layer, layer)))  # local groups before this layer
            self._indexer = Indexer(loader, index_tensors, group, spec.index)
        self._down, self._down_sizes = loader.merged_linear(down), [part.local_shape[0] for part in down]
        self._up, self._up_sizes = loader.merged_linear(up), [part.local_shape[0] for part in up]
        self._q_norm = loader.norm(tensors.q_norm, LATENT_NORM_EPS)
        self._kv_norm = loader.norm(tensors.kv_norm, LATENT_NORM_EPS)
        by_head = loader.load(tensors.kv_up).view(self._heads, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self._key_up = by_head[:, : spec.nope_dim]  # [local heads, nope, rank]
        self._value_up = by_head[:, spec.nope_dim :].transpose(1, 2)  # [local heads, rank, v]
        self._out = loader.row_parallel(tensors.out)
        self._scale = (spec.nope_dim + spec.rope_dim) ** -0.5 * softmax_gain(model.rope)
        # On a GPU with this many heads, decoding an fp8 row for every token that reads it takes a third of the time.
        self._decodes_contexts = loader.weights.device.type == "cuda" and self._heads >= MIN_HEADS_TO_DECODE

    def __call__(self, x: Tensor, step: StepInputs, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        rotation, view = step.rotation, step.view
        indexer = self._indexer if step.selects else None
        down, head_weights = (self._down(x), None) if indexer is None else self._down.and_fp32(x, indexer.head_weights)
        q_down, *index_key, kv_down = down.split(self._down_sizes, dim=1)
        up = self._up.of_normed(q_down, self._q_norm.weight, self._q_norm.eps)
        q_up, *index_query = up.split(self._up_sizes, dim=1)

        def append_and_project() -> Tensor:  # attention needs this, but selection does not
            new = view.new_rows(self._layer)
            mla_append(kv_down, self._kv_norm.weight, self._kv_norm.eps, rotation, new.layout, new.rows, new.row_ids)
            return rope_query(q_up.unflatten(1, (self._heads, -1)), self._key_up, rotation)

        weights = None if indexer is None else indexer.begin_head_weights(x, head_weights)
        query = beside(append_and_project, x.device)
        if indexer is not None and weights is not None:
            positions = indexer(weights, index_query[0], index_key[0], rotation, view)
        else:
            assert previous is not None, f"layer {self._layer} has no indexer, and no layer before it ran one"
            positions = previous
        selected = view.select(self._layer, positions)
        q = query.join()
        selected.wait()
        if self._decodes_contexts and selected.layout.quantised:
            contexts = view.short_contexts(self._layer)
            selected = selected if contexts is None else contexts.decoded(positions)
        rank = self._spec.kv_lora_rank
        attended = sparse_attention(q, selected.rows, selected.row_ids, selected.layout, rank, self._scale)
        values = per_head_matmul(attended, self._value_up)  # [tokens, heads, v]
        return self._out(values.reshape(x.shape[0], -1)), positions


def dsa_kv_shape(model: ModelSpec, layers: range, split: Split, dtype: torch.dtype, storage: KvStorage) -> KvShape:
    """Returns the KV shape of these layers. The shape is the same on every tensor parallel rank."""
    spec = model.attention
    assert isinstance(spec, MlaSpec)
    row = mla_row(spec.kv_lora_rank, spec.rope_dim, dtype, storage.fp8_rows)
    key = index_key_row(spec.index.head_dim, dtype, storage.fp8_keys)
    return KvShape(len(layers), row, spec.local_index_layers(layers), key, spec.index.topk)
