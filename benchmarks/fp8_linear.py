"""Measures products with fp8 weights on one GPU, against the copy bandwidth, torch's scaled product and bf16.

    python benchmarks/fp8_linear.py --json fp8_linear.json

Every result is first compared with float64. The input is bf16, so the time of Hotset includes quantising it.
"scaled_mm" is torch's product alone, on quantised operands. "of copy" is the share of the copy bandwidth that reading
the codes reaches after LAUNCH_US of launch. Bars: up to 64 tokens, 65 % of the copy bandwidth, and not slower than
scaled_mm and bf16; from 1024 tokens on, 95 % of the rate of scaled_mm. The L2 is flushed before every call.

--sweep tries other tiles and numbers of splits. Its times set the tiles in hotset/kernels/linear/triton_fp8.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch
from gpu_timing import copy_bandwidth, seconds_of
from op_runner import OpBenchmark, Sweep, run, us
from report import Bar, Row
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import fp8
from hotset.kernels.fp8 import E4M3_MAX, SCALE_BLOCK, Fp8Weight
from hotset.kernels.linear import Linear
from hotset.kernels.quantise import quantise

if TYPE_CHECKING:
    from hotset.kernels.linear.triton_fp8 import Tile

SHAPES = ((4096, 7168), (7168, 2048), (24576, 1536), (7168, 16384), (2240, 7168))  # (outputs, inputs)
TOKENS = (1, 16, 64, 128, 256, 1024, 4096)
SWEPT_TOKENS = (16, 64, 1, 32, 128, 256)  # the most important ones first
LAUNCH_US, COPY_BAR, LIBRARY_BAR, ERROR_BAR = 2.0, 0.65, 0.95, 2e-3
MAX_FEW, MIN_MANY = 64, 1024
MIN_PROGRAMS, MAX_PROGRAMS, MIN_GROUPS = 64, 400, 4  # limits for the numbers of splits that are tried
PLAIN, EARLY, FUSED, FUSED_EARLY = (False, False), (False, True), (True, False), (True, True)
# By number of tokens: (outputs, warps, stages) and (fused, starts_early), to be combined.
TRIED = {
    8: (((64, 4, 5), (64, 4, 7), (128, 4, 4), (128, 4, 6), (128, 8, 4)), (FUSED, FUSED_EARLY, EARLY)),
    16: (((64, 4, 5), (64, 4, 7), (128, 4, 4), (128, 4, 6), (128, 8, 4)), (FUSED, FUSED_EARLY, EARLY)),
    32: (((64, 4, 5), (64, 4, 7), (128, 4, 4), (128, 8, 4)), (PLAIN, EARLY)),
    64: (((64, 4, 5), (128, 4, 4), (128, 8, 4), (128, 8, 6), (256, 8, 4)), (PLAIN, EARLY)),
    128: (((64, 4, 4), (128, 8, 3), (128, 8, 4)), (PLAIN, EARLY)),
}


@dataclass(frozen=True)
class Case:
    """A weight, the same weight in bf16, and an input."""

    weight: Fp8Weight
    plain: Tensor
    x: Tensor

    @property
    def name(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{outputs} x {inputs}, {self.x.shape[0]} tokens"

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """The product of the quantised factors and the product of their magnitudes, in float64."""
        codes, scales = fp8.quantise(self.x)
        x = codes.double() * scales.double().repeat_interleave(SCALE_BLOCK, 1)
        weight = self.weight.dequantised(torch.float64)
        return x @ weight.t(), x.abs() @ weight.abs().t()

    def check(self, out: Tensor, name: str) -> None:
        """Raises ArithmeticError if the error, without the rounding of the result, exceeds ERROR_BAR of |x||W|."""
        expected, magnitude = self.expected
        rounding = 0.5 * torch.finfo(out.dtype).eps * expected.abs()
        errors = ((out.double() - expected).abs() - rounding) / magnitude
        if (error := float(errors.nan_to_num(nan=torch.inf).max())) > ERROR_BAR:
            raise ArithmeticError(f"{name} of {self.name}: error {error:.1e} of |x||W|, more than {ERROR_BAR}")


@cache
def make_weight(outputs: int, inputs: int) -> tuple[Fp8Weight, Tensor]:
    weight = Fp8Weight.empty((outputs, inputs), torch.device("cuda"))
    weight.codes.copy_(torch.randn(outputs, inputs, device="cuda").mul_(100).clamp_(-E4M3_MAX, E4M3_MAX))
    weight.scales.uniform_(1e-4, 1e-3)
    return weight, weight.dequantised(torch.bfloat16)


def make_case(shape: tuple[int, int], tokens: int) -> Case:
    weight, plain = make_weight(*shape)
    return Case(weight, plain, torch.randn(tokens, weight.shape[1], device="cuda").bfloat16())


def measure(shape_and_tokens: tuple[tuple[int, int], int]) -> Row:
    from hotset.kernels.linear.triton_fp8 import library_arguments

    case = make_case(*shape_and_tokens)
    layer, tokens = Linear(case.weight), case.x.shape[0]
    case.check(layer(case.x), "fp8_linear")
    operands = library_arguments(quantise(case.x), case.weight)
    product = partial(F.scaled_mm, **operands, output_dtype=torch.bfloat16)
    case.check(product()[:tokens], "scaled_mm")
    ours, library, plain = us(partial(layer, case.x)), us(product), us(partial(F.linear, case.x, case.plain))
    return {
        "outputs x inputs": "{} x {}".format(*case.weight.shape),
        "tokens": tokens,
        "us": ours,
        "TB/s": case.weight.codes.nbytes / ours / 1e6,
        "of copy": case.weight.codes.nbytes / copy_bandwidth() / (1e-6 * max(ours - LAUNCH_US, 0.1)),
        "TFLOP/s": 2 * tokens * case.weight.codes.nbytes / ours / 1e6,
        "quantise us": us(partial(quantise, case.x)),
        "scaled_mm us": library,
        "bf16 us": plain,
    }


def bars(rows: list[Row]) -> list[Bar]:
    results = []
    for row in rows:
        what = f"{row['outputs x inputs']}, {row['tokens']} tokens"
        if row["tokens"] <= MAX_FEW:
            results.append(Bar(f"{what}: of copy", row["of copy"], COPY_BAR, at_least=True))
            results.append(Bar(f"{what}: us", row["us"], min(row["scaled_mm us"], row["bf16 us"])))
        elif row["tokens"] >= MIN_MANY:
            of_library = row["scaled_mm us"] / row["us"]
            results.append(Bar(f"{what}: of the rate of scaled_mm", of_library, LIBRARY_BAR, at_least=True))
    return results


def variants(tokens: int) -> list["Tile"]:
    """Returns the tiles to try for this many tokens."""
    from hotset.kernels.linear.triton_fp8 import Tile

    tile_tokens = min(tried for tried in TRIED if tried >= min(tokens, max(TRIED)))
    sizes, ways = TRIED[tile_tokens]
    tried = [Tile(tile_tokens, *size, 0, *way) for size in sizes for way in ways]
    return [tile for tile in tried if shared_bytes(tile) <= 227 << 10]


def shared_bytes(tile: "Tile") -> int:
    """Returns about how much shared memory a program needs."""
    x_bytes = 3 if tile.fused else 1  # bf16 values, and codes that are not staged
    return tile.stages * SCALE_BLOCK * (tile.outputs + x_bytes * tile.tokens)


def tried_splits(outputs: int, inputs: int, tile: "Tile") -> list[int]:
    blocks, groups = -(-outputs // tile.outputs), -(-inputs // SCALE_BLOCK)
    return [
        splits
        for splits in (1, 2, 4, 8)
        if MIN_PROGRAMS <= splits * blocks <= MAX_PROGRAMS and splits * MIN_GROUPS <= groups
    ]


def sweeps() -> Iterator[Sweep]:
    from hotset.kernels.linear.triton_fp8 import fp8_linear_in_tiles, make_counters

    for tokens in SWEPT_TOKENS:
        for shape in SHAPES:
            case = make_case(shape, tokens)
            tunings = {
                f"{tile}, {splits} splits": (tile, splits)
                for tile in variants(tokens)
                for splits in (tried_splits(*shape, tile) if tokens <= tile.tokens else (1,))
            }
            counters = make_counters(case.weight)

            def seconds(tuning: tuple["Tile", int], case: Case = case, counters: Tensor = counters) -> float:
                call = partial(fp8_linear_in_tiles, case.x, case.weight, None, counters, *tuning)
                case.check(call(), str(tuning))
                return seconds_of([call])

            yield Sweep(case.name, tunings, {case.name: seconds})


OP = OpBenchmark(
    doc=__doc__,
    title="Products with fp8 weights",
    cases=[(shape, tokens) for shape in SHAPES for tokens in TOKENS],
    quick=[(shape, tokens) for shape in SHAPES for tokens in (1, 64, 1024)],
    measure=measure,
    bars=bars,
    sweeps=sweeps,
    drawn=("us", "scaled_mm us", "of copy"),
)

if __name__ == "__main__":
    run(OP)
