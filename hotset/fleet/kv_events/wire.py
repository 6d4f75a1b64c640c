"""KV events as bytes, in the format of vLLM 0.26 and later. docs/kv-events.md describes it and names the sources.

A batch is one message on the PUB socket, and one answer on the replay socket: topic, sequence number (8 bytes,
big-endian) and payload. The payload is MessagePack: an array of time, events and data parallel rank, whose events are
maps with a `type`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from hotset.base.errors import BadMessage

HOST_MEDIUM = "CPU_TIER1"
SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES  # -1, with an empty payload
MAX_BATCH_BYTES = 16 << 20  # a larger message is not received
Medium = Annotated[str, msgspec.Meta(max_length=32)]


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks that entered a cache. `parent_block_hash` is the hash of the block before them, or None if
    they begin a context."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: Sequence[Sequence[str] | None] | None = None  # one per block; the salt is a key of the first
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks that left a cache."""

    block_hashes: Sequence[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int


_ENCODER = msgspec.msgpack.Encoder()
_OWN_DECODER = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Returns a batch that `encode` has encoded."""
    return _OWN_DECODER.decode(payload)


def sequence_frame(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


class StoredHashes(msgspec.Struct, frozen=True, tag="BlockStored", gc=False):
    """The fields of `BlockStored` that a subscriber reads. It does not need the tokens, so they are not decoded."""

    block_hashes: list[int]
    medium: Medium | None = None


class RemovedHashes(msgspec.Struct, frozen=True, tag="BlockRemoved", gc=False):
    """The fields of `BlockRemoved` that a subscriber reads."""

    block_hashes: list[int]
    medium: Medium | None = None


ReceivedEvent = StoredHashes | RemovedHashes | AllBlocksCleared


class _ReceivedBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: list[ReceivedEvent]
    data_parallel_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(_ReceivedBatch)


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A received batch."""

    sequence: int
    events: list[ReceivedEvent]

    @property
    def starts_anew(self) -> bool:
        """True if the events before this batch are irrelevant."""
        return bool(self.events) and isinstance(self.events[0], AllBlocksCleared)


def decode(frames: Sequence[bytes]) -> NumberedBatch | None:
    """Reads the frames of a batch: topic, sequence number, payload. Returns None for the end of a replay.

    Raises BadMessage if they are malformed.
    """
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise BadMessage("its frames are not a topic, a sequence number of 8 bytes and a payload")
    if frames[1] == END_OF_REPLAY:
        return None
    if len(frames[2]) > MAX_BATCH_BYTES:
        raise BadMessage(f"it has {len(frames[2])} bytes; {MAX_BATCH_BYTES} are allowed")
    try:
        batch = _DECODER.decode(frames[2])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadMessage(str(error)[:256]) from None
    return NumberedBatch(int.from_bytes(frames[1], "big"), batch.events)
