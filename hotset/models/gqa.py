"""Full attention over grouped heads: Llama, Qwen3."""

import torch
from torch import Tensor

from hotset.kernels.gqa_append import HeadNorms, gqa_append
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import gqa_row
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.layers import FusedSlice, Loader, SummedLinear, fused, part
from hotset.models.spec import GqaSpec, ModelSpec
from hotset.models.split import Split


class GqaAttention:
    """One layer's attention. Row: K of every head that is here after rope, then V of every one."""

    def __init__(self, loader: Loader, layer: int, number: int, model: ModelSpec, spec: GqaSpec, like: Tensor) -> None:
        """`layer`: in the whole model; `number`: among this worker's layers."""
        weights, head_dim = loader.weights, spec.head_dim
        prefix = f"model.layers.{layer}.self_attn"
        heads, kv_heads = loader.split.tp_shard(spec.heads), loader.split.kv_heads(spec.kv_heads)
        self._number = number
        self._heads, self._kv_heads, self._head_dim = len(heads), len(kv_heads), head_dim
        self._qkv = fused(
            weights,
            [
                FusedSlice(f"{prefix}.q_proj", spec.heads * head_dim, part(0, heads, head_dim)),
                FusedSlice(f"{prefix}.k_proj", spec.kv_heads * head_dim, part(0, kv_heads, head_dim)),
                FusedSlice(f"{prefix}.v_proj", spec.kv_heads * head_dim, part(0, kv_heads, head_dim)),
            ],
            model.hidden,
            spec.qkv_bias,
            like,
        )
        out_shape, out_part = (model.hidden, spec.heads * head_dim), part(1, heads, head_dim)
        out = weights.take(f"{prefix}.o_proj.weight", out_shape, part=out_part)
        out_bias = weights.take(f"{prefix}.o_proj.bias", (model.hidden,)) if spec.out_bias else None
        self._out = SummedLinear(out, out_bias, loader.dividing_heads)
        self._head_norms: HeadNorms | None = None
        if spec.qk_norm:
            q_norm = weights.take(f"{prefix}.q_norm.weight", (head_dim,))
            k_norm = weights.take(f"{prefix}.k_norm.weight", (head_dim,))
            self._head_norms = HeadNorms(q_norm, k_norm, model.norm_eps)

    def __call__(self, x: Tensor, rotation: Rotation, view: View, previous: Tensor | None) -> tuple[Tensor, None]:
        """[rows, hidden] from [rows, hidden]. Nothing is selected, so nothing is passed on to the next layer."""
        qkv = self._qkv(x).view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        new = view.new_rows(self._number)
        q = gqa_append(qkv, self._kv_heads, self._head_norms, rotation, new.layout, new.rows, new.row_ids)
        scale = self._head_dim**-0.5
        attended = paged_attention(q, view.context(self._number), view.segments, self._kv_heads, scale)
        return self._out(attended.flatten(1)), None


def gqa_kv_shape(layers: int, spec: GqaSpec, split: Split, dtype: torch.dtype) -> KvShape:
    """Of `layers` layers, with the KV heads that are here."""
    return KvShape(layers, gqa_row(len(split.kv_heads(spec.kv_heads)), spec.head_dim, dtype))
