"""How local a model's selections are: overlap of adjacent steps, and misses of a least-recently-used hot buffer.

    python benchmarks/topk_locality.py data/topk/demo-dsa.topk

Per layer and over all layers, beside published figures of larger models. Overlap: the share of a selection that the
step before selected as well. Miss rate: the share of selected rows that a hot buffer of 1, 2, 4 or 8 times top-k slots
does not hold, each request and layer with a buffer of its own, filled during a warm-up that is not counted. Counted
twice: without a tail, where the row just written misses like any other; and with one, where the newest two pages are
always on the device, take no slot and never miss, and a row that has left the tail misses when next selected.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import make_parser, report
from topk_trace import TopkTrace, read_trace

from hotset.base.errors import HotsetError
from hotset.kernels import EMPTY

SIZES = (1, 2, 4, 8)  # hot slots, in multiples of top-k
WARM_UP_STEPS = 32
TAIL_PAGES = 2
NEVER = -1  # the stamp of a slot that holds nothing yet
UNKNOWN = "-"
NOTES = (
    "shares of selected rows; miss Nx: hot buffer of N x k slots alone, tail Nx: beside a tail; "
    "GLM-5.1 and QSA as published, with their own k, contexts and texts"
)

# Published miss rates of LRU by size. GLM-5.1: LongBench v2, 100k context, k = 2048. QSA: Qwen, 38k context.
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
    misses: dict[int, float]  # by size, without a tail
    misses_beside_tail: dict[int, float]


class LruBuffer:
    """A hot buffer of one request and layer: exact least recently used, by step stamps; ties give the lower slot."""

    def __init__(self, slots: int, context: int) -> None:
        """`context` is the most rows that the request will have. `position_of[slot]` is EMPTY where nothing is held."""
        self._slot_of = np.full(context, EMPTY, dtype=np.int64)
        self.position_of = np.full(slots, EMPTY, dtype=np.int64)
        self._last_used = np.full(slots, NEVER, dtype=np.int64)

    def select(self, step: int, positions: Positions) -> int:
        """Makes the ascending `positions` present and returns how many were missing. Steps must ascend from 0."""
        slots = self._slot_of[positions]
        self._last_used[slots[slots != EMPTY]] = step
        missing = positions[slots == EMPTY]
        if len(missing):
            # Hits carry this step's stamp already, so they come last and cannot give way.
            victims = np.argsort(self._last_used, kind="stable")[: len(missing)]
            evicted = self.position_of[victims]
            self._slot_of[evicted[evicted != EMPTY]] = EMPTY
            self._slot_of[missing] = victims
            self.position_of[victims] = missing
            self._last_used[victims] = step
        return len(missing)


def count_misses(series: Iterable[Positions], slots: int, context: int, warm_up: int) -> int:
    """Misses of one buffer over one request and layer, the first `warm_up` steps not counted."""
    buffer = LruBuffer(slots, context)
    by_step = [buffer.select(step, positions) for step, positions in enumerate(series)]
    return sum(by_step[warm_up:])


def tail_start(context: int, page_rows: int) -> int:
    """The first row of the newest pages of a context, the page being written included."""
    return max(0, (context - 1) // page_rows - (TAIL_PAGES - 1)) * page_rows


def layer_locality(trace: TopkTrace, layer: int) -> Locality:
    """Means over every request and every step after the warm-up."""
    header = trace.header
    steps = range(header.steps)
    counted = overlapping = in_tail = 0
    misses, beside_tail = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0)
    for request, first_length in enumerate(header.context_lengths):
        chosen = [trace.chosen(request, step, layer) for step in steps]
        tails = [tail_start(first_length + step, header.page_rows) for step in steps]
        older = [each[each < tail] for each, tail in zip(chosen, tails, strict=True)]
        for step in steps[WARM_UP_STEPS:]:
            counted += len(chosen[step])
            in_tail += len(chosen[step]) - len(older[step])
            overlapping += len(np.intersect1d(chosen[step], chosen[step - 1], assume_unique=True))
        for size in SIZES:
            shape = size * header.k, first_length + header.steps, WARM_UP_STEPS
            misses[size] += count_misses(chosen, *shape)
            beside_tail[size] += count_misses(older, *shape)
    return Locality(
        overlap=overlapping / counted,
        in_tail=in_tail / counted,
        misses={size: each / counted for size, each in misses.items()},
        misses_beside_tail={size: each / counted for size, each in beside_tail.items()},
    )


def row_of(name: str, found: Locality) -> dict[str, Any]:
    return (
        {"layer": name, "overlap": found.overlap, "in tail": found.in_tail}
        | {f"miss {size}x": found.misses[size] for size in SIZES}
        | {f"tail {size}x": found.misses_beside_tail[size] for size in SIZES}
    )


def published_rows() -> list[dict[str, Any]]:
    return [
        {"layer": name, "overlap": UNKNOWN, "in tail": UNKNOWN}
        | {f"miss {size}x": rates.get(size, UNKNOWN) for size in SIZES}
        | {f"tail {size}x": UNKNOWN for size in SIZES}
        for name, rates in PUBLISHED.items()
    ]


def mean(of: list[Locality]) -> Locality:
    """Over layers, which all selected the same number of rows."""
    return Locality(
        overlap=float(np.mean([each.overlap for each in of])),
        in_tail=float(np.mean([each.in_tail for each in of])),
        misses={size: float(np.mean([each.misses[size] for each in of])) for size in SIZES},
        misses_beside_tail={size: float(np.mean([each.misses_beside_tail[size] for each in of])) for size in SIZES},
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=Path("data/topk/demo-dsa.topk"))
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    header = trace.header
    if header.steps <= WARM_UP_STEPS:
        sys.exit(
            f"error: {options.trace} has {header.steps} steps; more than the warm-up of {WARM_UP_STEPS} are needed"
        )
    by_layer = [layer_locality(trace, layer) for layer in range(header.layers)]
    rows = [row_of(str(layer), found) for layer, found in enumerate(by_layer)]
    rows += [row_of("all", mean(by_layer)), *published_rows()]
    contexts = f"{min(header.context_lengths):,} to {max(header.context_lengths) + header.steps - 1:,}"
    amount = f"{header.requests} requests x {header.steps} steps, contexts of {contexts} rows"
    title = f"Locality of the selections of {header.model}: k = {header.k}, {amount}"
    report(title, rows, options.json, NOTES)


if __name__ == "__main__":
    main()
