"""Replayed hot buffers agree with the engine's own counters, and policies agree with simple models of them."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from harness import DEMO

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.engine.build import build_engine
from hotset.kernels import EMPTY
from hotset.lab.simulate.hot_buffer import HotBuffer, SlotCounts, replay, replay_layer
from hotset.lab.simulate.policies import POLICIES, EvictableRows, find_policy
from hotset.lab.simulate.recorder import decode, load
from hotset.lab.simulate.topk_trace import TopkTrace, TraceHeader

LENGTHS = (290, 185)
STEPS = 14
PAGE_ROWS = 8
SETTINGS = {"model": DEMO, "device": "cpu", "max_num_seqs": 2, "page_rows": PAGE_ROWS, "max_model_len": 320}


def prompts() -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(16, 4000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def trace() -> TopkTrace:
    """Selections of the demo model after random prompts."""
    config = EngineConfig(**SETTINGS, device_kv_tokens=1024, prefix_cache=False)
    _files, model, engine = load(config)
    decode(engine, prompts(), STEPS, temperature=0.7, seed=3)
    engine.close()
    header = TraceHeader("demo", 6, 128, len(LENGTHS), STEPS, LENGTHS, PAGE_ROWS)
    return TopkTrace(header, model.selections(LENGTHS, STEPS, 128))


@pytest.mark.parametrize(
    "slots", [200, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_lru_has_the_lookups_and_misses_of_the_engine(trace: TopkTrace, slots: int) -> None:
    """The longest context exceeds all hot buffers, the shortest fits two of them. Pages leave the tail in both."""
    engine = build_engine(EngineConfig(**SETTINGS, tiers="always", hot_slots=slots, device_kv_gib=0.125))
    try:
        decode(engine, prompts(), STEPS, temperature=0.7, seed=3)
        stats = engine.stats()
    finally:
        engine.close()
    counts = replay(trace, slots, POLICIES["lru"])
    assert {layer: count.lookups for layer, count in enumerate(counts)} == dict(stats.slot_lookups)
    assert {layer: count.misses for layer, count in enumerate(counts)} == dict(stats.slot_misses)
    assert sum(stats.slot_misses.values()) > 0


class SimpleBuffer:
    """One list of rows, searched linearly. A row is [position, last used]."""

    def __init__(self, slots: int, policy: str, series: Sequence[Sequence[int]]) -> None:
        self.slots: list[list[int] | None] = [None] * slots
        self.policy, self.series = policy, series

    def select(self, step: int, positions: Sequence[int]) -> int:
        for row in self.slots:
            if row is not None and row[0] in positions:
                row[1] = step
        held = {row[0] for row in self.slots if row is not None}
        missing = [position for position in positions if position not in held]
        victims: list[int] = []
        for _ in missing:
            victims.append(self._victim(step, victims))
        for position, slot in zip(missing, sorted(victims), strict=True):
            self.slots[slot] = [position, step]
        return len(missing)

    def _victim(self, step: int, taken: list[int]) -> int:
        empty = [slot for slot, row in enumerate(self.slots) if row is None and slot not in taken]
        if empty:
            return empty[0]
        rows = {slot: row for slot, row in enumerate(self.slots) if row and row[1] != step and slot not in taken}
        keys = {"lru": lambda row: row[1], "belady": lambda row: -self._next_use(row[0], step)}
        return min(rows, key=lambda slot: (keys[self.policy](rows[slot]), slot))

    def _next_use(self, position: int, step: int) -> int:
        later = [s for s in range(step + 1, len(self.series)) if position in self.series[s]]
        return min(later, default=len(self.series))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_hold_the_rows_of_simple_models_of_them(policy: str) -> None:
    for seed in range(12):
        generator = random.Random(seed)
        slots, favourites = generator.randrange(6, 14), generator.sample(range(40), 6)
        series = [
            sorted(
                {generator.choice(favourites) if generator.random() < 0.6 else generator.randrange(40) for _ in "12345"}
            )
            for _ in range(60)
        ]
        arrays = [np.array(positions, dtype=np.int32) for positions in series]
        buffer, model = HotBuffer(slots, 40, POLICIES[policy](slots, arrays)), SimpleBuffer(slots, policy, series)
        for step, positions in enumerate(series):
            assert buffer.select(step, arrays[step].astype(np.int64)) == model.select(step, positions), (seed, step)
            held = [EMPTY if row is None else row[0] for row in model.slots]
            assert buffer.position_of.tolist() == held, (seed, step)


def test_no_policy_misses_less_than_belady_on_the_demo_model(trace: TopkTrace) -> None:
    misses = {name: sum((count.misses for count in replay(trace, 150, policy)), 0) for name, policy in POLICIES.items()}
    # Rows that leave the tail enter slots even if they are never selected, which Belady cannot avoid.
    assert min(misses, key=lambda name: misses[name]) == "belady"


def test_a_context_that_fits_into_the_slots_never_misses() -> None:
    generator = random.Random(0)
    series = [np.array(sorted(generator.sample(range(100 + step), 8)), dtype=np.int32) for step in range(120)]
    for policy in POLICIES.values():
        counts = replay_layer(series, 100, 16, 8, 256, policy)
        assert counts.misses == 0 < counts.lookups < counts.selected == 8 * 119


def test_a_policy_knows_when_each_row_was_loaded_and_how_often_it_was_used() -> None:
    known: list[list[list[int]]] = []

    def victims(rows: EvictableRows, count: int) -> list[int]:
        known.append([column.tolist() for column in (rows.positions, rows.last_used, rows.loaded_at, rows.uses)])
        return [0] * count

    buffer = HotBuffer(3, 40, victims)
    for step, positions in enumerate([[1, 2], [1, 3], [2, 4]]):
        buffer.select(step, np.array(positions))
    assert known == [[[1, 3], [1, 1], [0, 1], [2, 1]]]


def test_a_policy_of_the_user_is_read_from_a_file(tmp_path: Path, trace: TopkTrace) -> None:
    function, stateful = tmp_path / "mine.py", tmp_path / "stateful.py"
    function.write_text("def victims(rows, count):\n    return rows.last_used.argsort(kind='stable')[:count]\n")
    stateful.write_text(
        "class Policy:\n"
        "    def __init__(self, slots, selections):\n        assert slots == 160 and len(selections) == 14\n"
        "    def victims(self, rows, count):\n        return range(count)\n"
    )
    expected = replay(trace, 160, POLICIES["lru"])
    assert replay(trace, 160, find_policy(str(function))) == expected
    lowest_slots = sum(replay(trace, 160, find_policy(str(stateful))), SlotCounts())
    assert lowest_slots.misses > sum(expected, SlotCounts()).misses


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "must define a function victims"),
        ("import nothing_like_this", "cannot be run: ModuleNotFoundError"),
        ("def victims(rows, count):\n    return [0] * (count + 1)", "must return"),
        ("def victims(rows, count):\n    return [0] * count if count > 1 else [10**6]", "failed at step|must return"),
        ("def victims(rows, count):\n    raise KeyError('x')", "the policy failed at step 1: KeyError"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(tmp_path: Path, trace: TopkTrace, source: str, message: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        replay(trace, 128, find_policy(str(path)))


def test_unknown_policies_and_small_buffers_are_refused(tmp_path: Path, trace: TopkTrace) -> None:
    with pytest.raises(ConfigError, match="--policy lfu: use one of lru, belady, or a file"):
        find_policy("lfu")
    with pytest.raises(ConfigError, match="there is no such file"):
        find_policy(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match="127 slots cannot hold the 128 rows"):
        replay(trace, 127, POLICIES["lru"])
