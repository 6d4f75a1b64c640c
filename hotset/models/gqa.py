"""The decoder with full attention over grouped heads: Llama, Qwen3."""

from torch import Tensor

from hotset.kernels.linear import Linear
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rows import gqa_row
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import WeightSource
from hotset.models.layers import RmsNorm, Vocabulary, feed_forward, fused, fused_bias
from hotset.models.rope import Rope, Rotation, rotate_halves
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
        self._head_norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.qk_norm:
            q_norm = weights.take(f"{prefix}.q_norm.weight", (spec.head_dim,))
            k_norm = weights.take(f"{prefix}.k_norm.weight", (spec.head_dim,))
            self._head_norms = RmsNorm(q_norm, model.norm_eps), RmsNorm(k_norm, model.norm_eps)

    def __call__(self, x: Tensor, rotation: Rotation, view: View) -> Tensor:  # [rows, hidden]
        spec = self._spec
        qkv = self._qkv(x).view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = qkv.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if self._head_norms is not None:
            q, k = self._head_norms[0](q), self._head_norms[1](k)
            q, k = rotate_halves(q, rotation), rotate_halves(k, rotation)
        else:
            q, k = rotate_halves(qkv[:, : spec.heads + spec.kv_heads], rotation).split(
                [spec.heads, spec.kv_heads], dim=1
            )
        row = x.new_empty(x.shape[0], 2, spec.kv_heads, spec.head_dim)
        row[:, 0], row[:, 1] = k, v
        view.append(self._layer, row.flatten(1))
        scale = spec.head_dim**-0.5
        attended = paged_attention(q, view.context(self._layer), view.segments, spec.kv_heads, scale)
        return self._out(attended.flatten(1))


class GqaDecoder:
    """A whole model: `forward` turns token ids into logits, reading and writing KV through the view."""

    def __init__(self, spec: ModelSpec, weights: WeightSource) -> None:
        assert isinstance(spec.attention, GqaSpec)
        self.spec = spec
        self._vocabulary = Vocabulary(weights, spec)
        like = self._vocabulary.embedding
        self.dtype, self.device = like.dtype, like.device
        self._rope = Rope(spec.rope, like.dtype, like.device)
        self._layers = []
        for layer in range(spec.layers):
            prefix = f"model.layers.{layer}"
            before = RmsNorm(weights.take(f"{prefix}.input_layernorm.weight", (spec.hidden,)), spec.norm_eps)
            between = RmsNorm(weights.take(f"{prefix}.post_attention_layernorm.weight", (spec.hidden,)), spec.norm_eps)
            attention = GqaAttention(weights, layer, spec, spec.attention, like)
            self._layers.append((before, attention, between, feed_forward(weights, layer, spec, like)))

    @property
    def kv_shape(self) -> KvShape:
        attention = self.spec.attention
        assert isinstance(attention, GqaSpec)
        return KvShape(self.spec.layers, gqa_row(attention.kv_heads, attention.head_dim, self.dtype))

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        """Logits [wanted rows, vocab] of the query rows numbered in `wanted` (None: all)."""
        rotation = self._rope.at(view.segments.positions)
        x = self._vocabulary.embed(token_ids)
        for before, attention, between, mlp in self._layers:
            x = x + attention(before(x), rotation, view)
            x = x + mlp(between(x))
        return self._vocabulary.logits(x if wanted is None else x[wanted])
