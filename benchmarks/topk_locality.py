"""Measures how local a model's selections are, from a recorded trace, and prints published miss rates for comparison.

    python benchmarks/topk_locality.py data/topk/demo-dsa.topk

For each layer and for all layers, the table shows shares of the selected rows:
  overlap   also selected by the previous step
  in tail   in the two newest pages of the context
  miss Nx   missing from a hot buffer of N x top-k slots with LRU eviction, without a tail: a new row is missing when it
            is first selected
  tail Nx   missing from a hot buffer of N x top-k slots with a tail: rows in the two newest pages take no slots and are
            never missing; a row that has left the tail is missing when it is next selected

Every request and layer has its own hot buffer. The first 32 steps, which fill the hot buffers, are not counted. There
is no bar. A run over the shipped trace takes about a minute.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import make_parser, report

from hotset.base.errors import HotsetError
from hotset.lab.simulate.hot_buffer import HotBuffer
from hotset.lab.simulate.policies import lru
from hotset.lab.simulate.topk_trace import TopkTrace, read_trace

SIZES = (1, 2, 4, 8)  # hot slots, in multiples of top-k
WARM_UP_STEPS = 32
TAIL_PAGES = 2
UNKNOWN = "-"
NOTES = (
    "shares of selected rows; miss Nx: hot buffer of N x k slots without a tail, tail Nx: with a tail; "
    "GLM-5.1 and QSA: published for their own k, contexts and texts"
)

# Published LRU miss rates by buffer size. GLM-5.1: LongBench v2, 100k context, k = 2048. QSA: Qwen, 38k context.
PUBLISHED = {
    "GLM-5.1": {1: 0.30, 2: 0.134, 4: 0.067},
    "QSA": {1: 0.336, 2: 0.166, 4: 0.071, 8: 0.024},
}

Positions = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Locality:
    """Shares of selected rows, in [0, 1]."""

    overlap: float
    in_tail: float
    misses: dict[int, float]  # by buffer size, without a tail
    misses_with_tail: dict[int, float]  # by buffer size


def count_misses(series: Iterable[Positions], slots: int, context: int, warm_up: int) -> int:
    """Counts the misses of one request and layer after the first `warm_up` steps."""
    buffer = HotBuffer(slots, context, lru)
    by_step = [buffer.select(step, positions) for step, positions in enumerate(series)]
    return sum(by_step[warm_up:])


def tail_start(context: int, page_rows: int) -> int:
    """Returns the first row of the tail, which is the page being written and the page before it."""
    return max(0, (context - 1) // page_rows - (TAIL_PAGES - 1)) * page_rows


def layer_locality(trace: TopkTrace, layer: int) -> Locality:
    """Averages over all requests and all steps after the warm-up."""
    header = trace.header
    steps = range(header.steps)
    counted = overlapping = in_tail = 0
    misses, misses_with_tail = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    for request, first_length in enumerate(header.context_lengths):
        chosen = [trace.chosen(request, step, layer) for step in steps]
        tails = [tail_start(first_length + step, header.page_rows) for step in steps]
        before_tail = [positions[positions < tail] for positions, tail in zip(chosen, tails, strict=True)]
        for step in steps[WARM_UP_STEPS:]:
            counted += len(chosen[step])
            in_tail += len(chosen[step]) - len(before_tail[step])
            overlapping += len(np.intersect1d(chosen[step], chosen[step - 1], assume_unique=True))
        for size in SIZES:
            slots, max_length = size * header.k, first_length + header.steps
            misses[size] += count_misses(chosen, slots, max_length, WARM_UP_STEPS)
            misses_with_tail[size] += count_misses(before_tail, slots, max_length, WARM_UP_STEPS)
    return Locality(
        overlap=overlapping / counted,
        in_tail=in_tail / counted,
        misses={size: count / counted for size, count in misses.items()},
        misses_with_tail={size: count / counted for size, count in misses_with_tail.items()},
    )


def table_row(name: str, locality: Locality) -> dict[str, Any]:
    return (
        {"layer": name, "overlap": locality.overlap, "in tail": locality.in_tail}
        | {f"miss {size}x": locality.misses[size] for size in SIZES}
        | {f"tail {size}x": locality.misses_with_tail[size] for size in SIZES}
    )


def published_rows() -> list[dict[str, Any]]:
    return [
        {"layer": name, "overlap": UNKNOWN, "in tail": UNKNOWN}
        | {f"miss {size}x": rates.get(size, UNKNOWN) for size in SIZES}
        | {f"tail {size}x": UNKNOWN for size in SIZES}
        for name, rates in PUBLISHED.items()
    ]


def mean(layers: list[Locality]) -> Locality:
    """Averages over layers, which all select the same number of rows."""
    return Locality(
        overlap=float(np.mean([layer.overlap for layer in layers])),
        in_tail=float(np.mean([layer.in_tail for layer in layers])),
        misses={size: float(np.mean([layer.misses[size] for layer in layers])) for size in SIZES},
        misses_with_tail={size: float(np.mean([layer.misses_with_tail[size] for layer in layers])) for size in SIZES},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "trace", type=Path, nargs="?", default=Path("data/topk/demo-dsa.topk"), help="file written by `hotset record`"
    )
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    header = trace.header
    if header.steps <= WARM_UP_STEPS:
        sys.exit(
            f"error: {options.trace} has {header.steps} steps; a trace needs more than {WARM_UP_STEPS} steps, because "
            f"the first {WARM_UP_STEPS} are not counted"
        )
    by_layer = [layer_locality(trace, layer) for layer in range(header.layers)]
    rows = [table_row(str(layer), locality) for layer, locality in enumerate(by_layer)]
    rows += [table_row("all", mean(by_layer)), *published_rows()]
    contexts = f"{min(header.context_lengths):,} to {max(header.context_lengths) + header.steps - 1:,}"
    amount = f"{header.requests} requests x {header.steps} steps, contexts of {contexts} rows"
    title = f"Locality of the selections of {header.model}: k = {header.k}, {amount}"
    report(title, rows, options.json, NOTES)


if __name__ == "__main__":
    main()
