"""A routed layer's experts on one GPU: how near the memory's bandwidth they come, by batch; and routing's time.

    python benchmarks/experts.py --json experts.json --png experts.png

64 experts of 3 x 4096 x 1536 values in bf16, 6 of them drawn at random for each row. Bytes are the weights of the
experts touched, once each; the ceilings are a copy within device memory and a large matrix product, of the same run.
Times are of CUDA graphs with the L2 flushed before every call. "torch" is the same with torch's grouped product
in the middle; for routing, the reference in torch. The bar: at batches of 16 and 64, 70 % of the copy bandwidth.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from report import make_parser, report
from torch import Tensor

from hotset.kernels.experts import experts
from hotset.kernels.route import RoutingRule, reference, route

if TYPE_CHECKING:
    from hotset.kernels.experts.triton_impl import Tile, Tiles

EXPERTS, CHOSEN, HIDDEN, WIDTH = 64, 6, 4096, 1536
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
BATCHES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
QUICK = (1, 16, 64, 256)
BAR, HELD_TO_IT = 0.70, (16, 64)
ROUTED = 1024  # rows up to which routing is timed: a decode batch
RULE = RoutingRule(EXPERTS, CHOSEN, scale=2.5)


@dataclass(frozen=True)
class Layer:
    """The weights of one routed layer."""

    gate_up: Tensor
    down: Tensor
    router: Tensor
    correction: Tensor


@dataclass(frozen=True)
class Rows:
    """One step's input to the layer, and where each row goes."""

    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def touched(self) -> int:
        return self.expert_ids.unique().numel()


def make_layer() -> Layer:
    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda").mul_(shape[-1] ** -0.5)

    gate_up, down = values(EXPERTS, 2 * WIDTH, HIDDEN), values(EXPERTS, HIDDEN, WIDTH)
    router = values(EXPERTS, HIDDEN, dtype=torch.float32)
    return Layer(gate_up, down, router, torch.rand(EXPERTS, device="cuda") * 0.01)


def make_rows(batch: int) -> list[Rows]:
    """Several inputs of the same size: fewer where one is long."""
    made = []
    for _ in range(4 if batch <= 1024 else 2):
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        expert_ids = torch.rand(batch, EXPERTS, device="cuda").argsort(1)[:, :CHOSEN].contiguous()
        made.append(Rows(x, expert_ids, torch.rand(batch, CHOSEN, device="cuda")))
    return made


def seconds(serve: Callable[..., object], layer: Layer, inputs: list[Rows]) -> float:
    weights = (layer.gate_up, layer.down)
    return seconds_of([partial(serve, rows.x, rows.expert_ids, rows.weights, *weights) for rows in inputs])


def route_seconds(by: Callable[..., object], layer: Layer, inputs: list[Rows]) -> float:
    return seconds_of([partial(by, rows.x, layer.router, layer.correction, RULE, None) for rows in inputs])


def measure(layer: Layer, batch: int) -> dict[str, Any]:
    from hotset.kernels.experts.triton_impl import experts_by_torch

    inputs = make_rows(batch)
    touched = sum(rows.touched for rows in inputs) / len(inputs)
    bandwidth, flops = copy_bandwidth(), 2 * batch * CHOSEN * 3 * HIDDEN * WIDTH
    ours, by_torch = (seconds(serve, layer, inputs) for serve in (experts, experts_by_torch))
    fraction = touched * EXPERT_BYTES / ours / bandwidth
    verdict = ("met" if fraction >= BAR else "MISSED") if batch in HELD_TO_IT else ""
    timed = [route_seconds(by, layer, inputs) * 1e6 for by in (route, reference.route)] if batch <= ROUTED else ["", ""]
    return {
        "batch": batch,
        "touched": round(touched, 1),
        "us": round(ours * 1e6),
        "GB/s": round(touched * EXPERT_BYTES / ours / 1e9),
        "of copy": fraction,
        "TFLOP/s": flops / ours / 1e12,
        "torch us": round(by_torch * 1e6),
        "torch of copy": touched * EXPERT_BYTES / by_torch / bandwidth,
        "bar": verdict,
        "route us": timed[0],
        "torch route us": timed[1],
    }


def candidates(tiles: "Tiles") -> list[tuple[str, "Tiles"]]:
    """The tiles as they are, and with either product's replaced by others that two to a multiprocessor would fit."""
    from hotset.kernels.experts.triton_impl import Tile

    def fits(tile: "Tile", weights: int) -> bool:
        stage_bytes = 2 * tile.inputs * (weights * tile.outputs + tiles.block_pairs)
        return stage_bytes * tile.stages <= 113 << 10

    gate_up = [Tile(64, 128, 4, 3), Tile(64, 64, 4, 5), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2), Tile(128, 64, 8, 3)]
    down = [Tile(128, 128, 4, 3), Tile(128, 64, 4, 5), Tile(128, 64, 4, 4), Tile(64, 128, 4, 4), Tile(128, 64, 8, 4)]
    changed = [("as it is", tiles)]
    changed += [(f"gate_up {tile}", replace(tiles, gate_up=tile)) for tile in gate_up if fits(tile, 2)]
    changed += [(f"down {tile}", replace(tiles, down=tile)) for tile in down if fits(tile, 1)]
    return [(name, each) for name, each in changed if name == "as it is" or each != tiles]


def sweep(layer: Layer, batches: tuple[int, ...]) -> None:
    """Prints the time of every candidate, the best first, and of other block sizes as they are."""
    from hotset.kernels.experts.triton_impl import TILES, experts_in_tiles, tiles_for

    for batch in batches:
        inputs = make_rows(batch)
        mine = tiles_for(torch.bfloat16, -(-batch * CHOSEN // EXPERTS))
        tried = candidates(mine) + [
            (f"blocks of {other.block_pairs}", other) for other in TILES.values() if other != mine
        ]
        found = []
        for name, tiles in tried:
            spent = seconds(partial(experts_in_tiles, tiles=tiles), layer, inputs)
            found.append((spent * 1e6, name))
        print(f"batch {batch}, blocks of {mine.block_pairs}:")
        print(*(f"  {spent:8.1f} us  {name}" for spent, name in sorted(found)), sep="\n")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws into `path`. ImportError without matplotlib, which is not needed for the figures in numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    places = range(len(rows))
    axes.bar([place - 0.2 for place in places], [row["of copy"] for row in rows], 0.4, label="Hotset")
    axes.bar([place + 0.2 for place in places], [row["torch of copy"] for row in rows], 0.4, label="torch grouped_mm")
    axes.axhline(BAR, color="black", linewidth=1, linestyle="--", label=f"bar at {HELD_TO_IT}: {BAR:.0%}")
    axes.set_xticks(list(places), [str(row["batch"]) for row in rows])
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("weights of touched experts / time,\nas a fraction of the copy bandwidth")
    axes.set_title(f"{CHOSEN} of {EXPERTS} experts, {HIDDEN} x {WIDTH}, bf16, {torch.cuda.get_device_name()}")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only batches of {QUICK}")
    parser.add_argument("--sweep", action="store_true", help="try other tiles at batches of 16 and 256, and stop")
    parser.add_argument("--png", type=Path, help="also draw the results into this file (needs matplotlib)")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    layer = make_layer()
    if options.sweep:
        sweep(layer, (16, 256))
        return
    rows = [measure(layer, batch) for batch in (QUICK if options.quick else BATCHES)]
    ceilings = f"copy {copy_bandwidth() / 1e12:.2f} TB/s, bf16 product {matrix_rate() / 1e12:.0f} TFLOP/s"
    notes = f"{ceilings}. Bar at batches of 16 and 64: {BAR:.0%} of the copy bandwidth over the experts touched."
    report(f"Experts: {CHOSEN} of {EXPERTS}, {HIDDEN} x {WIDTH}, bf16", rows, options.json, notes)
    if options.png is not None:
        try:
            draw(options.png, rows)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
