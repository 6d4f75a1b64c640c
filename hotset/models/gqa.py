"""Full attention over grouped heads: Llama, Qwen3."""

import torch
from torch import Tensor

from hotset.kernels.gqa_append import HeadNorms, gqa_append
from hotset.kernels.linear import Linear
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import gqa_row
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import WeightSource
from hotset.models.layers import fused, fused_bias
from hotset.models.spec import GqaSpec, ModelSpec


class GqaAttention:
    """One layer's attention. Row: K of every head after rope, then V of every head."""

    def __init__(self, weights: WeightSource, layer: int, model: ModelSpec, spec: GqaSpec, like: Tensor) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._spec = spec
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        rows = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        qkv = fused(weights, [f"{name}.weight" for name in names], rows, model.hidden, like)
        self._qkv = Linear(
            qkv, fused_bias(weights, [f"{name}.bias" for name in names], rows) if spec.qkv_bias else None
        )
        out_bias = weights.take(f"{prefix}.o_proj.bias", (model.hidden,)) if spec.out_bias else None
        self._out = Linear(weights.take(f"{prefix}.o_proj.weight", (model.hidden, rows[0])), out_bias)
        self._head_norms: HeadNorms | None = None
        if spec.qk_norm:
            q_norm = weights.take(f"{prefix}.q_norm.weight", (spec.head_dim,))
            k_norm = weights.take(f"{prefix}.k_norm.weight", (spec.head_dim,))
            self._head_norms = HeadNorms(q_norm, k_norm, model.norm_eps)

    def __call__(self, x: Tensor, rotation: Rotation, view: View, previous: Tensor | None) -> tuple[Tensor, None]:
        """[rows, hidden] from [rows, hidden]. Nothing is selected, so nothing is passed on to the next layer."""
        spec = self._spec
        qkv = self._qkv(x).view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        new = view.new_rows(self._layer)
        q = gqa_append(qkv, spec.kv_heads, self._head_norms, rotation, new.layout, new.rows, new.places)
        scale = spec.head_dim**-0.5
        attended = paged_attention(q, view.context(self._layer), view.segments, spec.kv_heads, scale)
        return self._out(attended.flatten(1)), None


def gqa_kv_shape(layers: int, spec: GqaSpec, dtype: torch.dtype) -> KvShape:
    return KvShape(layers, gqa_row(spec.kv_heads, spec.head_dim, dtype))
