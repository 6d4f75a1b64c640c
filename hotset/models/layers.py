"""The parts that both decoders are made of: embedding, norms, feed-forward layers, the head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.experts import experts
from hotset.kernels.linear import Linear
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.route import RoutingRule, route
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.swiglu import swiglu
from hotset.models.checkpoint.source import Elsewhere, TensorSlice, WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.spec import ModelSpec, MoeSpec
from hotset.models.split import Split


@dataclass(frozen=True, slots=True)
class Loader:
    """What a part of the model is made from: a source of weights, which of them this worker holds, and its peers."""

    weights: WeightSource
    split: Split
    collectives: Collectives

    @property
    def dividing_heads(self) -> Collectives:
        """Those that share heads, widths and vocabulary: nobody, where ranks divide requests."""
        return self.collectives if self.split.tp_size > 1 else SINGLE_RANK


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


def part(dim: int, run: range, width: int = 1) -> TensorSlice:
    """Of a tensor that has `width` entries along `dim` for each head or column: those of a run of them."""
    return TensorSlice(dim, run.start * width, run.stop * width)


@dataclass(frozen=True, slots=True)
class FusedSlice:
    """Rows of one weight, which a fused one takes in."""

    name: str  # without .weight or .bias
    rows: int  # of the whole weight
    part: TensorSlice

    @property
    def taken(self) -> int:
        return self.part.last - self.part.first


def fused(weights: WeightSource, stretches: list[FusedSlice], columns: int, bias: bool, like: Tensor) -> Linear:
    """Rows of several weights [rows, columns], one above the other: one product instead of several."""
    counts = [stretch.taken for stretch in stretches]
    weight = torch.empty(sum(counts), columns, dtype=like.dtype, device=like.device)
    for stretch, out in zip(stretches, weight.split(counts), strict=True):
        weights.take(f"{stretch.name}.weight", (stretch.rows, columns), out=out, part=stretch.part)
    if not bias:
        return Linear(weight)
    return Linear(weight, torch.cat([weights.take(f"{s.name}.bias", (s.rows,), part=s.part) for s in stretches]))


class SummedLinear:
    """A product whose inputs are divided among ranks: each has their columns of the weight. The shares are summed.

    The bias comes after the sum: every rank adds it to the same result, once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, collectives: Collectives) -> None:
        alone = collectives.size == 1
        self._share = Linear(weight, bias if alone else None)
        self._bias = None if alone else bias
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in: this rank's] -> [rows, out]
        out = self._collectives.all_reduce(self._share(x))
        return out if self._bias is None else out + self._bias


def take_wide(weights: WeightSource, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A weight that is kept in the accumulation dtype, never rounded to the model's."""
    return weights.take(name, shape, out=torch.empty(shape, dtype=accumulation_dtype(like.dtype), device=like.device))


class Mlp:
    """down(silu(gate(x)) * up(x)); of its width this rank has its share."""

    def __init__(self, loader: Loader, prefix: str, hidden: int, width: int, bias: bool, like: Tensor) -> None:
        weights, here = loader.weights, loader.split.tp_shard(width)
        gate_up = [FusedSlice(f"{prefix}.{name}", width, part(0, here)) for name in ("gate_proj", "up_proj")]
        self._gate_up = fused(weights, gate_up, hidden, bias, like)
        down = weights.take(f"{prefix}.down_proj.weight", (hidden, width), part=part(1, here))
        down_bias = weights.take(f"{prefix}.down_proj.bias", (hidden,)) if bias else None
        self._down = SummedLinear(down, down_bias, loader.dividing_heads)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [rows, hidden]
        """Padded rows cost nothing more here: the weights are read once for all."""
        return self._down(swiglu(self._gate_up(x)))


class Moe:
    """Routed experts plus shared ones. Each row chooses `chosen` experts within its best `chosen_groups` groups.

    This rank has a run of the experts and the whole router, so every rank knows where each row goes; what a row gets
    from its experts is the sum over ranks. `seats` [rows of all ranks that divide requests, else rows]: rows whose
    seat is EMPTY go to no expert, or experts would be read for nobody.
    """

    def __init__(self, loader: Loader, prefix: str, hidden: int, spec: MoeSpec, like: Tensor) -> None:
        weights, split = loader.weights, loader.split
        self._rule = RoutingRule(spec.experts, spec.chosen, spec.groups, spec.chosen_groups, spec.normalise, spec.scale)
        self._router = take_wide(weights, f"{prefix}.gate.weight", (spec.experts, hidden), like)
        self._correction = take_wide(weights, f"{prefix}.gate.e_score_correction_bias", (spec.experts,), like)
        self._data_parallel, self._collectives = split.dp_size > 1, loader.collectives
        here = split.experts(spec.experts)
        self._gate_up = torch.empty(len(here), 2 * spec.width, hidden, dtype=like.dtype, device=like.device)
        self._down = torch.empty(len(here), hidden, spec.width, dtype=like.dtype, device=like.device)
        elsewhere = Elsewhere(weights)
        for expert in range(spec.experts):
            source, at = (weights, expert - here.start) if expert in here else (elsewhere, 0)
            _take_expert(source, f"{prefix}.experts.{expert}", self._gate_up[at], self._down[at])
        self._number_here = None if len(here) == spec.experts else _numbers_here(here, spec.experts, like.device)
        self._shared: Mlp | None = None
        if spec.shared:
            # Its partial sum is added to that of the routed experts before the all_reduce.
            unsummed = replace(loader, collectives=SINGLE_RANK)
            width = spec.width * spec.shared
            self._shared = Mlp(unsummed, f"{prefix}.shared_experts", hidden, width, False, like)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [rows, hidden]
        if self._data_parallel:
            out = self.routed(x, seats)
            return out if self._shared is None else out + self._shared(x)
        out = self._own_experts(x, seats)
        return self._collectives.all_reduce(out if self._shared is None else out + self._shared(x))

    def routed(self, x: Tensor, seats: Tensor | None) -> Tensor:  # [own rows, hidden], perhaps of no row
        """Data parallel: what own rows get from all ranks' experts. Every rank serves every rank's rows."""
        return self._collectives.reduce_scatter(self._own_experts(self._collectives.all_gather_tokens(x), seats))

    def _own_experts(self, x: Tensor, seats: Tensor | None) -> Tensor:
        routes = route(x, self._router, self._correction, self._rule, seats)
        chosen = routes.chosen if self._number_here is None else self._number_here[routes.chosen]
        return experts(x, chosen, routes.weights, self._gate_up, self._down)


def _take_expert(weights: WeightSource, name: str, gate_up: Tensor, down: Tensor) -> None:
    hidden, width = down.shape
    gate, up = gate_up.split(width)
    weights.take(f"{name}.gate_proj.weight", (width, hidden), out=gate)
    weights.take(f"{name}.up_proj.weight", (width, hidden), out=up)
    weights.take(f"{name}.down_proj.weight", (hidden, width), out=down)


def _numbers_here(here: range, experts: int, device: torch.device) -> Tensor:
    """[experts + 1] int64: the number of each expert among those `here`, EMPTY for others.

    So also for the choice EMPTY, which indexes the last entry.
    """
    numbers = torch.full((experts + 1,), EMPTY, dtype=torch.int64, device=device)
    numbers[here.start : here.stop] = torch.arange(len(here), device=device)
    return numbers


def feed_forward(loader: Loader, layer: int, spec: ModelSpec, like: Tensor) -> Mlp | Moe:
    """The layer's feed-forward part, as the spec says: dense or routed."""
    prefix = f"model.layers.{layer}.mlp"
    if spec.moe is not None and layer in spec.moe.layers:
        return Moe(loader, prefix, spec.hidden, spec.moe, like)
    return Mlp(loader, prefix, spec.hidden, spec.mlp_width, spec.mlp_bias, like)


class Embedding:
    """Token embedding; of its rows this rank has its share."""

    def __init__(self, loader: Loader, spec: ModelSpec) -> None:
        self.weight = _vocabulary_rows(loader, "model.embed_tokens.weight", spec)
        self._collectives = loader.dividing_heads
        self._first = loader.split.vocabulary(spec.vocab).start

    def __call__(self, token_ids: Tensor) -> Tensor:  # [rows] int64 -> [rows, hidden]
        if self._collectives.size == 1:
            return F.embedding(token_ids, self.weight)
        here = token_ids - self._first
        others = (here < 0) | (here >= self.weight.shape[0])
        found = F.embedding(here.masked_fill(others, 0), self.weight)
        return self._collectives.all_reduce(found.masked_fill(others[:, None], 0.0))


class Head:
    """Final norm and logits; of the vocabulary this rank scores its share."""

    def __init__(self, loader: Loader, spec: ModelSpec, tied: Tensor | None) -> None:
        """`tied`: the rows of the embedding, where they are here already and serve as the head too."""
        self._norm = RmsNorm(loader.weights.take("model.norm.weight", (spec.hidden,)), spec.norm_eps)
        name = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._product = Linear(_vocabulary_rows(loader, name, spec) if tied is None else tied)
        self._collectives = loader.dividing_heads
        self._vocab = spec.vocab

    def __call__(self, x: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab], accumulation dtype
        logits = self._collectives.all_gather_columns(self._product(self._norm(x)))
        return logits[:, : self._vocab].to(accumulation_dtype(x.dtype))


def _vocabulary_rows(loader: Loader, name: str, spec: ModelSpec) -> Tensor:
    """[rows, hidden], as many on every rank: zeros follow the last token."""
    here = loader.split.vocabulary(spec.vocab)
    rows = loader.weights.take(name, (spec.vocab, spec.hidden), part=part(0, here))
    padding = loader.split.vocabulary_shard_size(spec.vocab) - len(here)
    return F.pad(rows, (0, 0, 0, padding)) if padding else rows
