"""The feed-forward parts of layers: dense MLPs, and mixtures of experts (MoE). This module does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from hotset.models.config_fields import MAX_PARTS, ConfigFields
from hotset.models.split import WHOLE_MODEL, Split, TensorSlice
from hotset.models.tensors import WeightTensor, shard_slice

ROUTED = "routed experts"  # the name of their products


class MlpTensors(NamedTuple):
    gate: WeightTensor
    up: WeightTensor
    down: WeightTensor

    def all(self) -> Iterable[WeightTensor]:
        return self


class MoeTensors(NamedTuple):
    router: WeightTensor
    correction: WeightTensor
    expert: MlpTensors  # of each expert: "*" in the names stands for its number
    shared: MlpTensors | None

    def all(self) -> Iterable[WeightTensor]:
        return (self.router, self.correction, *self.expert, *(self.shared or ()))


def mlp_tensors(
    prefix: str, hidden: int, width: int, split: Split, *, bias: bool = False, product: str = "dense MLP"
) -> MlpTensors:
    """Returns the tensors of an MLP. Tensor parallel ranks divide its columns: the outputs of gate and up."""
    rows, columns = (shard_slice(dim, split.tp_shard(width)) for dim in (0, 1))

    def tensor(name: str, shape: tuple[int, int], tensor_slice: TensorSlice) -> WeightTensor:
        return WeightTensor(f"{prefix}.{name}.weight", shape, product, tensor_slice, bias=bias)

    return MlpTensors(
        tensor("gate_proj", (width, hidden), rows),
        tensor("up_proj", (width, hidden), rows),
        tensor("down_proj", (hidden, width), columns),
    )


def mlp_step_values(width: int, split: Split, tokens: int) -> int:
    """Estimates how many values exist at once in an MLP, for `tokens` tokens of a step."""
    return 3 * tokens * len(split.tp_shard(width))


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts with group-limited, bias-corrected sigmoid routing, plus shared experts."""

    experts: int
    experts_per_token: int
    width: int
    shared: int  # shared experts, run as one MLP of width * shared
    groups: int
    topk_group: int
    scale: float
    normalise: bool
    layers: tuple[int, ...]  # the MoE layers; the others have a dense MLP

    @staticmethod
    def read(fields: ConfigFields, layers: int, *, groups: int, topk_group: int) -> "MoeSpec | None":
        """Reads config.json. The numbers are the defaults of absent fields. Returns None if no layer has experts."""
        sparse = _moe_layers(fields, layers)
        if not sparse:
            return None
        fields.choice("scoring_func", "sigmoid", ("sigmoid",))
        fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
        names = ("num_local_experts", "num_experts", "n_routed_experts")  # the first one that is present is read
        name = next((candidate for candidate in names if candidate in fields), "n_routed_experts")
        experts = fields.count(name, 256, high=MAX_PARTS)
        groups = fields.count("n_group", groups)
        topk_group = fields.count("topk_group", topk_group)
        experts_per_token = fields.count("num_experts_per_tok", 8)
        if experts % groups:
            fields.refuse("n_group", f"a divisor of {name} ({experts})")
        if groups > 1 and experts // groups < 2:
            fields.refuse("n_group", f"groups of at least two experts ({name} is {experts})")
        if topk_group > groups:
            fields.refuse("topk_group", f"at most n_group ({groups})")
        if experts_per_token > topk_group * (experts // groups):
            fields.refuse(
                "num_experts_per_tok",
                f"at most {topk_group * (experts // groups)}, the number of experts in topk_group groups",
            )
        return MoeSpec(
            experts=experts,
            experts_per_token=experts_per_token,
            width=fields.count("moe_intermediate_size", 2048),
            shared=fields.count("n_shared_experts", 1, low=0),
            groups=groups,
            topk_group=topk_group,
            scale=fields.number("routed_scaling_factor", 2.5),
            normalise=fields.flag("norm_topk_prob", True),
            layers=sparse,
        )

    @property
    def shared_width(self) -> int:
        """The columns of the MLP of all shared experts."""
        return self.width * self.shared

    def tensors(self, prefix: str, hidden: int, split: Split) -> MoeTensors:
        """Returns the tensors of one layer. Every rank holds the whole router and its own experts; tensor parallel
        ranks divide the shared experts."""
        tokens = split.dp_size * self.experts_per_token / self.experts  # data parallel ranks compute all ranks' tokens
        copies = len(split.experts(self.experts))
        expert = mlp_tensors(f"{prefix}.experts.*", hidden, self.width, WHOLE_MODEL, product=ROUTED)
        shared = mlp_tensors(f"{prefix}.shared_experts", hidden, self.shared_width, split, product="shared experts")
        return MoeTensors(
            router=WeightTensor(f"{prefix}.gate.weight", (self.experts, hidden), "router", storage="fp32"),
            correction=WeightTensor(f"{prefix}.gate.e_score_correction_bias", (self.experts,), storage="fp32"),
            expert=MlpTensors(*(replace(tensor, copies=copies, tokens=tokens) for tensor in expert)),
            shared=shared if self.shared else None,
        )

    def step_values(self, hidden: int, split: Split, tokens: int) -> int:
        """Estimates how many values exist at once in one layer, for `tokens` tokens of a step of one rank."""
        computed = tokens * split.dp_size  # data parallel ranks compute the tokens of all ranks
        return computed * (self.experts_per_token * (2 * hidden + 3 * self.width) + 2 * hidden)


def _moe_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    types = fields.layer_choices("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    dense = fields.count("first_k_dense_replace", 3, low=0)
    every = fields.count("moe_layer_freq", 1)
    return tuple(layer for layer in range(dense, layers) if layer % every == 0)
