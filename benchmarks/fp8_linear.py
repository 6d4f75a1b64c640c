"""Measures products with fp8 weights on one GPU, against the copy bandwidth, torch's scaled product and bf16.

    python benchmarks/fp8_linear.py --json fp8_linear.json
    python benchmarks/fp8_linear.py --variants --seconds 240

Every result is first compared with float64. The input is bf16, so the time of Hotset includes quantising it.
"scaled_mm" is torch's product alone, on quantised operands. "of copy" is the share of the copy bandwidth that reading
the codes reaches after LAUNCH_US of launch. Bars: up to 64 tokens, 65 % of the copy bandwidth, and not slower than
scaled_mm and bf16; from 1024 tokens on, 95 % of the rate of scaled_mm. The L2 is flushed before every call.

--variants tries other tiles and numbers of splits, prints one line per case as soon as it is measured, the fastest
variant first, and proposes a table of tiles. It stops when --seconds are over.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_timing import copy_bandwidth, require_gpu, seconds_of
from report import make_parser, report, write_json
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
VARIANT_TOKENS = (16, 64, 1, 32, 128, 256)  # the most important ones first
LAUNCH_US, COPY_BAR, LIBRARY_BAR, ERROR_BAR = 2.0, 0.65, 0.95, 2e-3
MAX_FEW, MIN_MANY = 64, 1024
COMPILERS = os.cpu_count() or 1  # processes that compile variants
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


def make_weight(outputs: int, inputs: int) -> tuple[Fp8Weight, Tensor]:
    weight = Fp8Weight.empty((outputs, inputs), torch.device("cuda"))
    weight.codes.copy_(torch.randn(outputs, inputs, device="cuda").mul_(100).clamp_(-E4M3_MAX, E4M3_MAX))
    weight.scales.uniform_(1e-4, 1e-3)
    return weight, weight.dequantised(torch.bfloat16)


def make_case(weight: Fp8Weight, plain: Tensor, tokens: int) -> Case:
    return Case(weight, plain, torch.randn(tokens, weight.shape[1], device="cuda").bfloat16())


def us(call: Any) -> float:
    return 1e6 * seconds_of([call])


def of_copy(case: Case, microseconds: float) -> float:
    return case.weight.codes.nbytes / copy_bandwidth() / (1e-6 * max(microseconds - LAUNCH_US, 0.1))


def measure(case: Case) -> dict[str, Any]:
    from hotset.kernels.linear.triton_fp8 import library_arguments

    layer, tokens = Linear(case.weight), case.x.shape[0]
    case.check(layer(case.x), "fp8_linear")
    operands = library_arguments(quantise(case.x), case.weight)
    product = partial(F.scaled_mm, **operands, output_dtype=torch.bfloat16)
    case.check(product()[:tokens], "scaled_mm")
    ours, library, plain = us(partial(layer, case.x)), us(product), us(partial(F.linear, case.x, case.plain))
    quantising = us(partial(quantise, case.x))
    share = of_copy(case, ours)
    met = True
    if tokens <= MAX_FEW:
        met = share >= COPY_BAR and ours <= min(library, plain)
    elif tokens >= MIN_MANY:
        met = library / ours >= LIBRARY_BAR
    row = {
        "outputs x inputs": "{} x {}".format(*case.weight.shape),
        "tokens": tokens,
        "us": ours,
        "TB/s": case.weight.codes.nbytes / ours / 1e6,
        "of copy": share,
        "TFLOP/s": 2 * tokens * case.weight.codes.nbytes / ours / 1e6,
        "quantise us": quantising,
        "scaled_mm us": library,
        "bf16 us": plain,
        "bar": "met" if met else "MISSED",
    }
    print(f"{case.name}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row


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


def described(tile: "Tile") -> str:
    ways = ("fused", tile.fused), ("starts early", tile.starts_early)
    return f"{tile.outputs} outputs, {tile.warps} warps, {tile.stages} stages" + "".join(
        f", {name}" for name, used in ways if used
    )


def compile_variant(tile: "Tile") -> bool:
    """Compiles a tile into Triton's cache on disk. Returns whether this worked."""
    from hotset.kernels.linear.triton_fp8 import fp8_linear_in_tiles, make_counters

    try:
        weight, _ = make_weight(512, 1024)
        x = torch.randn(tile.tokens, 1024, device="cuda").bfloat16()
        for splits in {splits for shape in SHAPES for splits in tried_splits(*shape, tile)}:
            fp8_linear_in_tiles(x, weight, None, make_counters(weight), tile, splits)
        torch.cuda.synchronize()
    except Exception as problem:
        print(f"not compiled: {tile}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        return False
    return True


def compiled(tiles: list["Tile"]) -> set["Tile"]:
    """Compiles tiles in several processes and returns those that work."""
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        return {tile for tile, works in zip(tiles, pool.map(compile_variant, tiles, chunksize=1), strict=True) if works}


def tried_splits(outputs: int, inputs: int, tile: "Tile") -> list[int]:
    blocks, groups = -(-outputs // tile.outputs), -(-inputs // SCALE_BLOCK)
    return [
        splits
        for splits in (1, 2, 4, 8)
        if MIN_PROGRAMS <= splits * blocks <= MAX_PROGRAMS and splits * MIN_GROUPS <= groups
    ]


def time_variants(case: Case, tiles: list["Tile"], deadline: float) -> list[tuple[float, "Tile", int]]:
    """Returns the time, tile and splits of the variants, the fastest first. Leaves out those that fail."""
    from hotset.kernels.linear.triton_fp8 import fp8_linear_in_tiles, make_counters

    results = []
    counters = make_counters(case.weight)
    for tile in tiles:
        for splits in tried_splits(*case.weight.shape, tile) if case.x.shape[0] <= tile.tokens else (1,):
            if time.monotonic() > deadline:
                break
            call = partial(fp8_linear_in_tiles, case.x, case.weight, None, counters, tile, splits)
            try:
                case.check(call(), f"{tile} with {splits} splits")
                results.append((us(call), tile, splits))
            except Exception as problem:
                print(f"failed: {tile} with {splits} splits: {str(problem)[:200]}", flush=True)
    return sorted(results, key=lambda result: result[0])


def try_variants(weights: list[tuple[Fp8Weight, Tensor]], seconds: float, shown: int) -> list[dict[str, Any]]:
    from hotset.kernels.linear.triton_fp8 import fp8_linear_by_library

    start = time.monotonic()
    working = compiled(list(dict.fromkeys(tile for tokens in VARIANT_TOKENS for tile in variants(tokens))))
    print(f"{len(working)} tiles compiled in {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    relative: dict[int, dict[Tile, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tokens in VARIANT_TOKENS:
        for weight, plain in weights:
            case = make_case(weight, plain, tokens)
            results = time_variants(case, [tile for tile in variants(tokens) if tile in working], start + seconds)
            library = us(partial(fp8_linear_by_library, case.x, case.weight))
            print(f"{case.name}: {library:6.2f} us, quantise and scaled_mm", flush=True)
            best_of_tile: dict[Tile, float] = {}
            for microseconds, tile, _ in results:
                best_of_tile.setdefault(tile, microseconds)
            for tile, microseconds in best_of_tile.items():
                relative[tile.tokens][tile].append(microseconds / results[0][0])
            for microseconds, tile, splits in results[:shown]:
                line = f"{microseconds:6.2f} us, {of_copy(case, microseconds):.2f} of copy, {splits} splits"
                print(f"{case.name}: {line}, {described(tile)}", flush=True)
                rows.append({"case": case.name, "us": microseconds, "splits": splits, "tile": described(tile)})
    for tokens, tiles in sorted(relative.items()):
        most = max(map(len, tiles.values()))
        complete = {tile: statistics.fmean(times) for tile, times in tiles.items() if len(times) == most}
        for tile, mean in sorted(complete.items(), key=lambda item: item[1])[:3]:
            print(f"up to {tokens} tokens: {mean:.3f} x the fastest variant on average: {described(tile)}", flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--variants", action="store_true", help="try other tiles instead")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of --variants")
    parser.add_argument("--shown", type=int, default=4, help="variants to print per case")
    options: argparse.Namespace = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    weights = [make_weight(*shape) for shape in SHAPES]
    print(f"copy bandwidth {copy_bandwidth() / 1e12:.2f} TB/s", flush=True)
    if options.variants:
        rows = try_variants(weights, options.seconds, options.shown)
        if options.json is not None:
            write_json(options.json, "Variants of products with fp8 weights", rows)
        return
    rows, failed = [], []
    for weight, plain in weights:
        for tokens in TOKENS:
            case = make_case(weight, plain, tokens)
            try:
                rows.append(measure(case))
            except (ArithmeticError, RuntimeError) as error:
                failed.append(f"{case.name}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
    notes = f"copy bandwidth {copy_bandwidth() / 1e12:.2f} TB/s"
    report("Products with fp8 weights", rows, options.json, notes)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
