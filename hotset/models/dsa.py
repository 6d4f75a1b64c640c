"""Sparse attention over MLA: DeepSeek-V3.2, GLM-5."""

import torch
from torch import Tensor

from hotset.kernels.fp32_linear import fp32_linear
from hotset.kernels.index_topk import index_topk
from hotset.kernels.key_append import key_append
from hotset.kernels.linear import Linear
from hotset.kernels.mla_append import mla_append
from hotset.kernels.per_head_matmul import per_head_matmul
from hotset.kernels.rope import Rotation, rotate
from hotset.kernels.rope_query import rope_query
from hotset.kernels.rows import index_key_row, mla_row
from hotset.kernels.sparse_attention import sparse_attention
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import WeightSource
from hotset.models.layers import Loader, RmsNorm, SummedLinear, part, take_wide
from hotset.models.rope import softmax_gain
from hotset.models.spec import MlaSpec, ModelSpec, Storage

LATENT_NORM_EPS = 1e-6  # of the norms on the two latents, whatever the model's own epsilon
INDEX_NORM_EPS = 1e-6  # of the layer norm on index keys


class Indexer:
    """Chooses, for each query row, the top-k positions of its context.

    Ranks that divide the heads all have the whole indexer. Its inputs are the same on every rank, to the bit (they
    come of sums that are), and so are its weights and kernels: every rank writes the same index keys and makes the
    same choice, ties included, without a word between them.
    """

    def __init__(self, weights: WeightSource, prefix: str, group: int, model: ModelSpec, spec: MlaSpec) -> None:
        index = spec.index
        self._spec = index
        self._group = group
        self._query = Linear(weights.take(f"{prefix}.wq_b.weight", (index.heads * index.head_dim, spec.q_lora_rank)))
        self._key = Linear(weights.take(f"{prefix}.wk.weight", (index.head_dim, model.hidden)))
        self._norm_weight = weights.take(f"{prefix}.k_norm.weight", (index.head_dim,))
        self._norm_bias = weights.take(f"{prefix}.k_norm.bias", (index.head_dim,))
        name, shape = f"{prefix}.weights_proj.weight", (index.heads, model.hidden)
        self._head_weights = take_wide(weights, name, shape, self._norm_weight)

    def __call__(self, x: Tensor, q_latent: Tensor, rotation: Rotation, view: View) -> Tensor:
        """Appends this step's index keys and returns positions [rows, topk], ascending, EMPTY-padded."""
        spec = self._spec
        keys, segments = view.keys(self._group), view.segments
        norm = (self._norm_weight, self._norm_bias, INDEX_NORM_EPS)
        key_append(self._key(x), *norm, rotation, spec.interleaved_rope, keys, segments.positions)
        q = rotate(self._query(q_latent).view(-1, spec.heads, spec.head_dim), rotation, spec.interleaved_rope)
        head_weights = fp32_linear(x, self._head_weights, spec.heads**-0.5)
        return index_topk(q, head_weights, keys, segments, spec.topk, spec.head_dim**-0.5)


class DsaAttention:
    """One layer's attention, always in the absorbed form: queries are taken into the latent space, rows stay as stored.

    Row: the normed latent, then the rope key.
    """

    def __init__(self, loader: Loader, layer: int, number: int, model: ModelSpec, spec: MlaSpec) -> None:
        """`layer`: in the whole model; `number`: among this worker's layers."""
        weights, prefix = loader.weights, f"model.layers.{layer}.self_attn"
        heads = loader.split.tp_shard(spec.heads)
        self._number = number
        self._spec = spec
        self._heads = len(heads)
        head_dim, up_dim = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim

        def linear(name: str, rows: int) -> Linear:
            weight = weights.take(f"{prefix}.{name}.weight", (rows, model.hidden))
            return Linear(weight, weights.take(f"{prefix}.{name}.bias", (rows,)) if spec.bias else None)

        def up(name: str, width: int, columns: int) -> Tensor:
            shape = (spec.heads * width, columns)
            return weights.take(f"{prefix}.{name}.weight", shape, part=part(0, heads, width))

        def norm(name: str, width: int) -> RmsNorm:
            return RmsNorm(weights.take(f"{prefix}.{name}.weight", (width,)), LATENT_NORM_EPS)

        self._q_down = linear("q_a_proj", spec.q_lora_rank)
        self._q_norm = norm("q_a_layernorm", spec.q_lora_rank)
        self._q_up = Linear(up("q_b_proj", head_dim, spec.q_lora_rank))
        self._kv_down = linear("kv_a_proj_with_mqa", spec.kv_lora_rank + spec.rope_dim)
        self._kv_norm = norm("kv_a_layernorm", spec.kv_lora_rank)
        by_head = up("kv_b_proj", up_dim, spec.kv_lora_rank).view(len(heads), up_dim, spec.kv_lora_rank)
        self._key_up = by_head[:, : spec.nope_dim]  # [heads here, nope, rank]
        self._value_up = by_head[:, spec.nope_dim :].transpose(1, 2)  # [heads here, rank, v]
        out_shape, out_part = (model.hidden, spec.heads * spec.v_dim), part(1, heads, spec.v_dim)
        out = weights.take(f"{prefix}.o_proj.weight", out_shape, part=out_part)
        out_bias = weights.take(f"{prefix}.o_proj.bias", (model.hidden,)) if spec.bias else None
        self._out = SummedLinear(out, out_bias, loader.dividing_heads)
        self._scale = head_dim**-0.5 * softmax_gain(model.rope)
        self._indexer: Indexer | None = None
        if layer in spec.index.full_layers:
            group = len(groups_here(spec, range(layer - number, layer)))  # as many as begin before it, here
            self._indexer = Indexer(weights, f"{prefix}.indexer", group, model, spec)

    def __call__(self, x: Tensor, rotation: Rotation, view: View, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """[rows, hidden] and the positions selected: by this layer's indexer, or `previous` where it has none."""
        spec = self._spec
        q_latent = self._q_norm(self._q_down(x))
        q = self._q_up(q_latent).view(-1, self._heads, spec.nope_dim + spec.rope_dim)
        new = view.new_rows(self._number)
        mla_append(
            self._kv_down(x), self._kv_norm.weight, self._kv_norm.eps, rotation, new.layout, new.rows, new.row_ids
        )

        positions = previous if self._indexer is None else self._indexer(x, q_latent, rotation, view)
        assert positions is not None, f"layer {self._number} has no indexer and none ran before it"
        selected = view.select(self._number, positions)
        q_all = rope_query(q, self._key_up, rotation)
        attended = sparse_attention(
            q_all, selected.rows, selected.row_ids, selected.layout, spec.kv_lora_rank, self._scale
        )
        values = per_head_matmul(attended, self._value_up)  # [rows, heads, v]
        return self._out(values.reshape(x.shape[0], -1)), positions


def groups_here(spec: MlaSpec, layers: range) -> tuple[int, ...]:
    """Those of the layers that have an indexer, numbered from the first of the layers."""
    return tuple(layer - layers.start for layer in spec.index.full_layers if layer in layers)


def dsa_kv_shape(layers: range, spec: MlaSpec, dtype: torch.dtype, storage: Storage) -> KvShape:
    """Rows and index keys of these layers: the same on every rank that divides the heads."""
    row = mla_row(spec.kv_lora_rank, spec.rope_dim, dtype, storage.fp8_rows)
    key = index_key_row(spec.index.head_dim, dtype, storage.fp8_keys)
    return KvShape(len(layers), row, groups_here(spec, layers), key, spec.index.topk)
