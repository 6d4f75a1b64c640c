"""Delivers the rows of one handoff to the receiver's pages by direct writes, which read the sender's pages or packed
rows. `staged_delivery.py` delivers rows through the receiver's ring.

Each way is a `Delivery`. Like the sender, which owns it, a delivery has no threads and no clock. The engine announces
rows when their forward pass is submitted to the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hotset.base.errors import InternalError
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.layout import plan_context_writes
from hotset.fleet.handoff.messages import Message, Store
from hotset.fleet.handoff.staging import SenderBuffers, page_writes
from hotset.fleet.transfer.api import Writes
from hotset.schedule.handoffs import ContextPages, DeviceEvent, RowsComputed

MAX_LISTS_IN_FLIGHT = 2  # per handoff with direct writes; rows announced meanwhile are merged into the next list


@dataclass(frozen=True, slots=True)
class Sources:
    """The stores of a prefill worker. Pieces that are packed from either store have the same layout."""

    host: Store
    device: Store | None = None  # None if contexts are read from the host store only

    def locate(self, rows: RowsComputed) -> tuple[Store, ContextPages]:
        """Returns the store from which announced rows are read, and all pages of their context there."""
        if self.device is not None and rows.device_pages is not None:
            return self.device, rows.device_pages
        return self.host, ContextPages(rows.pages, rows.pages)


@lru_cache(maxsize=1024)
def rotated(store: Store, turn: int) -> Store:
    """Returns the store with the shard of this turn first, if all its shards hold the same bytes.

    What any shard could provide is read from the first one. Lists of writes take turns, so that all ranks send, each
    through the network card that is close to its GPU.
    """
    count = len(store.shards)
    if len({shard.slices for shard in store.shards}) > 1 or len(store.all_keys) not in (0, count):
        return store
    first = turn % count
    keys = store.all_keys[first:] + store.all_keys[:first]
    return replace(
        store,
        shards=store.shards[first:] + store.shards[:first],
        keys=keys[0] if keys else None,
        key_copies=keys[1:],
        staging=store.staging[first:] + store.staging[:first],
    )


@dataclass(frozen=True, slots=True)
class RowWrites:
    """A planned list of writes of rows [first, last)."""

    first: int
    last: int
    writes: Writes
    after: DeviceEvent | None = None  # the list begins when this has happened
    packed: msg.PackedPiece | None = None  # the piece to pack first
    piece: int | None = None  # its number


class Delivery(ABC):
    """Delivers the rows of one handoff. The sender calls it in phase WRITING only. The methods that are not abstract
    suit deliveries without messages of their own."""

    @property
    @abstractmethod
    def landed(self) -> int:
        """Returns the end of the rows [0, landed) that are in the receiver's pages."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Returns whether all added rows are delivered, or in flight in lists that need no answer."""

    @property
    def has_pending_events(self) -> bool:
        """Returns whether a list may wait for a forward pass, so that `next_order` must be called again soon."""
        return False

    @property
    def deadline(self) -> float:
        return float("inf")

    @property
    def next_deadline(self) -> float:
        """Returns when the next timeout or retransmit is due."""
        return float("inf")

    @abstractmethod
    def add_rows(self, rows: RowsComputed, now: float) -> Sequence[Message]:
        """Adds rows that the engine has announced, in order. Returns the messages to send."""

    @abstractmethod
    def next_order(self, num_in_flight: int) -> int | None:
        """Returns the priority of the next list among the lists of all handoffs (the lowest is submitted first), or
        None if no list can be submitted now."""

    @abstractmethod
    def begin(self, number: int, buffers: SenderBuffers, now: float) -> RowWrites | None:
        """Plans the next list, whose number is `number`. Returns None if no buffer is free for it."""

    @abstractmethod
    def on_written(self, written: RowWrites, in_flight: Sequence[RowWrites], now: float) -> Message | None:
        """Records a list that has ended as DONE. `in_flight` are the lists that have not ended. Returns the message to
        send, if any."""

    @abstractmethod
    def audit(self, in_flight: Sequence[RowWrites]) -> None: ...

    def handle_message(self, message: Message, now: float) -> Sequence[Message] | None:
        """Handles a message of the receiver. Returns the messages to send, or None if the message changes nothing."""
        return None

    def retransmits(self, now: float) -> Sequence[Message]:
        """Returns the messages whose retransmit is due."""
        return ()

    def timeout_reason(self, now: float) -> str:
        """Returns why the delivery has timed out, or an empty string if it has not."""
        return ""


def merge_rows(waiting: RowsComputed | None, rows: RowsComputed) -> RowsComputed:
    """Merges announced rows with the rows before them that still wait."""
    if waiting is None:
        return rows
    moved = (rows.device_pages is None) != (waiting.device_pages is None)
    if moved or rows.pages[: len(waiting.pages)] != waiting.pages:
        raise InternalError(f"{rows.key}: announced rows have moved")
    return replace(rows, first=waiting.first)  # the newest event is enough, because events happen in order


class DirectDelivery(Delivery):
    """Writes rows to the receiver's pages. Rows that are announced while MAX_LISTS_IN_FLIGHT lists are in flight are
    merged into the next list."""

    def __init__(self, sources: Sources, target: Store, pages: ContextPages) -> None:
        self._sources, self._target, self._pages = sources, target, pages
        self._waiting: RowsComputed | None = None  # rows that are announced but not submitted
        self._submitted = 0  # rows [0, submitted) are in the receiver's pages or in a list
        self._landed = 0

    @property
    def landed(self) -> int:
        return self._landed

    @property
    def finished(self) -> bool:
        return self._waiting is None

    def add_rows(self, rows: RowsComputed, now: float) -> Sequence[Message]:
        self._waiting = merge_rows(self._waiting, rows)
        return ()

    def next_order(self, num_in_flight: int) -> int | None:
        return None if self._waiting is None or num_in_flight >= MAX_LISTS_IN_FLIGHT else 0

    def begin(self, number: int, buffers: SenderBuffers, now: float) -> RowWrites | None:
        rows, self._waiting = self._waiting, None
        assert rows is not None
        self._submitted = rows.last
        source, pages = self._sources.locate(rows)
        if len(self._target.shards) < len(source.shards):  # otherwise every rank sends to a rank of its own
            source = rotated(source, number)
        planned = plan_context_writes(source, pages, self._target, self._pages, rows.first, rows.last)
        return RowWrites(rows.first, rows.last, planned, rows.after)

    def on_written(self, written: RowWrites, in_flight: Sequence[RowWrites], now: float) -> Message | None:
        self._landed = min((other.first for other in in_flight), default=self._submitted)
        return None

    def audit(self, in_flight: Sequence[RowWrites]) -> None:
        count = len(in_flight)
        assert count <= MAX_LISTS_IN_FLIGHT, f"{count} lists of writes are in flight"
        assert self._waiting is None or count == MAX_LISTS_IN_FLIGHT, "rows wait that may be written"
        assert self.landed <= self._submitted, "rows are lost"


class AnnouncedRows:
    """Records which rows of a prompt, from `first` on, are announced, and which are computed."""

    def __init__(self, first: int) -> None:
        self.newest: RowsComputed | None = None  # the newest announcement, which has all pages of the context
        self.announced = first  # rows [first, announced) are computed, or their forward pass is in flight
        self._computed = first  # rows [first, computed) are in the prefill worker's pages
        # Events of rows [computed, announced), in order. Rows [0, last) are computed when the event has happened.
        self._events: list[tuple[int, DeviceEvent | None]] = []  # (last, event)

    @property
    def pending(self) -> bool:
        """Returns whether the forward pass of announced rows may still run."""
        return bool(self._events)

    def add(self, rows: RowsComputed) -> None:
        self.newest, self.announced = rows, rows.last
        self._events.append((rows.last, rows.after))

    def computed(self) -> int:
        """Queries the events, and returns the end of the computed rows."""
        while self._events and (self._events[0][1] is None or self._events[0][1].query()):
            self._computed = self._events.pop(0)[0]
        return self._computed

    def locate(self, sources: Sources) -> tuple[Store, ContextPages]:
        """Returns the store from which the rows are read, and all pages of their context there."""
        if self.newest is None:
            raise InternalError("no rows are announced")
        return sources.locate(self.newest)

    def audit(self) -> None:
        assert self._computed <= self.announced and self.pending == (self._computed < self.announced), "rows are lost"


class PackedDelivery(DirectDelivery):
    """Packs rows into a buffer in the order of the receiver's pages, and writes them from the buffer to these pages.
    The receiver unpacks nothing. Requires `can_pack_pages`."""

    def __init__(self, sources: Sources, target: Store, pages: ContextPages, first: int, rows: int) -> None:
        """Delivers rows from `first` on. `rows` is the number that fits into a buffer, and the maximum of a list."""
        super().__init__(sources, target, pages)
        self._announced, self._rows = AnnouncedRows(first), rows
        self._submitted = self._landed = first

    @property
    def finished(self) -> bool:
        return self._submitted == self._announced.announced

    @property
    def has_pending_events(self) -> bool:
        return self._announced.pending

    def add_rows(self, rows: RowsComputed, now: float) -> Sequence[Message]:
        self._announced.add(rows)
        return ()

    def next_order(self, num_in_flight: int) -> int | None:
        has_rows = self._announced.computed() > self._submitted
        return 0 if has_rows and num_in_flight < MAX_LISTS_IN_FLIGHT else None

    def begin(self, number: int, buffers: SenderBuffers, now: float) -> RowWrites | None:
        buffer = buffers.acquire(number)
        if buffer is None:
            return None
        first, last = self._submitted, min(self._submitted + self._rows, self._announced.computed())
        self._submitted = last
        source, pages = self._announced.locate(self._sources)
        writes = page_writes(source, self._target, self._pages, first, last, buffer)
        return RowWrites(first, last, writes, None, msg.PackedPiece(source, self._target, pages, first, last, buffer))

    def audit(self, in_flight: Sequence[RowWrites]) -> None:
        self._announced.audit()
        assert len(in_flight) <= MAX_LISTS_IN_FLIGHT, f"{len(in_flight)} lists of writes are in flight"
        assert self.landed <= self._submitted <= self._announced.announced, "rows are lost"
