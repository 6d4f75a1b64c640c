"""Carries out the ledger's commands on tensors, and makes each step's view. It decides nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.memory.batch import Batch, blank_batch, make_batch
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.resident import ResidentView
from hotset.memory.tables import PageTables
from hotset.tiers.commands import Command, Demote, Flush, Grant, Keep, Kind, Load, Promote
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.mirror import Mirror, TokenRange
from hotset.tiers.residence import Residence
from hotset.tiers.view import TieredView


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of what moved between host and device."""

    rows_flushed: int  # each counted once for all layers
    lookups: Mapping[int, int]  # positions looked up in slots, by the layer whose indexer chose them
    misses: Mapping[int, int]
    bytes_swapped: int  # from host to slots, in all layers


class Coordinator:
    """Owns one worker's pools and tables. `host` None: every request is resident, and nothing is mirrored."""

    def __init__(self, pool: DevicePool, host: HostStore | None, seats: int, context: int) -> None:
        """At most `seats` requests at once, none longer than `context` tokens."""
        self.pool = pool
        self._host = host
        self.tables = PageTables(seats, context, pool.geometry, pool.device)
        self._mirror = None if host is None else Mirror(pool, host, self.tables)
        self._hot = None if host is None or not pool.geometry.slots else HotBuffers(pool, host, self.tables, seats)

    @property
    def host(self) -> HostStore | None:
        return self._host

    def stored(self) -> torch.cuda.Event | None:
        """Happens when all that was to be copied to the host so far is there; None: it is."""
        return None if self._mirror is None else self._mirror.stored()

    @property
    def swaps(self) -> bool:
        """Requests may be tiered."""
        return self._hot is not None

    def warm_up(self) -> None:
        """Compiles kernels ahead, so that no request waits for it; changes nothing."""
        for part in (self._mirror, self._hot):
            if part is not None:
                part.warm_up()

    def seat(self, seat: int) -> None:
        """A new request takes the seat; what it held before is forgotten."""
        self.tables.clear(seat)

    def execute(self, command: Command) -> None:
        """Carries a command out, after everything that was submitted before it."""
        match command:
            case Grant(seat, kind, first, pages):
                self._grant(seat, kind, first, pages)
            case Flush(seat, length):
                self._mirroring.flush(seat, length)
            case Load():
                self._load(command)
            case Keep(seat, length, rows):
                self._mirroring.keep(seat, length, rows)
            case Demote():
                self._mirroring.wait()
                self._hot_buffers.demote(command)
            case Promote(seat, length, rows):
                self._promote(seat, length, rows)

    def prepare(self, seats: Sequence[int], starts: Sequence[int]) -> bool:
        """Before a step that computes rows from `starts[i]` of `seats[i]` on. True: some of them are tiered."""
        tiered = self.tables.tiered_seats
        if not tiered or tiered.isdisjoint(seats):
            return False
        leaving = self._hot_buffers.leaving(seats, starts)
        if leaving:
            self._mirroring.wait()  # their tail pages are on the host before they are written anew
            self._hot_buffers.make_way(leaving)
        return True

    def view(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> ResidentView:
        """The window on one step: rows [starts[i], starts[i] + counts[i]) of `seats[i]` are to be written."""
        swapping = self.prepare(seats, starts)
        return self._view(make_batch(seats, starts, counts, self.pool.device), swapping)

    def blank_view(self, seat_of: Tensor, positions: Tensor, swapping: bool) -> ResidentView:
        """The window on any step that computes one row of each seat in `seat_of`, whoever will sit there: to be
        captured. Before each replay the caller prepares the step. `swapping`: some may be tiered."""
        return self._view(blank_batch(seat_of, positions), swapping)

    def written(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """The step has written these rows: every page that it filled is copied to the host."""
        if self._mirror is None:
            return
        page_rows = self.pool.geometry.page_rows
        self._mirror.filled(
            [
                TokenRange(seat, start, start + count)
                for seat, start, count in zip(seats, starts, counts, strict=True)
                if start % page_rows + count >= page_rows
            ]
        )

    def traffic(self) -> Traffic:
        """What moved since start. Counted on the device; asking waits for it, so ask seldom."""
        shape = self.pool.shape
        counts = [] if self._hot is None else self._hot.counts.tolist()
        row_bytes = shape.row.row_bytes
        return Traffic(
            rows_flushed=0 if self._mirror is None else self._mirror.rows_flushed,
            lookups={shape.key_layers[group]: looked_up for group, (looked_up, _) in enumerate(counts)},
            misses={shape.key_layers[group]: missed for group, (_, missed) in enumerate(counts)},
            bytes_swapped=sum(
                missed * row_bytes * len(shape.layers_of(group)) for group, (_, missed) in enumerate(counts)
            ),
        )

    def maps(self, seat: int, group: int) -> tuple[list[int], list[int], list[int]]:
        """position_of, last_used and slot_of of a tiered seat: for people and tests."""
        return self._hot_buffers.maps(seat, group)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def audit(self, tiered: Mapping[int, int]) -> None:
        """Proves of the hot buffers of these seats, whose contexts have so many rows, that their maps agree."""
        for seat, length in tiered.items():
            assert seat in self.tables.tiered_seats, f"seat {seat} should be tiered"
            self._hot_buffers.audit(seat, length)

    def _view(self, batch: Batch, swapping: bool) -> ResidentView:
        if self._hot is None:
            return ResidentView(self.pool, self.tables, batch)
        return TieredView(self.pool, self.tables, self._hot, self._mirroring, batch, swapping)

    @property
    def _mirroring(self) -> Mirror:
        assert self._mirror is not None, "there is no host store"
        return self._mirror

    @property
    def _hot_buffers(self) -> HotBuffers:
        assert self._hot is not None, "this model is never tiered"
        return self._hot

    def _grant(self, seat: int, kind: Kind, first: int, pages: tuple[int, ...]) -> None:
        tables = self.tables
        if self._mirror is not None and kind is not Kind.HOST and not self._mirror.reading.isdisjoint(pages):
            self._mirror.wait()  # the page changed hands while its last owner's rows are still on their way
        match kind:
            case Kind.ROWS:
                tables.extend_rows(seat, first, pages)
            case Kind.KEYS:
                tables.extend_keys(seat, first, pages)
            case Kind.HOST:
                tables.extend_host(seat, first, pages)
            case Kind.WORK:
                tables.work_pages[seat] += pages
            case Kind.SLOTS:
                tables.put(tables.slots, seat, first, pages)
            case Kind.TAIL:
                tables.set_tail(seat, pages)
            case Kind.MAPS:
                tables.put(tables.maps, seat, first, pages)

    def _load(self, command: Load) -> None:
        seat, length = command.seat, command.length
        if command.keys:
            self._mirroring.load_keys(seat, length)
        if command.to is Residence.RESIDENT:
            self._mirroring.load_rows(seat, 0, length, self.tables.row_pages[seat])
        elif command.to is Residence.TIERED:
            self.tables.work_pages[seat] = []
            self._hot_buffers.open(seat, length)

    def _promote(self, seat: int, length: int, rows: tuple[int, ...]) -> None:
        """The newest two pages are those of the tail, in place; the others come from the host."""
        newest = length // self.pool.geometry.page_rows
        self.tables.extend_rows(seat, 0, rows)
        self._mirroring.load_rows(seat, 0, max(0, newest - 1) * self.pool.geometry.page_rows, rows)
        self.tables.set_tiered(seat, False)
