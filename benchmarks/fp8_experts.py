"""Measures experts with fp8 weights on one GPU, against the copy bandwidth, the fp8 matrix rate and bf16.

    python benchmarks/fp8_experts.py --json fp8_experts.json

The GPU is one rank of eight of DeepSeek-V3.2: it holds 32 of 256 experts of 3 x 7168 x 2048 weights. A batch has the
tokens of all ranks. Each token uses 8 random experts, of which one on average is on this rank. The first tokens of
every result are compared with the reference before anything is timed. There are two limits: the time that the used
experts' bytes take at the copy bandwidth, and the time that the products take at the matrix rate. "of limit" is the
longer one as a share of the measured time. Bars: 80 % of the bandwidth, or 50 % of the matrix rate (a product of 8192 x
8192 x 8192 with one scale per tensor). The L2 is flushed before every call. The columns "sort" to "sum" are the times
of the five launches, each measured alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_timing import copy_bandwidth, seconds_of
from op_runner import OpBenchmark, run, us
from report import Bar, Row
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.experts import experts, reference
from hotset.kernels.fp8 import E4M3_MAX, Fp8Weight

if TYPE_CHECKING:
    from hotset.kernels.experts.triton_fp8 import Tiles

EXPERTS, LOCAL_EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, WIDTH = 256, 32, 8, 7168, 2048
BATCHES = (16, 64, 128, 256, 512, 1024, 2048, 8192, 16384)  # more tokens would be computed in parts (MAX_PAIRS)
CHECKED_TOKENS = 48
MAX_ERROR = 2e-2  # relative; tests/kernels/fp8_experts_model.py derives it
BANDWIDTH_BAR, MATRIX_BAR = 0.8, 0.5


@dataclass(frozen=True)
class Layer:
    """The routed experts of one rank, in fp8, and the same in bf16."""

    gate_up: Fp8Weight
    down: Fp8Weight
    plain_gate_up: Tensor
    plain_down: Tensor


@dataclass(frozen=True)
class LayerInput:
    """The tokens of one step of all ranks. Experts of other ranks are EMPTY."""

    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.expert_ids, self.weights

    def first(self, tokens: int) -> "LayerInput":
        return LayerInput(self.x[:tokens], self.expert_ids[:tokens], self.weights[:tokens])

    @property
    def pairs(self) -> int:
        return int((self.expert_ids != EMPTY).sum())

    @property
    def used_experts(self) -> int:
        return self.expert_ids[self.expert_ids != EMPTY].unique().numel()


def make_weight(*shape: int) -> Fp8Weight:
    weight = Fp8Weight.empty(shape, torch.device("cuda"))
    for codes in weight.codes:  # one expert at a time: the values take four times the memory of the codes
        codes.copy_(torch.randn(codes.shape, device="cuda").mul_(100).clamp_(-E4M3_MAX, E4M3_MAX))
    weight.scales.uniform_(0.5, 2).mul_(shape[-1] ** -0.5 / 100)
    return weight


@cache
def make_layer() -> Layer:
    gate_up, down = make_weight(LOCAL_EXPERTS, 2 * WIDTH, HIDDEN), make_weight(LOCAL_EXPERTS, HIDDEN, WIDTH)
    plain = [
        torch.stack([weight[expert].dequantised(torch.bfloat16) for expert in range(LOCAL_EXPERTS)])
        for weight in (gate_up, down)
    ]
    return Layer(gate_up, down, *plain)


def make_inputs(batch: int) -> list[LayerInput]:
    """Returns several inputs of the same size. Large batches have one input."""
    inputs = []
    for _ in range(4 if batch <= 1024 else 1):
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        expert_ids = torch.rand(batch, EXPERTS, device="cuda").argsort(1)[:, :EXPERTS_PER_TOKEN]
        expert_ids = torch.where(expert_ids < LOCAL_EXPERTS, expert_ids, EMPTY)
        inputs.append(LayerInput(x, expert_ids, torch.rand(batch, EXPERTS_PER_TOKEN, device="cuda")))
    return inputs


def expected_output(layer: Layer, layer_input: LayerInput) -> Tensor:
    """Returns the reference's result for the first tokens."""
    return reference.experts(*layer_input.first(CHECKED_TOKENS).arguments, layer.gate_up, layer.down)


def check(out: Tensor, expected: Tensor) -> None:
    """Raises ArithmeticError if the first tokens of a result differ from `expected` by more than MAX_ERROR."""
    difference = out[: len(expected)].double() - expected.double()
    error = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected.double()))
    if not error <= MAX_ERROR:  # also if it is NaN
        raise ArithmeticError(f"batch {len(out)}: relative error {error:.1e}, more than {MAX_ERROR}")


@cache
def fp8_matrix_rate() -> float:
    """Returns the FLOP per second of a large product of fp8 codes with one scale per tensor."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one, recipe = torch.ones(1, device="cuda"), F.ScalingType.TensorWise
    call = partial(F.scaled_mm, a, b.t(), one, recipe, one, recipe, output_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * size**3 / seconds_of([call], cold=False)


def limit_seconds(layer: Layer, inputs: list[LayerInput]) -> tuple[float, float]:
    """Returns the seconds of a call's bytes at the copy bandwidth, and of its products at the matrix rate."""
    used = sum(i.used_experts for i in inputs) / len(inputs)
    pairs = sum(i.pairs for i in inputs) / len(inputs)
    expert_bytes = (layer.gate_up.nbytes + layer.down.nbytes) / LOCAL_EXPERTS
    return used * expert_bytes / copy_bandwidth(), pairs * 6 * HIDDEN * WIDTH / fp8_matrix_rate()


def mean_pairs(batch: int) -> int:
    """Returns the expected number of pairs per expert."""
    return -(-batch * EXPERTS_PER_TOKEN // EXPERTS)


def launches(layer: Layer, layer_input: LayerInput, tiles: "Tiles") -> dict[str, Callable[[], Any]]:
    """Returns the launches of one call, each on the results of the launches before it."""
    from hotset.kernels.experts import triton_fp8 as impl

    x, expert_ids, weights = layer_input.arguments
    sort = partial(impl.sort_by_expert, expert_ids, LOCAL_EXPERTS, tiles.block_pairs)
    by_expert = sort()
    quantise = partial(impl.quantise_pairs, x, by_expert)
    slots = impl.slots_for(mean_pairs(len(x)), LOCAL_EXPERTS, tiles.block_pairs)
    gate_up = partial(impl.activation_of, quantise(), by_expert, layer.gate_up, x.dtype, tiles, slots)
    down = partial(impl.results_of, gate_up(), by_expert, layer.down, x.dtype, tiles, slots)
    total = partial(impl.weighted_sum, down(), by_expert, weights)
    return {"sort": sort, "quantise": quantise, "gate_up": gate_up, "down": down, "sum": total}


def measure(batch: int) -> Row:
    from hotset.kernels.experts.triton_fp8 import tiles_for

    layer, inputs = make_layer(), make_inputs(batch)
    call = partial(experts, routed_experts=EXPERTS)
    for layer_input in inputs:
        check(call(*layer_input.arguments, layer.gate_up, layer.down), expected_output(layer, layer_input))
    seconds = seconds_of([partial(call, *i.arguments, layer.gate_up, layer.down) for i in inputs])
    plain = seconds_of([partial(call, *i.arguments, layer.plain_gate_up, layer.plain_down) for i in inputs])
    tiles = tiles_for(mean_pairs(batch))
    parts = {name: us(launch) for name, launch in launches(layer, inputs[0], tiles).items()}
    by_bytes, by_products = limit_seconds(layer, inputs)
    return {
        "batch": batch,
        "used experts": sum(i.used_experts for i in inputs) / len(inputs),
        "us": seconds * 1e6,
        "TB/s": by_bytes * copy_bandwidth() / seconds / 1e12,
        "TFLOP/s": by_products * fp8_matrix_rate() / seconds / 1e12,
        "limit": "bytes" if by_bytes >= by_products else "products",
        "of limit": max(by_bytes, by_products) / seconds,
        "bf16 us": plain * 1e6,
        **parts,
    }


def bars(rows: list[Row]) -> list[Bar]:
    limits = {"bytes": BANDWIDTH_BAR, "products": MATRIX_BAR}
    return [
        Bar(f"{row['batch']} tokens, limit {row['limit']}", row["of limit"], limits[row["limit"]], at_least=True)
        for row in rows
    ]


OP = OpBenchmark(
    doc=__doc__,
    title=f"Experts in fp8: {LOCAL_EXPERTS} of {EXPERTS}, {HIDDEN} x {WIDTH}, {EXPERTS_PER_TOKEN} per token",
    cases=BATCHES,
    quick=(16, 128, 1024),
    measure=measure,
    bars=bars,
    drawn=("us", "of limit"),
)

if __name__ == "__main__":
    run(OP)
