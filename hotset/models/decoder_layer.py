"""One decoder layer: attention and MLP, each with its norm."""

from dataclasses import dataclass

from torch import Tensor

from hotset.models.attention.kinds import KINDS
from hotset.models.layer_step import Attention, Layer, Residual, StepInputs
from hotset.models.layers import Mlp, Moe, RmsNorm, ShardLoader, feed_forward
from hotset.models.model_tensors import layer_norms
from hotset.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RmsNorm
    attention: Attention
    post_attention_norm: RmsNorm
    mlp: Mlp | Moe

    def __call__(self, residual: Residual, step: StepInputs, selected: Tensor | None) -> tuple[Residual, Tensor | None]:
        x, delta = residual
        x, normed = (x, self.input_norm(x)) if delta is None else self.input_norm.add_then_norm(x, delta)
        attended, selected = self.attention(normed, step, selected)
        x, normed = self.post_attention_norm.add_then_norm(x, attended)
        return Residual(x, self.mlp(normed, step.view.padded_seats)), selected

    def idle(self, no_tokens: Tensor) -> None:
        self.mlp.idle(no_tokens)


def build_layer(loader: ShardLoader, layer: int, local_layer: int, spec: ModelSpec) -> Layer:
    """Builds layer `layer` of the whole model, which this worker's views number `local_layer`."""
    norms = layer_norms(spec, layer)
    return DecoderLayer(
        loader.norm(norms.input, spec.norm_eps),
        KINDS[type(spec.attention)].layer(loader, layer, local_layer, spec),
        loader.norm(norms.post_attention, spec.norm_eps),
        feed_forward(loader, layer, spec),
    )
