"""Measures products with fp8 weights on one GPU, against the copy bandwidth, torch's scaled product and bf16.

    python benchmarks/fp8_linear.py --json fp8_linear.json

Every result is first compared with float64. The input is bf16, so the time of Hotset includes quantising it.
"scaled_mm" is torch's product alone, on quantised operands. "of copy" is the share of the copy bandwidth that reading
the codes reaches after LAUNCH_US of launch. Bars: up to 64 tokens, 65 % of the copy bandwidth, and not slower than
scaled_mm and bf16; from 1024 tokens on, 95 % of the rate of scaled_mm. The L2 is flushed before every call.

"""

from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from gpu_timing import copy_bandwidth
from op_runner import OpBenchmark, run, us
from report import Bar, Row
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import fp8
from hotset.kernels.fp8 import E4M3_MAX, SCALE_BLOCK, Fp8Weight
from hotset.kernels.linear import Linear
from hotset.kernels.quantise import quantise

SHAPES = ((4096, 7168), (7168, 2048), (24576, 1536), (7168, 16384), (2240, 7168))  # (outputs, inputs)
TOKENS = (1, 16, 64, 128, 256, 1024, 4096)
LAUNCH_US, COPY_BAR, LIBRARY_BAR, ERROR_BAR = 2.0, 0.65, 0.95, 2e-3
MAX_FEW, MIN_MANY = 64, 1024


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


OP = OpBenchmark(
    doc=__doc__,
    title="Products with fp8 weights",
    cases=[(shape, tokens) for shape in SHAPES for tokens in TOKENS],
    quick=[(shape, tokens) for shape in SHAPES for tokens in (1, 64, 1024)],
    measure=measure,
    bars=bars,
    drawn=("us", "scaled_mm us", "of copy"),
)

if __name__ == "__main__":
    run(OP)
