"""Full grouped-query attention (GQA): Llama, Qwen3."""

import torch
from torch import Tensor

from hotset.kernels.gqa_append import HeadNorms, gqa_append
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import gqa_row
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.layers import RowParallelLinear, ShardLoader, WeightShard, merged_linear, shard_slice
from hotset.models.spec import GqaSpec, ModelSpec
from hotset.models.split import Split


class GqaAttention:
    """One layer's attention. A row holds K of every local KV head after rope, then V of every local KV head."""

    def __init__(
        self, loader: ShardLoader, layer: int, local_layer: int, model: ModelSpec, spec: GqaSpec, like: Tensor
    ) -> None:
        """Loads layer `layer` of the whole model, which this worker's views number `local_layer`."""
        weights, head_dim = loader.weights, spec.head_dim
        prefix = f"model.layers.{layer}.self_attn"
        heads, kv_heads = loader.split.tp_shard(spec.heads), loader.split.kv_heads(spec.kv_heads)
        self._layer = local_layer
        self._heads, self._kv_heads, self._head_dim = len(heads), len(kv_heads), head_dim

        def shard(name: str, count: int, local: range) -> WeightShard:
            return WeightShard(f"{prefix}.{name}", count * head_dim, shard_slice(0, local, head_dim), spec.qkv_bias)

        qkv = [
            shard("q_proj", spec.heads, heads),
            shard("k_proj", spec.kv_heads, kv_heads),
            shard("v_proj", spec.kv_heads, kv_heads),
        ]
        self._qkv = merged_linear(weights, qkv, model.hidden, like)
        out_shape, out_slice = (model.hidden, spec.heads * head_dim), shard_slice(1, heads, head_dim)
        out = weights.load_weight(f"{prefix}.o_proj.weight", out_shape, tensor_slice=out_slice)
        out_bias = weights.load(f"{prefix}.o_proj.bias", (model.hidden,)) if spec.out_bias else None
        self._out = RowParallelLinear(out, out_bias, loader.tp_collectives)
        self._head_norms: HeadNorms | None = None
        if spec.qk_norm:
            q_norm = weights.load(f"{prefix}.q_norm.weight", (head_dim,))
            k_norm = weights.load(f"{prefix}.k_norm.weight", (head_dim,))
            self._head_norms = HeadNorms(q_norm, k_norm, model.norm_eps)

    def __call__(self, x: Tensor, rotation: Rotation, view: View, previous: Tensor | None) -> tuple[Tensor, None]:
        """Maps [tokens, hidden] to [tokens, hidden]. The second result is None: full attention selects no positions."""
        qkv = self._qkv(x).view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        new = view.new_rows(self._layer)
        q = gqa_append(qkv, self._kv_heads, self._head_norms, rotation, new.layout, new.rows, new.row_ids)
        scale = self._head_dim**-0.5
        attended = paged_attention(q, view.context(self._layer), view.segments, self._kv_heads, scale)
        return self._out(attended.flatten(1)), None


def gqa_kv_shape(layers: int, spec: GqaSpec, split: Split, dtype: torch.dtype) -> KvShape:
    """Returns the KV shape of `layers` layers with this rank's KV heads."""
    return KvShape(layers, gqa_row(len(split.kv_heads(spec.kv_heads)), spec.head_dim, dtype))
