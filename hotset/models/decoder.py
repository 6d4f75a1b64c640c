"""A whole model: embedding, layers of attention and feed-forward, logits. The spec says which kind of each."""

from dataclasses import dataclass

from torch import Tensor

from hotset.kernels.rope import Rotation
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import WeightSource
from hotset.models.dsa import DsaAttention, dsa_kv_shape
from hotset.models.gqa import GqaAttention, gqa_kv_shape
from hotset.models.layers import Mlp, Moe, RmsNorm, Vocabulary, feed_forward
from hotset.models.rope import Rope
from hotset.models.spec import AS_COMPUTED, GqaSpec, ModelSpec, Storage


@dataclass(frozen=True, slots=True)
class _Layer:
    before: RmsNorm
    attention: GqaAttention | DsaAttention
    between: RmsNorm
    mlp: Mlp | Moe

    def __call__(
        self, x: Tensor, delta: Tensor | None, rotation: Rotation, view: View, selected: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream is x + delta: each norm makes the sum that the part before it left open.

        Returns both anew [rows, hidden], and the positions that a layer sharing this one's selection reuses.
        """
        x, normed = (x, self.before(x)) if delta is None else self.before.after_adding(x, delta)
        attended, selected = self.attention(normed, rotation, view, selected)
        x, normed = self.between.after_adding(x, attended)
        return x, self.mlp(normed, view.padded_seats), selected


class Decoder:
    """`forward` turns token ids into logits, reading and writing KV through the view."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, storage: Storage = AS_COMPUTED) -> None:
        """Takes every weight that the spec calls for, in the source's dtype and on its device."""
        self.spec = spec
        self._storage = storage
        self._vocabulary = Vocabulary(weights, spec)
        like = self._vocabulary.embedding
        self.dtype, self.device = like.dtype, like.device
        self._rope = Rope(spec.rope, like.dtype, like.device)
        self._layers = [_make_layer(weights, layer, spec, like) for layer in range(spec.layers)]

    @property
    def kv_shape(self) -> KvShape:
        attention = self.spec.attention
        if isinstance(attention, GqaSpec):
            return gqa_kv_shape(self.spec.layers, attention, self.dtype)
        return dsa_kv_shape(self.spec.layers, attention, self.dtype, self._storage)

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        """Logits [wanted rows, vocab] of the query rows numbered in `wanted` (None: all)."""
        rotation = self._rope.at(view.segments.positions)
        x = self._vocabulary.embed(token_ids)
        delta: Tensor | None = None
        selected: Tensor | None = None
        for layer in self._layers:
            x, delta, selected = layer(x, delta, rotation, view, selected)
        x = x if delta is None else x + delta
        return self._vocabulary.logits(x if wanted is None else x[wanted])


def _make_layer(weights: WeightSource, layer: int, spec: ModelSpec, like: Tensor) -> _Layer:
    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights.take(f"model.layers.{layer}.{name}.weight", (spec.hidden,)), spec.norm_eps)

    attention: GqaAttention | DsaAttention
    if isinstance(spec.attention, GqaSpec):
        attention = GqaAttention(weights, layer, spec, spec.attention, like)
    else:
        attention = DsaAttention(weights, layer, spec, spec.attention)
    mlp = feed_forward(weights, layer, spec, like)
    return _Layer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp)
