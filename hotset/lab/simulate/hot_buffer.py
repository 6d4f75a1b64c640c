"""Replays a trace against hot buffers, with the same rules as in the engine (`tiers/hot_buffers.py`).

The newest two pages are in the tail and take no slots. The first selection of a trace fills the hot buffer, like the
selection of a prompt's last token when a request becomes tiered; it is not counted. Rows that leave the tail enter
slots. With `lru`, lookups and misses are the same as the engine's counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.lab.simulate.policies import EvictableRows, PolicyMaker, Victims
from hotset.lab.simulate.topk_trace import TopkTrace
from hotset.memory.geometry import TAIL_PAGES

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Counts of selected rows, over all steps but the first."""

    selected: int = 0
    lookups: int = 0  # selected rows outside the tail
    misses: int = 0  # lookups of rows that are in no slot

    @property
    def miss_rate(self) -> float:
        """The share of lookups that miss, as in the engine's metrics."""
        return self.misses / self.lookups if self.lookups else 0.0

    def __add__(self, other: "SlotCounts") -> "SlotCounts":
        return SlotCounts(self.selected + other.selected, self.lookups + other.lookups, self.misses + other.misses)


class HotBuffer:
    """The slots of one request and layer."""

    def __init__(self, slots: int, context: int, victims: Victims) -> None:
        """`context` is the maximum number of rows of the request."""
        self._victims = victims
        self._slot_of = np.full(context, EMPTY, dtype=np.int64)
        self.position_of = np.full(slots, EMPTY, dtype=np.int64)
        self._last_used = np.full(slots, -2, dtype=np.int64)
        self._loaded_at = np.full(slots, -2, dtype=np.int64)
        self._uses = np.zeros(slots, dtype=np.int64)

    def select(self, step: int, positions: Positions) -> int:
        """Loads the ascending `positions` and returns how many were missing. Rows used in `step` are not evicted."""
        slots = self._slot_of[positions]
        is_hit = slots != EMPTY
        hits = slots[is_hit]
        self._last_used[hits] = step
        self._uses[hits] += 1
        missing = positions[~is_hit]
        if len(missing):
            self._load(step, missing)
        return len(missing)

    def _load(self, step: int, missing: Positions) -> None:
        empty = np.flatnonzero(self.position_of == EMPTY)[: len(missing)]
        chosen = empty
        if len(empty) < len(missing):
            chosen = np.sort(np.concatenate((empty, self._evictable(step, len(missing) - len(empty)))))
            evicted = self.position_of[chosen]
            self._slot_of[evicted[evicted != EMPTY]] = EMPTY
        self._slot_of[missing] = chosen
        self.position_of[chosen] = missing
        self._last_used[chosen] = self._loaded_at[chosen] = step
        self._uses[chosen] = 1

    def _evictable(self, step: int, count: int) -> Positions:
        """Returns `count` slots whose rows the policy evicts."""
        slots = np.flatnonzero((self.position_of != EMPTY) & (self._last_used != step))
        rows = EvictableRows(
            step, slots, self.position_of[slots], self._last_used[slots], self._loaded_at[slots], self._uses[slots]
        )
        try:
            chosen = np.asarray(self._victims(rows, count), dtype=np.int64)
            victims = slots[chosen]
        except Exception as error:
            raise ConfigError(f"the policy failed at step {step}: {type(error).__name__}: {error}") from error
        if chosen.shape != (count,) or len(np.unique(victims)) != count:
            raise ConfigError(f"the policy must return {count} different indices at step {step}, got {chosen.tolist()}")
        return victims


def tail_first(position: int, page_rows: int) -> int:
    """Returns the first position that the tail holds when the newest row is at `position`."""
    return max(0, position // page_rows - 1) * page_rows


def replay_layer(
    selections: Sequence[NDArray[np.int32]], length: int, page_rows: int, topk: int, slots: int, policy: PolicyMaker
) -> SlotCounts:
    """Replays one request and layer. At the first selection, its context has `length` rows."""
    series = [positions.astype(np.int64) for positions in selections]
    buffer = HotBuffer(slots, length + len(series), policy(slots, selections))
    before_tail = tail_first(length, page_rows)
    buffer.select(0, np.arange(before_tail) if before_tail <= slots else series[0][series[0] < before_tail])
    selected = lookups = misses = 0
    for step, positions in enumerate(series[1:], start=1):
        newest = length + step - 1
        if newest % page_rows == 0 and newest > max(length, page_rows):
            buffer.select(step - 1, _leaving_tail(newest, page_rows, topk, slots))
        outside = positions[positions < tail_first(newest, page_rows)]
        misses += buffer.select(step, outside)
        lookups += len(outside)
        selected += len(positions)
    return SlotCounts(selected, lookups, misses)


def _leaving_tail(newest: int, page_rows: int, topk: int, slots: int) -> Positions:
    """Returns the rows of the page that leaves the tail: only the newest ones, if all might not find a slot."""
    end = newest - (TAIL_PAGES - 1) * page_rows
    count = page_rows if end <= slots else min(page_rows, slots - topk)
    return np.arange(end - count, end)


def replay(
    trace: TopkTrace, slots: int, policy: PolicyMaker, on_layer: Callable[[], None] = lambda: None
) -> list[SlotCounts]:
    """Returns the counts of each layer, over all requests. Every request and layer has its own hot buffer.

    Raises ConfigError if the slots cannot hold one selection, or if the policy fails. `on_layer` is called
    after each layer of each request.
    """
    header = trace.header
    if slots < header.k:
        raise ConfigError(f"a hot buffer of {slots} slots cannot hold the {header.k} rows that one step selects")
    counts = [SlotCounts()] * header.layers
    for layer in range(header.layers):
        for request, length in enumerate(header.context_lengths):
            series = [trace.chosen(request, step, layer) for step in range(header.steps)]
            counts[layer] += replay_layer(series, length, header.page_rows, header.k, slots, policy)
            on_layer()
    return counts
