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
from hotset.models.beside import Beside, beside
from hotset.models.checkpoint.source import WeightSource
from hotset.models.layers import (
    RmsNorm,
    RowParallelLinear,
    ShardLoader,
    WeightShard,
    load_fp32,
    merged_linear,
    shard_slice,
)
from hotset.models.rope import softmax_gain
from hotset.models.spec import IndexSpec, KvStorage, MlaSpec, ModelSpec

LATENT_NORM_EPS = 1e-6  # for the norms of the query latent and the KV latent, instead of the model's norm_eps
INDEX_NORM_EPS = 1e-6  # for the layer norm of index keys
MIN_HEADS_TO_DECODE = 64  # with fewer heads, attention over fp8 rows is as fast as over decoded ones


class Indexer:
    """Selects the top-k positions of each token's context, given the outputs of its projections.

    Every tensor parallel rank holds the whole indexer. The indexer's inputs have the same bits on every rank, because
    they come from all_reduce; its weights and kernels are the same too. Therefore every rank writes the same index keys
    and selects the same positions, ties included, without communication.
    """

    def __init__(self, weights: WeightSource, prefix: str, group: int, model: ModelSpec, spec: IndexSpec) -> None:
        self._spec = spec
        self._group = group
        self._norm_weight = weights.load(f"{prefix}.k_norm.weight", (spec.head_dim,))
        self._norm_bias = weights.load(f"{prefix}.k_norm.bias", (spec.head_dim,))
        name, shape = f"{prefix}.weights_proj.weight", (spec.heads, model.hidden)
        self.head_weights = Fp32Linear(load_fp32(weights, name, shape, self._norm_weight), spec.heads**-0.5)

    def begin_head_weights(self, x: Tensor, computed: Tensor | None) -> Beside[Tensor]:
        """Begins to compute the weights of the heads, [tokens, heads], from the input of the layer, unless they have
        been computed with its other projections."""
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

    def __init__(
        self, loader: ShardLoader, layer: int, local_layer: int, model: ModelSpec, spec: MlaSpec, like: Tensor
    ) -> None:
        """Loads layer `layer` of the whole model, which this worker's views number `local_layer`."""
        weights, prefix = loader.weights, f"model.layers.{layer}.self_attn"
        heads, index = loader.split.tp_shard(spec.heads), spec.index
        self._layer = local_layer
        self._spec = spec
        self._heads = len(heads)
        head_dim, up_dim = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim

        def norm(name: str, width: int) -> RmsNorm:
            return RmsNorm(weights.load(f"{prefix}.{name}.weight", (width,)), LATENT_NORM_EPS)

        # kv_a comes last: in published models, the other parts end at the end of a block of scales, but kv_a does not.
        down = [WeightShard.whole(f"{prefix}.q_a_proj", spec.q_lora_rank, spec.bias)]
        up = [WeightShard(f"{prefix}.q_b_proj", spec.heads * head_dim, shard_slice(0, heads, head_dim))]
        self._indexer: Indexer | None = None
        if layer in index.full_layers:
            down.append(WeightShard.whole(f"{prefix}.indexer.wk", index.head_dim))
            up.append(WeightShard.whole(f"{prefix}.indexer.wq_b", index.heads * index.head_dim))
            group = len(local_index_groups(spec, range(layer - local_layer, layer)))  # local groups before this layer
            self._indexer = Indexer(weights, f"{prefix}.indexer", group, model, index)
        down.append(WeightShard.whole(f"{prefix}.kv_a_proj_with_mqa", spec.kv_lora_rank + spec.rope_dim, spec.bias))
        self._down, self._down_sizes = merged_linear(weights, down, model.hidden, like), [part.size for part in down]
        self._up, self._up_sizes = merged_linear(weights, up, spec.q_lora_rank, like), [part.size for part in up]
        self._q_norm = norm("q_a_layernorm", spec.q_lora_rank)
        self._kv_norm = norm("kv_a_layernorm", spec.kv_lora_rank)
        # Each head's part of kv_b is multiplied on its own, with queries and attended rows: it is never in fp8.
        kv_up_shape, kv_up_slice = (spec.heads * up_dim, spec.kv_lora_rank), shard_slice(0, heads, up_dim)
        kv_up = weights.load(f"{prefix}.kv_b_proj.weight", kv_up_shape, tensor_slice=kv_up_slice)
        by_head = kv_up.view(len(heads), up_dim, spec.kv_lora_rank)
        self._key_up = by_head[:, : spec.nope_dim]  # [local heads, nope, rank]
        self._value_up = by_head[:, spec.nope_dim :].transpose(1, 2)  # [local heads, rank, v]
        out_shape, out_slice = (model.hidden, spec.heads * spec.v_dim), shard_slice(1, heads, spec.v_dim)
        out = weights.load_weight(f"{prefix}.o_proj.weight", out_shape, tensor_slice=out_slice)
        out_bias = weights.load(f"{prefix}.o_proj.bias", (model.hidden,)) if spec.bias else None
        self._out = RowParallelLinear(out, out_bias, loader.tp_collectives)
        self._scale = head_dim**-0.5 * softmax_gain(model.rope)
        # On a GPU, with so many heads, converting fp8 rows for every token again takes a third of attention's time.
        self._decodes_contexts = like.is_cuda and len(heads) >= MIN_HEADS_TO_DECODE

    def __call__(
        self, x: Tensor, rotation: Rotation, view: View, previous: Tensor | None, *, selects: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns [tokens, hidden] and the selected positions: `previous` if this layer has no indexer, or if not
        `selects`."""
        indexer = self._indexer if selects else None
        down, head_weights = (self._down(x), None) if indexer is None else self._down.and_fp32(x, indexer.head_weights)
        q_down, *index_key, kv_down = down.split(self._down_sizes, dim=1)
        up = self._up.of_normed(q_down, self._q_norm.weight, self._q_norm.eps)
        q_up, *index_query = up.split(self._up_sizes, dim=1)

        def append_and_project() -> Tensor:  # what selection does not need
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


def local_index_groups(spec: MlaSpec, layers: range) -> tuple[int, ...]:
    """Returns the layers in `layers` that run an indexer, numbered from the first layer of the range."""
    return tuple(layer - layers.start for layer in spec.index.full_layers if layer in layers)


def dsa_kv_shape(layers: range, spec: MlaSpec, dtype: torch.dtype, storage: KvStorage) -> KvShape:
    """Returns the KV shape of these layers. The shape is the same on every tensor parallel rank."""
    row = mla_row(spec.kv_lora_rank, spec.rope_dim, dtype, storage.fp8_rows)
    key = index_key_row(spec.index.head_dim, dtype, storage.fp8_keys)
    return KvShape(len(layers), row, local_index_groups(spec, layers), key, spec.index.topk)
