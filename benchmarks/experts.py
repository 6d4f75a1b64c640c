"""Measures the experts and the routing of one MoE layer on one GPU, against the copy bandwidth and against torch.

    python benchmarks/experts.py --json experts.json --png experts.png

The layer has 64 experts of 3 x 4096 x 1536 weights in bf16; each token uses 6 random experts. GB/s counts the weights
of every used expert once. "of copy" is the share of the copy bandwidth measured in the same run. The columns "torch
..." show the same layer with `torch.grouped_mm`, and routing in torch ops. From batch 1024 on, Hotset uses
`torch.grouped_mm` too. The L2 is flushed before every call. Bar (required result): 70 % of the copy bandwidth at batch
16 and 64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from gpu_timing import copy_bandwidth, seconds_of
from op_runner import OpBenchmark, run
from report import Bar, Row
from torch import Tensor

from hotset.kernels.experts import experts
from hotset.kernels.route import RoutingRule, reference, route

EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, WIDTH = 64, 6, 4096, 1536
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
BATCHES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
COPY_BAR, BAR_BATCHES = 0.70, (16, 64)
MAX_ROUTED_BATCH = 1024  # routing is not timed in larger batches
RULE = RoutingRule(EXPERTS, EXPERTS_PER_TOKEN, scale=2.5)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one MoE layer."""

    gate_up: Tensor
    down: Tensor
    router: Tensor
    correction: Tensor


@dataclass(frozen=True)
class LayerInput:
    """The tokens of one step and the experts they use."""

    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def num_used(self) -> int:
        return self.expert_ids.unique().numel()


@cache
def make_layer() -> LayerWeights:
    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda").mul_(shape[-1] ** -0.5)

    gate_up, down = values(EXPERTS, 2 * WIDTH, HIDDEN), values(EXPERTS, HIDDEN, WIDTH)
    router = values(EXPERTS, HIDDEN, dtype=torch.float32)
    return LayerWeights(gate_up, down, router, torch.rand(EXPERTS, device="cuda") * 0.01)


def make_inputs(batch: int) -> list[LayerInput]:
    """Returns several inputs of the same size. Large batches have fewer inputs."""
    inputs = []
    for _ in range(4 if batch <= 1024 else 2):
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        expert_ids = torch.rand(batch, EXPERTS, device="cuda").argsort(1)[:, :EXPERTS_PER_TOKEN].contiguous()
        inputs.append(LayerInput(x, expert_ids, torch.rand(batch, EXPERTS_PER_TOKEN, device="cuda")))
    return inputs


def experts_seconds(implementation: Callable[..., object], layer: LayerWeights, inputs: list[LayerInput]) -> float:
    return seconds_of(
        [partial(implementation, i.x, i.expert_ids, i.weights, layer.gate_up, layer.down) for i in inputs]
    )


def route_seconds(implementation: Callable[..., object], layer: LayerWeights, inputs: list[LayerInput]) -> float:
    return seconds_of([partial(implementation, i.x, layer.router, layer.correction, RULE, None) for i in inputs])


def measure(batch: int) -> Row:
    from hotset.kernels.experts.triton_impl import experts_by_torch

    layer, inputs = make_layer(), make_inputs(batch)
    used = sum(i.num_used for i in inputs) / len(inputs)
    bandwidth, flops = copy_bandwidth(), 2 * batch * EXPERTS_PER_TOKEN * 3 * HIDDEN * WIDTH
    hotset_s, torch_s = (experts_seconds(function, layer, inputs) for function in (experts, experts_by_torch))
    route_us: list[Any] = ["", ""]
    if batch <= MAX_ROUTED_BATCH:
        route_us = [route_seconds(function, layer, inputs) * 1e6 for function in (route, reference.route)]
    return {
        "batch": batch,
        "used experts": round(used, 1),
        "us": round(hotset_s * 1e6),
        "GB/s": round(used * EXPERT_BYTES / hotset_s / 1e9),
        "of copy": used * EXPERT_BYTES / hotset_s / bandwidth,
        "TFLOP/s": flops / hotset_s / 1e12,
        "torch us": round(torch_s * 1e6),
        "torch of copy": used * EXPERT_BYTES / torch_s / bandwidth,
        "route us": route_us[0],
        "torch route us": route_us[1],
    }


def bars(rows: list[Row]) -> list[Bar]:
    return [
        Bar(f"batch {row['batch']}: of copy", row["of copy"], COPY_BAR, at_least=True)
        for row in rows
        if row["batch"] in BAR_BATCHES
    ]


OP = OpBenchmark(
    doc=__doc__,
    title=f"Experts: {EXPERTS_PER_TOKEN} of {EXPERTS}, {HIDDEN} x {WIDTH}, bf16",
    cases=BATCHES,
    quick=(1, 16, 64, 256),
    measure=measure,
    bars=bars,
    drawn=("of copy", "torch of copy"),
)

if __name__ == "__main__":
    run(OP)
