"""Every replay of a publisher's log ends with the blocks that are in the cache, whatever number it begins with."""

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from random_cache import PAGE_ROWS, RandomCache

from hotset.fleet.kv_events import event_log
from hotset.fleet.kv_events.event_log import EventLog, NumberedPayload
from hotset.fleet.kv_events.publisher import _event
from hotset.fleet.kv_events.wire import AllBlocksCleared, Event
from hotset.tiers.prefix_cache import CacheChange


class Blocks:
    """What a subscriber of the public format rebuilds: tokens, parent and salt of every block, by its hash."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[tuple[int, ...], int | None, str | None]] = {}

    def apply(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.known[block_hash]
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        assert parent is None or parent in self.known, "a block comes before its parent"
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for number, block_hash in enumerate(event["block_hashes"]):
            assert block_hash not in self.known
            tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
            self.known[block_hash] = (tokens, parent, event.get("cache_salt"))
            parent = block_hash


def replayed(blocks: Blocks, batches: Iterable[NumberedPayload]) -> list[int]:
    """Applies batches, and returns their numbers."""
    numbers = []
    for batch in batches:
        blocks.apply(batch.payload)
        numbers.append(batch.sequence)
    return numbers


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limits", [(7, 1 << 30), (1000, 1500)], ids=["batches", "bytes"])
def test_a_replay_from_any_number_ends_with_the_blocks_of_the_cache(seed: int, limits: tuple[int, int]) -> None:
    changes: list[CacheChange] = []
    cache = RandomCache(seed, changes.append)
    log = EventLog(0, keep=True, max_batches=limits[0], max_bytes=limits[1])
    live, payloads, states = Blocks(), [], []
    for _ in range(150):
        cache.step()
        states.append(dict(live.known))  # before the batch with this number
        payloads.append(log.append([_event(change) for change in changes]).payload)
        live.apply(payloads[-1])
        changes.clear()
    assert set(live.known) == cache.hashes
    assert all(len(tokens) == PAGE_ROWS for tokens, _, _ in live.known.values())
    kept = 0
    for start in range(len(payloads)):
        blocks = Blocks()
        blocks.known = dict(states[start])
        answer = list(log.replay(start))
        numbers = replayed(blocks, answer)
        assert blocks.known == live.known
        assert numbers == list(range(numbers[0], len(payloads))), "the numbers of an answer have a gap"
        assert numbers[0] >= start
        kept += [batch.payload for batch in answer] == payloads[start:]
    assert 0 < kept < len(payloads), "no replay, or every one, comes from kept batches alone"
    assert list(log.replay(len(payloads))) == []


def test_a_long_summary_is_divided_into_batches_with_consecutive_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "BLOCKS_PER_BATCH", 10)
    events: list[Event] = []
    cache = RandomCache(0, lambda change: events.append(_event(change)))
    log = EventLog(0, keep=True, max_batches=1)
    batches = 0
    while batches < 20 or cache.cache.cached < 30:
        cache.step()
        batches += 1
        log.append(events)
        events.clear()
    blocks = Blocks()
    numbers = replayed(blocks, log.replay(0))
    assert 3 <= len(numbers) <= 6 and numbers[-1] == batches - 1
    assert set(blocks.known) == cache.hashes
    # A subscriber that lacks a single batch gets the same blocks with a single number.
    blocks = Blocks()
    assert replayed(blocks, log.replay(batches - 2)) == [batches - 2, batches - 1]
    assert set(blocks.known) == cache.hashes


def test_a_summary_that_is_too_long_for_the_missing_numbers_is_sent_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that is too large breaks every replay. Subscribers take lower numbers than requested for a restart."""
    for name in ("BLOCKS_PER_BATCH", "MAX_BLOCKS_PER_BATCH"):
        monkeypatch.setattr(event_log, name, 10)
    events: list[Event] = []
    cache = RandomCache(0, lambda change: events.append(_event(change)))
    log = EventLog(0, keep=True, max_batches=1)
    while log._next < 20 or cache.cache.cached < 30 or len(log._summary) < 20:
        cache.step()
        log.append(events)
        events.clear()
    blocks = Blocks()
    numbers = replayed(blocks, log.replay(log._oldest - 1))
    assert numbers == list(range(numbers[0], log._next)) and numbers[0] < log._oldest - 1
    assert set(blocks.known) == cache.hashes


def test_a_request_for_batches_that_do_not_exist_yet_gets_everything() -> None:
    """It comes from a subscriber that knew an earlier process."""
    log = EventLog(0, keep=True)
    log.append([AllBlocksCleared()])
    assert [batch.sequence for batch in log.replay(5)] == [0]


def test_a_log_without_replay_keeps_nothing() -> None:
    log = EventLog(0, keep=False)
    numbers = [log.append([AllBlocksCleared()]).sequence for _ in range(random.Random().randrange(2, 9))]
    assert numbers == list(range(len(numbers)))
    assert not log._kept
