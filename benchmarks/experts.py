"""Measures the experts and the routing of one MoE layer on one GPU, against the copy bandwidth and against torch.

    python benchmarks/experts.py --json experts.json --png experts.png

The layer has 64 experts of 3 x 4096 x 1536 weights in bf16; each token uses 6 random experts. GB/s counts the weights
of every used expert once. "of copy" is the share of the copy bandwidth measured in the same run. The columns "torch
..." show the same layer with `torch.grouped_mm`, and routing in torch ops. From batch 1024 on, Hotset uses
`torch.grouped_mm` too. The L2 is flushed before every call. Bar (required result): 70 % of the copy bandwidth at batch
16 and 64.
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

EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, WIDTH = 64, 6, 4096, 1536
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
BATCHES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
QUICK = (1, 16, 64, 256)
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


def make_layer() -> LayerWeights:
    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda").mul_(shape[-1] ** -0.5)

    gate_up, down = values(EXPERTS, 2 * WIDTH, HIDDEN), values(EXPERTS, HIDDEN, WIDTH)
    router = values(EXPERTS, HIDDEN, dtype=torch.float32)
    return LayerWeights(gate_up, down, router, torch.rand(EXPERTS, device="cuda") * 0.01)


def make_inputs(batch: int) -> list[LayerInput]:
    """Returns several inputs of the same size; fewer for large batches."""
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


def measure(layer: LayerWeights, batch: int) -> dict[str, Any]:
    from hotset.kernels.experts.triton_impl import experts_by_torch

    inputs = make_inputs(batch)
    used = sum(i.num_used for i in inputs) / len(inputs)
    bandwidth, flops = copy_bandwidth(), 2 * batch * EXPERTS_PER_TOKEN * 3 * HIDDEN * WIDTH
    hotset_s, torch_s = (experts_seconds(function, layer, inputs) for function in (experts, experts_by_torch))
    of_copy = used * EXPERT_BYTES / hotset_s / bandwidth
    verdict = ("met" if of_copy >= COPY_BAR else "MISSED") if batch in BAR_BATCHES else ""
    route_us: list[Any] = ["", ""]
    if batch <= MAX_ROUTED_BATCH:
        route_us = [route_seconds(function, layer, inputs) * 1e6 for function in (route, reference.route)]
    return {
        "batch": batch,
        "used experts": round(used, 1),
        "us": round(hotset_s * 1e6),
        "GB/s": round(used * EXPERT_BYTES / hotset_s / 1e9),
        "of copy": of_copy,
        "TFLOP/s": flops / hotset_s / 1e12,
        "torch us": round(torch_s * 1e6),
        "torch of copy": used * EXPERT_BYTES / torch_s / bandwidth,
        "bar": verdict,
        "route us": route_us[0],
        "torch route us": route_us[1],
    }


def candidates(tiles: "Tiles") -> list[tuple[str, "Tiles"]]:
    """Returns the tiles in use, and variants in which one of the two products has another tile.

    A variant is omitted if two programs of that product exceed the shared memory of a multiprocessor.
    """
    from hotset.kernels.experts.triton_impl import Tile

    def fits(tile: "Tile", weights: int) -> bool:
        stage_bytes = 2 * tile.inputs * (weights * tile.outputs + tiles.block_pairs)
        return stage_bytes * tile.stages <= 113 << 10

    gate_up = [Tile(64, 128, 4, 3), Tile(64, 64, 4, 5), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2), Tile(128, 64, 8, 3)]
    down = [Tile(128, 128, 4, 3), Tile(128, 64, 4, 5), Tile(128, 64, 4, 4), Tile(64, 128, 4, 4), Tile(128, 64, 8, 4)]
    variants = [("in use", tiles)]
    variants += [(f"gate_up {tile}", replace(tiles, gate_up=tile)) for tile in gate_up if fits(tile, 2)]
    variants += [(f"down {tile}", replace(tiles, down=tile)) for tile in down if fits(tile, 1)]
    return [(name, variant) for name, variant in variants if name == "in use" or variant != tiles]


def sweep(layer: LayerWeights, batches: tuple[int, ...]) -> None:
    """Prints the times of all candidates and of the tiles for other block sizes, the fastest first."""
    from hotset.kernels.experts.triton_impl import TILES, experts_in_tiles, tiles_for

    for batch in batches:
        inputs = make_inputs(batch)
        in_use = tiles_for(torch.bfloat16, -(-batch * EXPERTS_PER_TOKEN // EXPERTS))
        tried = candidates(in_use) + [
            (f"blocks of {other.block_pairs}", other) for other in TILES.values() if other != in_use
        ]
        times = []
        for name, tiles in tried:
            seconds = experts_seconds(partial(experts_in_tiles, tiles=tiles), layer, inputs)
            times.append((seconds * 1e6, name))
        print(f"batch {batch}, blocks of {in_use.block_pairs}:")
        print(*(f"  {us:8.1f} us  {name}" for us, name in sorted(times)), sep="\n")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws the results to `path`. Raises ImportError if matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    ticks = range(len(rows))
    axes.bar([x - 0.2 for x in ticks], [row["of copy"] for row in rows], 0.4, label="Hotset")
    axes.bar([x + 0.2 for x in ticks], [row["torch of copy"] for row in rows], 0.4, label="torch grouped_mm")
    axes.axhline(COPY_BAR, color="black", linewidth=1, linestyle="--", label=f"bar at batch 16 and 64: {COPY_BAR:.0%}")
    axes.set_xticks(list(ticks), [str(row["batch"]) for row in rows])
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("bytes/s of the used experts' weights,\nas a fraction of the copy bandwidth")
    axes.set_title(
        f"{EXPERTS_PER_TOKEN} of {EXPERTS} experts, {HIDDEN} x {WIDTH}, bf16, {torch.cuda.get_device_name()}"
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only the batches {QUICK}")
    parser.add_argument(
        "--sweep", action="store_true", help="print the times of other tiles at batch 16 and 256 instead"
    )
    parser.add_argument("--png", type=Path, help="also draw the results to this file (requires matplotlib)")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    layer = make_layer()
    if options.sweep:
        sweep(layer, (16, 256))
        return
    rows = [measure(layer, batch) for batch in (QUICK if options.quick else BATCHES)]
    ceilings = (
        f"copy bandwidth {copy_bandwidth() / 1e12:.2f} TB/s, bf16 matrix product {matrix_rate() / 1e12:.0f} TFLOP/s"
    )
    notes = f"{ceilings}; bar at batch 16 and 64: {COPY_BAR:.0%} of the copy bandwidth"
    report(f"Experts: {EXPERTS_PER_TOKEN} of {EXPERTS}, {HIDDEN} x {WIDTH}, bf16", rows, options.json, notes)
    if options.png is not None:
        try:
            draw(options.png, rows)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
