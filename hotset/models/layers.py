"""The parts that both decoders are made of: embedding, norms, feed-forward layers, the head."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.experts import experts
from hotset.kernels.linear import Linear
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.route import RoutingRule, route
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.swiglu import swiglu
from hotset.models.checkpoint.source import WeightSource
from hotset.models.spec import ModelSpec, MoeSpec


class RmsNorm:
    """x / rms(x) * weight; the mean square is taken in the accumulation dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:  # [..., width]
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and the norm of that."""
        return add_rms_norm(x, delta, self.weight, self.eps)


def fused(weights: WeightSource, names: list[str], rows: list[int], columns: int, like: Tensor) -> Tensor:
    """Several weights [rows[i], columns] in one tensor, one above the other: one product instead of several."""
    whole = torch.empty(sum(rows), columns, dtype=like.dtype, device=like.device)
    for name, part in zip(names, whole.split(rows), strict=True):
        weights.take(name, tuple(part.shape), out=part)
    return whole


def fused_bias(weights: WeightSource, names: list[str], rows: list[int]) -> Tensor:
    return torch.cat([weights.take(name, (count,)) for name, count in zip(names, rows, strict=True)])


def take_wide(weights: WeightSource, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A weight that is kept in the accumulation dtype, never rounded to the model's."""
    return weights.take(name, shape, out=torch.empty(shape, dtype=accumulation_dtype(like.dtype), device=like.device))


class Mlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: WeightSource, prefix: str, hidden: int, width: int, bias: bool, like: Tensor) -> None:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up = fused(weights, [f"{name}.weight" for name in names], [width, width], hidden, like)
        gate_up_bias = fused_bias(weights, [f"{name}.bias" for name in names], [width, width]) if bias else None
        down_bias = weights.take(f"{prefix}.down_proj.bias", (hidden,)) if bias else None
        self._gate_up = Linear(gate_up, gate_up_bias)
        self._down = Linear(weights.take(f"{prefix}.down_proj.weight", (hidden, width)), down_bias)

    def __call__(self, x: Tensor, padded_seats: Tensor | None = None) -> Tensor:  # [rows, hidden]
        """Padded rows cost nothing more here: the weights are read once for all."""
        return self._down(swiglu(self._gate_up(x)))


class Moe:
    """Routed experts plus shared ones. Each row chooses `chosen` experts within its best `chosen_groups` groups."""

    def __init__(self, weights: WeightSource, prefix: str, hidden: int, spec: MoeSpec, like: Tensor) -> None:
        self._rule = RoutingRule(spec.experts, spec.chosen, spec.groups, spec.chosen_groups, spec.normalise, spec.scale)
        self._router = take_wide(weights, f"{prefix}.gate.weight", (spec.experts, hidden), like)
        self._correction = take_wide(weights, f"{prefix}.gate.e_score_correction_bias", (spec.experts,), like)
        shape = (spec.experts, 2 * spec.width, hidden)
        self._gate_up = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._down = torch.empty(spec.experts, hidden, spec.width, dtype=like.dtype, device=like.device)
        for expert in range(spec.experts):
            name = f"{prefix}.experts.{expert}"
            gate, up = self._gate_up[expert].split(spec.width)
            weights.take(f"{name}.gate_proj.weight", (spec.width, hidden), out=gate)
            weights.take(f"{name}.up_proj.weight", (spec.width, hidden), out=up)
            weights.take(f"{name}.down_proj.weight", (hidden, spec.width), out=self._down[expert])
        shared_width = spec.width * spec.shared
        self._shared = (
            Mlp(weights, f"{prefix}.shared_experts", hidden, shared_width, False, like) if spec.shared else None
        )

    def __call__(self, x: Tensor, padded_seats: Tensor | None = None) -> Tensor:  # [rows, hidden]
        """Rows whose seat is EMPTY go to no expert, or experts would be read for nobody."""
        routes = route(x, self._router, self._correction, self._rule, padded_seats)
        out = experts(x, routes.chosen, routes.weights, self._gate_up, self._down)
        return out if self._shared is None else out + self._shared(x)


def feed_forward(weights: WeightSource, layer: int, spec: ModelSpec, like: Tensor) -> Mlp | Moe:
    """The layer's feed-forward part, as the spec says: dense or routed."""
    prefix = f"model.layers.{layer}.mlp"
    if spec.moe is not None and layer in spec.moe.layers:
        return Moe(weights, prefix, spec.hidden, spec.moe, like)
    return Mlp(weights, prefix, spec.hidden, spec.mlp_width, spec.mlp_bias, like)


class Vocabulary:
    """Token embedding at the bottom, final norm and logits at the top."""

    def __init__(self, weights: WeightSource, spec: ModelSpec) -> None:
        self.embedding = weights.take("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        self._norm = RmsNorm(weights.take("model.norm.weight", (spec.hidden,)), spec.norm_eps)
        tied = spec.tied_embeddings
        self._head = Linear(self.embedding if tied else weights.take("lm_head.weight", (spec.vocab, spec.hidden)))

    def embed(self, token_ids: Tensor) -> Tensor:  # [rows] int64 -> [rows, hidden]
        return F.embedding(token_ids, self.embedding)

    def logits(self, x: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab], accumulation dtype
        return self._head(self._norm(x)).to(accumulation_dtype(x.dtype))
