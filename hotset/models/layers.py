"""The building blocks of DSA and GQA decoders: embedding, norms, linear layers, MLP, MoE, LM head."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.experts import experts
from hotset.kernels.linear import Fp32Linear, Linear
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.route import Routes, RoutingRule, route
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.swiglu import swiglu
from hotset.kernels.weights import Weight, output_range
from hotset.models.beside import beside
from hotset.models.checkpoint.weights import WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.feed_forward import MlpTensors, MoeSpec, MoeTensors
from hotset.models.formats.weight_format import QuantisedFormat
from hotset.models.model_tensors import end_tensors, feed_forward_tensors
from hotset.models.spec import ModelSpec
from hotset.models.split import Split
from hotset.models.tensors import WeightTensor


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


def empty_weight(
    weights: WeightSource, names: Iterable[str], shape: tuple[int, ...], boundaries: Iterable[int]
) -> Weight:
    """Returns memory for a weight [..., out, in], for the tensors `names` or a part of them.

    An operation needs one format for its weights: that of the tensors if all of them have the same, else the model's
    dtype. A block of scales begins at each of the `boundaries` between outputs.
    """
    first, *others = names
    format = weights.format_of(first)
    if isinstance(format, QuantisedFormat) and all(weights.format_of(name) == format for name in others):
        return format.codec().empty(shape, weights.device, boundaries)
    return torch.empty(shape, dtype=weights.dtype, device=weights.device)


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


@dataclass(frozen=True, slots=True)
class ShardLoader:
    """Loads tensors: a source of weights, the part of the model that this worker loads from it, and the collectives of
    its ranks."""

    weights: WeightSource
    split: Split
    collectives: Collectives

    @property
    def tp_collectives(self) -> Collectives:
        """The collectives of the ranks that divide heads, columns and vocabulary. Data parallel ranks do not."""
        return self.collectives if self.split.tp_size > 1 else SINGLE_RANK

    def load(self, tensor: WeightTensor) -> Tensor:
        """Returns this rank's slice in the model's dtype."""
        return self.weights.load(tensor.name, tensor.shape, tensor_slice=tensor.tensor_slice)

    def load_bias(self, tensor: WeightTensor) -> Tensor:
        """Returns the bias of a tensor whose outputs are not divided."""
        return self.weights.load(tensor.bias_name, tensor.shape[:1])

    def load_fp32(self, tensor: WeightTensor) -> Tensor:
        """Loads a tensor in the accumulation dtype (fp32, or fp64 in a float64 model), not in the model's dtype."""
        out = torch.empty(tensor.local_shape, dtype=accumulation_dtype(self.weights.dtype), device=self.weights.device)
        return self.weights.load(tensor.name, tensor.shape, out=out, tensor_slice=tensor.tensor_slice)

    def load_matrix(self, tensor: WeightTensor, out: Weight | None = None) -> Weight:
        """Returns this rank's slice in the format in which the checkpoint stores it."""
        return self.weights.load_weight(tensor.name, tensor.shape, out=out, tensor_slice=tensor.tensor_slice)

    def norm(self, tensor: WeightTensor, eps: float) -> RmsNorm:
        return RmsNorm(self.load(tensor), eps)

    def row_parallel(self, tensor: WeightTensor) -> RowParallelLinear:
        """Loads a matrix whose inputs are divided among tensor parallel ranks."""
        bias = self.load_bias(tensor) if tensor.bias else None
        return RowParallelLinear(self.load_matrix(tensor), bias, self.tp_collectives)

    def merged_linear(self, tensors: Sequence[WeightTensor]) -> Linear:
        """Merges several matrices along their outputs, so that one matrix product computes all of them."""
        bounds = list(pairwise([0, *accumulate(tensor.local_shape[0] for tensor in tensors)]))
        boundaries = (*(first for first, _ in bounds), *(tensor.first_boundary for tensor in tensors))
        shape = (bounds[-1][1], tensors[0].shape[1])
        weight = empty_weight(self.weights, [tensor.name for tensor in tensors], shape, boundaries)
        for tensor, (first, last) in zip(tensors, bounds, strict=True):
            self.load_matrix(tensor, output_range(weight, first, last))
        if not any(tensor.bias for tensor in tensors):
            return Linear(weight)
        bias = torch.zeros(shape[0], dtype=self.weights.dtype, device=self.weights.device)
        for tensor, (first, last) in zip(tensors, bounds, strict=True):
            if tensor.bias:
                part, tensor_slice = bias[first:last], tensor.tensor_slice
                self.weights.load(tensor.bias_name, tensor.shape[:1], out=part, tensor_slice=tensor_slice)
        return Linear(weight, bias)


class Mlp:
    """Computes down(silu(gate(x)) * up(x)). Tensor parallel ranks divide the columns of gate and up."""

    def __init__(self, loader: ShardLoader, tensors: MlpTensors) -> None:
        self._gate_up = loader.merged_linear([tensors.gate, tensors.up])
        self._down = loader.row_parallel(tensors.down)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [tokens, hidden]
        """Ignores `seats`: padding hardly costs time here, because the weights are read once for all tokens."""
        return self._down(swiglu(self._gate_up(x)))

    def idle(self, no_tokens: Tensor) -> None:
        """Does nothing: data parallel ranks compute their MLPs for themselves."""


class Moe:
    """Routed and shared experts. Each token uses `experts_per_token` experts of its best `topk_group` groups.

    Every rank holds some consecutive experts and the whole router. A token's output is the sum of the outputs of all
    ranks. Tensor parallel ranks have the same tokens, so all of them compute the same routes. A data parallel rank
    computes the routes of its own tokens, and sends them to the other ranks together with the tokens. Tokens with seat
    EMPTY are padding. They are routed to no expert, so that no weights are read for them. If `seats` is None, no token
    is padding.
    """

    def __init__(self, loader: ShardLoader, spec: MoeSpec, tensors: MoeTensors) -> None:
        split = loader.split
        self._rule = RoutingRule(
            experts=spec.experts,
            experts_per_token=spec.experts_per_token,
            groups=spec.groups,
            topk_group=spec.topk_group,
            normalise=spec.normalise,
            scale=spec.scale,
        )
        self._router = loader.load_fp32(tensors.router)
        self._correction = loader.load_fp32(tensors.correction)
        self._data_parallel, self._collectives = split.dp_size > 1, loader.collectives
        self._first_expert = split.experts(spec.experts).start
        self._gate_up, self._down = _load_experts(loader, spec, tensors.expert)
        self._shared: Mlp | None = None
        if tensors.shared is not None:
            # Tensor parallel ranks add the partial sums of shared and routed experts before one common all_reduce.
            self._shared = Mlp(replace(loader, collectives=SINGLE_RANK), tensors.shared)

    def __call__(self, x: Tensor, seats: Tensor | None = None) -> Tensor:  # [tokens, hidden]
        # Shared experts do not depend on the routing, so both can run at the same time.
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
        gathered = self._collectives.all_gather_tokens(x, routes.expert_ids, routes.weights)
        return self._collectives.reduce_scatter(self._local_experts(*gathered))

    def idle(self, no_tokens: Tensor) -> None:
        """Data parallel: runs this rank's experts for the tokens of other ranks."""
        self.routed(no_tokens, None)

    def _routes(self, x: Tensor, seats: Tensor | None) -> Routes:
        return route(x, self._router, self._correction, self._rule, seats)

    def _local_experts(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of this rank's experts for each token. `expert_ids` may name experts of other ranks."""
        return experts(x, expert_ids, weights, self._gate_up, self._down, self._rule.experts, self._first_expert)


def _load_experts(loader: ShardLoader, spec: MoeSpec, expert: MlpTensors) -> tuple[Weight, Weight]:
    """Loads this rank's experts. Returns the weights of gate and up [experts, 2 * width, hidden], and those of down
    [experts, hidden, width]."""
    local, (hidden, width) = loader.split.experts(spec.experts), expert.down.shape
    # Experts of other ranks count too: all ranks compute in the same format.
    names = [tensor.expert_name(number) for number in range(spec.experts) for tensor in expert]
    gate_up = empty_weight(loader.weights, names, (len(local), 2 * width, hidden), [width])
    down = empty_weight(loader.weights, names, (len(local), hidden, width), [])
    for index, number in enumerate(local):
        loader.load_matrix(expert.gate.of_expert(number), output_range(gate_up[index], 0, width))
        loader.load_matrix(expert.up.of_expert(number), output_range(gate_up[index], width, 2 * width))
        loader.load_matrix(expert.down.of_expert(number), down[index])
    return gate_up, down


def feed_forward(loader: ShardLoader, layer: int, spec: ModelSpec) -> Mlp | Moe:
    """Builds the layer's MLP or MoE, according to the spec."""
    tensors = feed_forward_tensors(spec, layer, loader.split)
    if isinstance(tensors, MlpTensors):
        return Mlp(loader, tensors)
    assert spec.moe is not None
    return Moe(loader, spec.moe, tensors)


class Embedding:
    """The token embedding. Tensor parallel ranks divide the vocabulary."""

    def __init__(self, loader: ShardLoader, spec: ModelSpec) -> None:
        self.weight = _vocabulary_shard(loader, end_tensors(spec, loader.split).embedding)
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
        tensors = end_tensors(spec, loader.split)
        self.norm = loader.norm(tensors.norm, spec.norm_eps)
        self._product = Linear(_vocabulary_shard(loader, tensors.head) if tied is None else tied)
        self._collectives = loader.tp_collectives
        self._vocab = spec.vocab

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, vocab], accumulation dtype
        return self.logits(self.norm(x))

    def logits(self, normed: Tensor) -> Tensor:
        """Returns the logits of hidden states to which a norm was already applied."""
        logits = self._collectives.all_gather_columns(self._product(normed))
        return logits[:, : self._vocab].to(accumulation_dtype(normed.dtype))


def _vocabulary_shard(loader: ShardLoader, tensor: WeightTensor) -> Tensor:
    """Loads this rank's vocabulary entries [shard size, hidden], padded with zeros to the same size on every rank."""
    weight = loader.load(tensor)
    padding = loader.split.vocabulary_shard_size(tensor.shape[0]) - len(weight)
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
