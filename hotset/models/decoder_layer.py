"""One decoder layer: attention and MLP, each with its norm."""

from dataclasses import dataclass

from torch import Tensor

from hotset.kernels.rope import Rotation
from hotset.memory.view import View
from hotset.models.dsa import DsaAttention
from hotset.models.gqa import GqaAttention
from hotset.models.layers import Mlp, Moe, RmsNorm, ShardLoader, feed_forward
from hotset.models.spec import GqaSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RmsNorm
    attention: GqaAttention | DsaAttention
    post_attention_norm: RmsNorm
    mlp: Mlp | Moe

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        view: View,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes one layer. The residual stream is x + delta; the next norm computes that sum.

        Returns the new x and delta [tokens, hidden], and the selected positions, which the next layers of the index
        group reuse (None in a GQA model).
        """
        x, normed = (x, self.input_norm(x)) if delta is None else self.input_norm.add_then_norm(x, delta)
        attended, selected = self.attention(normed, rotation, view, selected)
        x, normed = self.post_attention_norm.add_then_norm(x, attended)
        return x, self.mlp(normed, view.padded_seats), selected


def build_layer(loader: ShardLoader, layer: int, local_layer: int, spec: ModelSpec) -> DecoderLayer:
    """Builds layer `layer` of the whole model, which this worker's views number `local_layer`."""

    def norm(name: str) -> RmsNorm:
        return RmsNorm(loader.weights.load(f"model.layers.{layer}.{name}.weight", (spec.hidden,)), spec.norm_eps)

    input_norm = norm("input_layernorm")
    like = input_norm.weight
    attention: GqaAttention | DsaAttention
    if isinstance(spec.attention, GqaSpec):
        attention = GqaAttention(loader, layer, local_layer, spec, spec.attention, like)
    else:
        attention = DsaAttention(loader, layer, local_layer, spec, spec.attention, like)
    return DecoderLayer(
        input_norm, attention, norm("post_attention_layernorm"), feed_forward(loader, layer, spec, like)
    )
