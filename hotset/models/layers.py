"""The building blocks of DSA and GQA decoders: embedding, norms, linear layers, MLP, MoE, LM head."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.experts import experts
from hotset.kernels.fp8 import Fp8Weight, Weight, common_block_rows
from hotset.kernels.linear import Fp32Linear, Linear
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.route import Routes, RoutingRule, route
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.swiglu import swiglu
from hotset.models.beside import beside
from hotset.models.checkpoint.source import SkippedWeights, WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.spec import ModelSpec, MoeSpec
from hotset.models.split import Split, TensorSlice


@dataclass(frozen=True, slots=True)
class ShardLoader:
    """A source of weights, the part of the model that this worker loads from it, and the collectives of its ranks."""

    weights: WeightSource
    split: Split
    collectives: Collectives

    @property
    def tp_collectives(self) -> Collectives:
        """The collectives of the ranks that divide heads, columns and vocabulary. Data parallel ranks do not."""
        return self.collectives if self.split.tp_size > 1 else SINGLE_RANK


class RmsNorm:
    """Computes x / rms(x) * weight; the mean square is taken in the accumulation dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:  # [..., width]
        return rms_norm(x, self.weight, self.eps)

    def add_then_norm(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + delta and the norm of that sum."""
        return add_rms_norm(x, delta, self.weight, self.eps)


def shard_slice(dim: int, shard: range, width: int = 1) -> TensorSlice:
    """Returns the slice for `shard` of a tensor that has `width` entries along `dim` for each head or column."""
    return TensorSlice(dim, shard.start * width, shard.stop * width)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's slice of the outputs of one weight [outputs, inputs], and of its bias if it has one."""

    name: str  # without .weight or .bias
    outputs: int  # in the whole weight
    tensor_slice: TensorSlice
    bias: bool = False

    @staticmethod
    def whole(name: str, outputs: int, bias: bool = False) -> "WeightShard":
        return WeightShard(name, outputs, TensorSlice(0, 0, outputs), bias)

    @property
    def size(self) -> int:
        return self.tensor_slice.size

    @property
    def first_boundary(self) -> int:
        """A divisor of the first output of every rank's slice, so that all ranks have blocks of the same size."""
        return 0 if self.size == self.outputs else self.size


def empty_weight(
    weights: WeightSource, names: Iterable[str], shape: tuple[int, ...], boundaries: Iterable[int], like: Tensor
) -> Weight:
    """Returns memory for a weight [..., out, in], for the tensors `names` or a part of them.

    It is in fp8 if all of them are, else in the dtype of `like`: an operation needs one format for its weights. A block
    of scales begins at each of the `boundaries` between outputs.
    """
    if all(weights.is_fp8(name) for name in names):
        return Fp8Weight.empty(shape, like.device, common_block_rows(*boundaries))
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def output_range(weight: Weight, first: int, last: int) -> Weight:
    """Returns a view of the outputs [first, last) of a weight [out, in]."""
    return weight.outputs(first, last) if isinstance(weight, Fp8Weight) else weight[first:last]


def merged_linear(weights: WeightSource, shards: list[WeightShard], inputs: int, like: Tensor) -> Linear:
    """Merges the shards of several weights along their outputs, so that one matrix product computes all of them."""
    names = [f"{shard.name}.weight" for shard in shards]
    bounds = [0, *accumulate(shard.size for shard in shards)]
    boundaries = (*bounds[:-1], *(shard.first_boundary for shard in shards))
    weight = empty_weight(weights, names, (bounds[-1], inputs), boundaries, like)
    for name, shard, (first, last) in zip(names, shards, pairwise(bounds), strict=True):
        out = output_range(weight, first, last)
        weights.load_weight(name, (shard.outputs, inputs), out=out, tensor_slice=shard.tensor_slice)
    if not any(shard.bias for shard in shards):
        return Linear(weight)
    bias = torch.zeros(bounds[-1], dtype=like.dtype, device=like.device)
    for shard, (first, last) in zip(shards, pairwise(bounds), strict=True):
        if shard.bias:
            out_bias = bias[first:last]
            weights.load(f"{shard.name}.bias", (shard.outputs,), out=out_bias, tensor_slice=shard.tensor_slice)
    return Linear(weight, bias)


class RowParallelLinear:
    """A linear layer whose inputs are divided among ranks. all_reduce adds the partial results of the ranks.

    With several ranks, every rank adds the bias to that sum.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, collectives: Collectives) -> None:
        single_rank = collectives.size == 1
        self._product = Linear(weight, bias if single_rank else None)
        self._bias = None if single_rank else bias
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, this rank's inputs] -> [tokens, outputs]
        out = self._collectives.all_reduce(self._product(x))
        return out if self._bias is None else out + self._bias


def load_fp32(weights: WeightSource, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Loads a weight in the accumulation dtype (fp32, or fp64 in a float64 model), not in the model's dtype."""
    return weights.load(name, shape, out=torch.empty(shape, dtype=accumulation_dtype(like.dtype), device=like.device))


class Mlp:
    """Computes down(silu(gate(x)) * up(x)). Tensor parallel ranks divide the columns of gate and up."""

    def __init__(self, loader: ShardLoader, prefix: str, hidden: int, width: int, bias: bool, like: Tensor) -> None:
        weights, shard = loader.weights, loader.split.tp_shard(width)
        part = shard_slice(0, shard)
        gate_up = [WeightShard(f"{prefix}.{name}", width, part, bias) for name in ("gate_proj", "up_proj")]
        self._gate_up = merged_linear(weights, gate_up, hidden, like)
        down = weights.load_weight(f"{prefix}.down_proj.weight", (hidden, width), tensor_slice=shard_slice(1, shard))
        down_bias = weights.load(f"{prefix}.down_proj.bias", (hidden,)) if bias else None
        self._down = RowParallelLinear(down, down_bias, loader.tp_collectives)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [tokens, hidden]
        """Ignores `seats`: padding hardly costs time here, because the weights are read once for all tokens."""
        return self._down(swiglu(self._gate_up(x)))


class Moe:
    """Routed and shared experts. Each token uses `experts_per_token` experts of its best `topk_group` groups.

    Every rank holds some consecutive experts and the whole router. A token's output is the sum of the outputs of all
    ranks. Tensor parallel ranks have the same tokens, so all of them compute the same routes. A data parallel rank
    computes the routes of its own tokens, and sends them to the other ranks together with the tokens. Tokens with seat
    EMPTY are padding. They are routed to no expert, so that no weights are read for them. If `seats` is None, no token
    is padding.
    """

    def __init__(self, loader: ShardLoader, prefix: str, hidden: int, spec: MoeSpec, like: Tensor) -> None:
        weights, split = loader.weights, loader.split
        self._rule = RoutingRule(
            experts=spec.experts,
            experts_per_token=spec.experts_per_token,
            groups=spec.groups,
            topk_group=spec.topk_group,
            normalise=spec.normalise,
            scale=spec.scale,
        )
        self._router = load_fp32(weights, f"{prefix}.gate.weight", (spec.experts, hidden), like)
        self._correction = load_fp32(weights, f"{prefix}.gate.e_score_correction_bias", (spec.experts,), like)
        self._data_parallel, self._collectives = split.dp_size > 1, loader.collectives
        local = split.experts(spec.experts)
        # Experts of other ranks count too: all ranks compute in the same format.
        parts = ("gate_proj", "up_proj", "down_proj")
        names = [f"{prefix}.experts.{expert}.{part}.weight" for expert in range(spec.experts) for part in parts]
        gate_up_shape, down_shape = (len(local), 2 * spec.width, hidden), (len(local), hidden, spec.width)
        self._gate_up = empty_weight(weights, names, gate_up_shape, [spec.width], like)
        self._down = empty_weight(weights, names, down_shape, [], like)
        skipped = SkippedWeights(weights)
        for expert in range(spec.experts):
            source, index = (weights, expert - local.start) if expert in local else (skipped, 0)
            _load_expert(source, f"{prefix}.experts.{expert}", self._gate_up[index], self._down[index])
        self._first_expert = local.start
        self._shared: Mlp | None = None
        if spec.shared:
            # Tensor parallel ranks add the partial sums of shared and routed experts before one common all_reduce.
            without_reduce = replace(loader, collectives=SINGLE_RANK)
            width = spec.width * spec.shared
            self._shared = Mlp(without_reduce, f"{prefix}.shared_experts", hidden, width, False, like)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [tokens, hidden]
        # Shared experts need nothing of the routing, so both can run at the same time.
        shared = None if self._shared is None else beside(partial(self._shared, x), x.device)
        if self._data_parallel:
            out = self.routed(x, seats)
            return out if shared is None else out + shared.join()
        routes = self._routes(x, seats)
        out = self._local_experts(x, routes.expert_ids, routes.weights)
        return self._collectives.all_reduce(out if shared is None else out + shared.join())

    def routed(self, x: Tensor, seats: Tensor | None) -> Tensor:  # [own tokens, hidden]
        """Data parallel: returns the output of all ranks' routed experts for this rank's tokens.

        If any rank has tokens in a step, every rank must call this, because its experts compute all ranks' tokens.
        """
        routes = self._routes(x, seats)
        of_all_ranks = self._collectives.all_gather_tokens(x, routes.expert_ids, routes.weights)
        return self._collectives.reduce_scatter(self._local_experts(*of_all_ranks))

    def _routes(self, x: Tensor, seats: Tensor | None) -> Routes:
        return route(x, self._router, self._correction, self._rule, seats)

    def _local_experts(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of this rank's experts for each token. `expert_ids` may name experts of other ranks."""
        return experts(x, expert_ids, weights, self._gate_up, self._down, self._rule.experts, self._first_expert)


def _load_expert(weights: WeightSource, name: str, gate_up: Weight, down: Weight) -> None:
    hidden, width = down.shape
    weights.load_weight(f"{name}.gate_proj.weight", (width, hidden), out=output_range(gate_up, 0, width))
    weights.load_weight(f"{name}.up_proj.weight", (width, hidden), out=output_range(gate_up, width, 2 * width))
    weights.load_weight(f"{name}.down_proj.weight", (hidden, width), out=down)


def feed_forward(loader: ShardLoader, layer: int, spec: ModelSpec, like: Tensor) -> Mlp | Moe:
    """Builds the layer's MLP or MoE, according to the spec."""
    prefix = f"model.layers.{layer}.mlp"
    if spec.moe is not None and layer in spec.moe.layers:
        return Moe(loader, prefix, spec.hidden, spec.moe, like)
    return Mlp(loader, prefix, spec.hidden, spec.mlp_width, spec.mlp_bias, like)


class Embedding:
    """The token embedding. Tensor parallel ranks divide the vocabulary."""

    def __init__(self, loader: ShardLoader, spec: ModelSpec) -> None:
        self.weight = _vocabulary_shard(loader, "model.embed_tokens.weight", spec)
        self._collectives = loader.tp_collectives
        self._first = loader.split.vocabulary(spec.vocab).start

    def __call__(self, token_ids: Tensor) -> Tensor:  # [tokens] int64 -> [tokens, hidden]
        if self._collectives.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self._first
        not_local = (local_ids < 0) | (local_ids >= self.weight.shape[0])
        embedded = F.embedding(local_ids.masked_fill(not_local, 0), self.weight)
        return self._collectives.all_reduce(embedded.masked_fill(not_local[:, None], 0.0))


class LmHead:
    """The final norm and the LM head. Tensor parallel ranks divide the vocabulary, and each gathers all logits."""

    def __init__(self, loader: ShardLoader, spec: ModelSpec, tied: Tensor | None) -> None:
        """`tied` is the embedding's weight if the LM head shares it and this worker has already loaded it."""
        self.norm = RmsNorm(loader.weights.load("model.norm.weight", (spec.hidden,)), spec.norm_eps)
        name = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._product = Linear(_vocabulary_shard(loader, name, spec) if tied is None else tied)
        self._collectives = loader.tp_collectives
        self._vocab = spec.vocab

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, vocab], accumulation dtype
        return self.logits(self.norm(x))

    def logits(self, normed: Tensor) -> Tensor:
        """Returns the logits of hidden states to which a norm was already applied."""
        logits = self._collectives.all_gather_columns(self._product(normed))
        return logits[:, : self._vocab].to(accumulation_dtype(normed.dtype))


def _vocabulary_shard(loader: ShardLoader, name: str, spec: ModelSpec) -> Tensor:
    """Loads this rank's vocabulary entries [shard size, hidden], padded with zeros to the same size on every rank."""
    shard = loader.split.vocabulary(spec.vocab)
    weight = loader.weights.load(name, (spec.vocab, spec.hidden), tensor_slice=shard_slice(0, shard))
    padding = loader.split.vocabulary_shard_size(spec.vocab) - len(shard)
    return F.pad(weight, (0, 0, 0, padding)) if padding else weight


def tensors_and_linears(part: object) -> Iterator[Tensor | Linear]:
    """Yields every tensor and every linear layer in `part` and its attributes. Leaves out packed copies of weights."""
    children: list[object] = []
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Linear):
        yield part
        children = [part.weight, part.bias]
    elif isinstance(part, Fp32Linear):
        children = [part.weight]
    elif isinstance(part, list | tuple):
        children = list(part)
    elif is_dataclass(part):
        children = [getattr(part, field.name) for field in fields(part)]
    elif type(part).__module__.startswith("hotset.models."):
        children = list(vars(part).values())
    for child in children:
        yield from tensors_and_linears(child)


def pack_linears(part: object) -> None:
    """Adds a packed copy to the weight of every linear layer in `part` (`Linear.pack`)."""
    for layer in tensors_and_linears(part):
        if isinstance(layer, Linear):
            layer.pack()
