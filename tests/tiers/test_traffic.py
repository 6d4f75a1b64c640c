"""The engine's counters are compared with counts from the recorded calls of a run (defect 19 of scripts/sabotage.d)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tiers.byte_model import SlotModel
from tiers.whole_numbers import INDEXED, SHAPE, Bench

from hotset.memory.resident import ResidentView
from hotset.tiers.commands import Command, Demote, Flush, Load, Promote
from hotset.tiers.kv_memory import KvMemory, TrafficCopy

RUNS = {
    "always": {"device_pages": 18, "host_pages": 80, "tiers": "always", "depth": 1},
    "two plans in flight": {"device_pages": 18, "host_pages": 80, "tiers": "always", "depth": 2},
    "auto": {"device_pages": 33, "host_pages": 120, "tiers": "auto", "depth": 1, "seats": 3, "step_tokens": 9},
    "host full": {"device_pages": 18, "host_pages": 22, "tiers": "always", "depth": 1},
}


class RecordingMemory(KvMemory):
    """A KV memory that records its calls, how often its counters are copied, and how often a copy is waited for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[int | Command | tuple[Sequence[int], Sequence[int], Sequence[int]]] = []
        self.copies = self.waits = 0

    def clear_seat(self, seat: int) -> None:
        self.calls.append(seat)
        super().clear_seat(seat)

    def execute(self, command: Command) -> None:
        self.calls.append(command)
        super().execute(command)

    def view(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> ResidentView:
        self.calls.append((list(seats), list(starts), list(counts)))
        return super().view(seats, starts, counts)

    def copy_traffic(self) -> TrafficCopy:
        def wait() -> None:
            self.waits += 1

        self.copies += 1
        return replace(super().copy_traffic(), wait=wait)


@cache
def run(name: str) -> tuple[Bench, RecordingMemory]:
    """Runs three requests to their end, and returns the bench and its memory with the recorded calls."""
    bench = Bench(**RUNS[name], memory=RecordingMemory)
    for number, (prompt, answer) in enumerate([(20, 44), (20, 36), (7, 24)]):
        bench.add(f"r{number}", prompt, answer)
    bench.finish()
    assert isinstance(bench.memory, RecordingMemory)
    return bench, bench.memory


@pytest.mark.parametrize("name", RUNS)
def test_defect_19_lookups_misses_bytes_and_mirrored_rows_equal_those_of_the_recorded_calls(name: str) -> None:
    bench, memory = run(name)
    slots, page_rows = SlotModel(SHAPE, bench.geometry, seats=4), bench.geometry.page_rows
    chosen = iter(bench.model.chosen)
    mirrored = 0
    for call in memory.calls:
        match call:
            case int(seat):
                slots.remove(seat)
            case (seats, starts, counts):
                for seat, start in zip(seats, starts, strict=True):
                    slots.move_tail_to_slots(seat, start)
                for start, count in zip(starts, counts, strict=True):
                    slots.choose(*next(chosen))
                    mirrored += ((start + count) // page_rows - start // page_rows) * page_rows
            case _:
                mirrored += call.length % page_rows if isinstance(call, Flush) else 0
                slots.execute(call)
    stats = bench.engine.stats()
    assert dict(stats.slot_lookups) == dict(zip(INDEXED, slots.lookups, strict=True))
    assert dict(stats.slot_misses) == dict(zip(INDEXED, slots.misses, strict=True))
    assert stats.bytes_swapped == sum(slots.misses) * 2 * SHAPE.row.row_bytes, (
        "a miss did not copy exactly one row in each of the two layers that share a selection"
    )
    assert stats.rows_mirrored == mirrored
    assert 0 < sum(slots.misses) < sum(slots.lookups), "there were no misses, or no hits"


@pytest.mark.parametrize("name", RUNS)
def test_defect_19_every_change_of_residence_is_counted_once(name: str) -> None:
    bench, memory = run(name)
    seen = Counter(type(call) for call in memory.calls)
    resumes = sum(isinstance(call, Load) and call.keys for call in memory.calls)
    stats = bench.engine.stats()
    counted = (stats.demotions, stats.promotions, stats.parks, stats.resumes)
    assert counted == (seen[Demote], seen[Promote], seen[Flush], resumes)
    assert stats.tokens_generated == sum(len(answer) for answer in bench.answers.values())
    assert sum(stats.requests_finished.values()) == 3
    assert (stats.recomputes > 0) == (name == "host full")


def test_defect_19_no_step_waits_for_the_counters() -> None:
    bench, memory = run.__wrapped__("always")  # a run whose counters no other test has read
    assert memory.waits == 0, "a step waited for the counters, and so for the device"
    steps = bench.engine.steps
    assert memory.copies == steps and bench.engine.stats().bytes_swapped
    assert (memory.waits, memory.copies) == (1, steps), "the statistics did not use the copy of the last step"


def test_stats_show_how_full_the_host_store_is() -> None:
    bench = Bench(90, 24)
    for name in "abcd":
        bench.add(name, 40, 3)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.host_pages_total, stats.device_pages_total) == (24, 90)
    assert stats.host_pages_held == 20 and stats.waiting == 2 and stats.resident == 2
    bench.finish()
    assert bench.engine.stats().host_pages_held == bench.engine.stats().device_pages_held == 0
