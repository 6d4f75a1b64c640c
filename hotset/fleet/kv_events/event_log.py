"""Numbers the batches of one publisher, and keeps the newest ones for replay.

Batches that are too old to be kept are folded into a summary: the blocks that they leave in the cache. A replay that
begins before the oldest kept batch starts with the summary. The summary is sent as batches with the numbers just before
the oldest kept batch, and begins with `AllBlocksCleared`. A subscriber that knows nothing, or has missed too much, thus
gets the whole cache. After the first batch of an answer, there is no gap in the sequence numbers.
"""

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hotset.fleet.kv_events.wire import (
    HOST_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    encode,
)

MAX_BATCHES = 10_000  # vLLM's default
MAX_BYTES = 64 << 20
BLOCKS_PER_BATCH = 256  # of a summary: encoding one batch must not hold the interpreter for long
MAX_BLOCKS_PER_BATCH = 4096  # of a summary for which few numbers are left


@dataclass(frozen=True, slots=True)
class NumberedPayload:
    """An encoded batch with its sequence number."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Block:
    block_hash: int
    parent: int | None
    tokens: "array[int]"
    salt: str | None


class EventLog:
    """Numbers the batches of one publisher. If `keep` is set, it also keeps the batches and the summary for replay."""

    def __init__(
        self,
        rank: int,
        *,
        keep: bool,
        max_batches: int = MAX_BATCHES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._rank, self._keep = rank, keep
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._next = 0
        self._kept: deque[bytes] = deque()  # the batches [_oldest, _next)
        self._kept_bytes = 0
        # The blocks that batches [0, _oldest) leave in the cache. A block's parent comes before it, because a cache has
        # a block only while it has the block's parent.
        self._summary: dict[int, _Block] = {}

    @property
    def _oldest(self) -> int:
        return self._next - len(self._kept)

    def append(self, events: Sequence[Event]) -> NumberedPayload:
        """Adds a batch."""
        added = NumberedPayload(self._next, self._encode(events))
        self._next += 1
        if self._keep:
            self._kept.append(added.payload)
            self._kept_bytes += len(added.payload)
            while len(self._kept) > self._max_batches or (self._kept_bytes > self._max_bytes and len(self._kept) > 1):
                payload = self._kept.popleft()
                self._kept_bytes -= len(payload)
                self._fold(decode_batch(payload).events)
        return added

    def replay(self, start: int) -> Iterator[NumberedPayload]:
        """Returns the present batches from number `start` on. Later changes do not affect the returned iterator.

        A `start` in the future comes from a subscriber of an earlier process, which gets everything. A subscriber also
        gets everything if it lacks fewer numbers than a summary of this length needs.
        """
        oldest = self._oldest
        too_few = start < oldest and len(self._summary) > (oldest - start) * MAX_BLOCKS_PER_BATCH
        start = 0 if start > self._next or too_few else start
        kept = list(islice(self._kept, max(0, start - oldest), None))
        summary = list(self._summary.values()) if start < oldest else []
        return self._replay(start, oldest, summary, kept)

    def _replay(self, start: int, oldest: int, summary: list[_Block], kept: list[bytes]) -> Iterator[NumberedPayload]:
        if start < oldest:
            count = min(oldest - start, len(summary) // BLOCKS_PER_BATCH + 1)
            for number in range(count):
                part = summary[len(summary) * number // count : len(summary) * (number + 1) // count]
                cleared = [] if number else [AllBlocksCleared()]
                yield NumberedPayload(oldest - count + number, self._encode([*cleared, *_stored(part)]))
        for number, payload in enumerate(kept, max(start, oldest)):
            yield NumberedPayload(number, payload)

    def _fold(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for number, block_hash in enumerate(event.block_hashes):
                    tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
                    self._summary[block_hash] = _Block(block_hash, parent, array("I", tokens), event.cache_salt)
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._summary.pop(block_hash, None)
            else:
                self._summary.clear()

    def _encode(self, events: Sequence[Event]) -> bytes:
        return encode(EventBatch(time.time(), events, self._rank))


def stored(hashes: Sequence[int], parent: int | None, token_ids: Sequence[int], salt: str | None) -> BlockStored:
    """Returns the event for consecutive blocks. If the hash of the first block includes a salt, it is an extra key."""
    keys = None if salt is None or parent is not None else [[salt], *[None] * (len(hashes) - 1)]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=len(token_ids) // len(hashes),
        lora_id=None,
        medium=HOST_MEDIUM,
        lora_name=None,
        extra_keys=keys,
        cache_salt=salt,
    )


def _stored(blocks: Iterable[_Block]) -> list[BlockStored]:
    """Returns the events for blocks, one for each run of blocks that continue each other."""
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and block.parent == runs[-1][-1].block_hash:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [
        stored(
            [block.block_hash for block in run],
            run[0].parent,
            [token for block in run for token in block.tokens],
            run[0].salt,
        )
        for run in runs
    ]
