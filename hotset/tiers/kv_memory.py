"""One worker's KV memory: it executes the ledger's commands on tensors and makes each step's view."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.device_copies import list_to_device
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.resident import Batch, ResidentView, make_batch, make_captured_batch
from hotset.memory.tables import PageTables
from hotset.tiers.commands import Command, Demote, Flush, Grant, Load, MirrorLanded, Promote
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.mirror import Mirror, TokenRange
from hotset.tiers.residence import PageUse, Residence
from hotset.tiers.view import TieredView


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of the copies between host and device since start."""

    rows_mirrored: int  # copied to the host; each is counted once for all layers
    lookups: Mapping[int, int]  # positions looked up in slots, by the layer whose indexer selected them
    misses: Mapping[int, int]  # positions that were in no slot, by the same layer
    bytes_swapped: int  # copied from host to slots because of these misses, in all layers


NO_TRAFFIC = Traffic(rows_mirrored=0, lookups={}, misses={}, bytes_swapped=0)


@dataclass(frozen=True, slots=True)
class TrafficCopy:
    """The traffic as of one step, whose counts are on their way from the device to the host."""

    rows_mirrored: int
    shape: KvShape
    counts: Tensor  # [groups, 2] int64: lookups and misses; no groups if no request can be tiered
    wait: Callable[[], None]  # waits until `counts` has arrived, but not for later steps

    def result(self) -> Traffic:
        """Waits for the counts. If the step has been committed, they have arrived."""
        self.wait()
        counts: list[list[int]] = self.counts.tolist()
        layers, row_bytes = self.shape.key_layers, self.shape.row.row_bytes
        return Traffic(
            rows_mirrored=self.rows_mirrored,
            lookups={layers[group]: looked_up for group, (looked_up, _) in enumerate(counts)},
            misses={layers[group]: missed for group, (_, missed) in enumerate(counts)},
            bytes_swapped=sum(
                missed * row_bytes * len(self.shape.layers_of(group)) for group, (_, missed) in enumerate(counts)
            ),
        )


class KvMemory:
    """Owns one worker's device pool, host store, page tables and hot buffers. It makes no decisions.

    Without a host store (`host` None) every request is resident and nothing is mirrored. `hot_buffers` is None if no
    request can be tiered.
    """

    def __init__(self, pool: DevicePool, host: HostStore | None, seats: int, context: int) -> None:
        """Creates tables for at most `seats` requests of at most `context` tokens."""
        self.pool, self.host = pool, host
        self.tables = PageTables(seats, context, pool.geometry, pool.device)
        self._mirror = None if host is None else Mirror(pool, host, self.tables)
        self.hot_buffers: HotBuffers | None = None
        if host is not None and pool.geometry.slots:
            self.hot_buffers = HotBuffers(pool, host, self.tables, seats)
        self._counts_changed = True  # since the last copy of the counts
        self._counts_copy: tuple[Tensor, Callable[[], None]] = torch.empty(0, 2, dtype=torch.int64), lambda: None

    def warm_up(self) -> None:
        """Compiles the kernels of mirror and hot buffers before the first request. Changes no rows, keys or maps."""
        for component in (self._mirror, self.hot_buffers):
            if component is not None:
                component.warm_up()

    def clear_seat(self, seat: int) -> None:
        """Removes all pages of the seat's previous request from the tables."""
        self.tables.clear(seat)

    def execute(self, command: Command) -> None:
        """Executes a command after all work that was submitted before it."""
        match command:
            case Grant():
                self._grant(command)
            case Flush(seat, length):
                self._required_mirror.flush(seat, length)
            case Load():
                self._load(command)
            case MirrorLanded(seat, length, rows, first):
                self._required_mirror.mirror_landed(seat, length, rows, first)
            case Demote():
                self._required_mirror.wait()
                self._required_hot_buffers.demote(command)
            case Promote():
                self._promote(command)

    def prepare_step(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> int:
        """Prepares tails for a step that computes `counts[i]` tokens of `seats[i]`, from `starts[i]` on or later.

        Tokens before `starts[i]` are final. The others can be drafts: a later step may begin at any position after
        `starts[i]` and compute them again. Returns the largest number of tokens that a tiered seat has, or 0
        if no seat is tiered.
        """
        tiered = self.tables.tiered_seats
        if not tiered or tiered.isdisjoint(seats):
            return 0
        most = 1 + self.pool.geometry.max_drafts
        tiered_tokens = max(count for seat, count in zip(seats, counts, strict=True) if seat in tiered)
        if tiered_tokens > most:
            raise InternalError(f"a step computes {tiered_tokens} tokens of a tiered request, more than {most}")
        leaving = self._required_hot_buffers.advance_tails(seats, starts)
        if leaving:
            self._required_mirror.wait()  # a tail page must be on the host before it is overwritten
            self._required_hot_buffers.move_tail_to_slots(leaving)
        self._counts_changed = True
        return tiered_tokens

    def view(
        self,
        seats: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        stamps: Sequence[int] | None = None,
    ) -> ResidentView:
        """Returns the view of a step that computes tokens [starts[i], starts[i] + counts[i]) of `seats[i]`.

        `stamps[i]` is the first position at which the step of `seats[i]` could begin when it was planned. Tails and
        slots depend on it, and not on which drafts were accepted since. None: the stamps are `starts`.
        """
        tiered_tokens = self.prepare_step(seats, starts if stamps is None else stamps, counts)
        batch = make_batch(seats, starts, counts, self.pool.device)
        if stamps is not None:
            of_tokens = [stamp for stamp, count in zip(stamps, counts, strict=True) for _ in range(count)]
            batch = replace(batch, stamps=list_to_device(of_tokens, torch.int64, self.pool.device))
        return self._view(batch, tiered_tokens)

    def draft_view(self, seats: Sequence[int], positions: Sequence[int], stamps: Sequence[int]) -> ResidentView:
        """Returns a view that computes the draft at `positions[i]` of `seats[i]`, after a step with `stamps[i]` and the
        drafts before it. It uses the tails and slots of that step."""
        batch = make_batch(seats, positions, [1] * len(seats), self.pool.device)
        on_device = list_to_device(stamps, torch.int64, self.pool.device)
        return self._view(replace(batch, stamps=on_device), int(not self.tables.tiered_seats.isdisjoint(seats)))

    def captured_view(
        self, seat_of: Tensor, positions: Tensor, tiered_tokens: int, stamps: Tensor | None = None
    ) -> ResidentView:
        """Returns the view to capture in a graph. At replay, it computes the token at `positions[i]` of `seat_of[i]`.

        Tokens of one seat are adjacent, in the order of their positions. A tiered seat has at most `tiered_tokens`; if
        this is 0, none may be tiered. The caller calls `prepare_step` before each replay. `stamps` [tokens] are those
        of the tokens' steps (see `view` and `draft_view`). None: the position of the first token of each seat.
        """
        return self._view(make_captured_batch(seat_of, positions, stamps), tiered_tokens)

    def mirror_filled_pages(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Copies to the host every page that the step just submitted has filled or may have filled: a step that began
        after `starts[i]` has computed some of these tokens.

        If the last rows of a page are rejected drafts, the page is copied again by the step that fills it again. So the
        host always has all pages that are full of final rows.
        """
        if self._mirror is None:
            return
        page_rows = self.pool.geometry.page_rows
        self._mirror.mirror_filled_pages(
            [
                TokenRange(seat, start, start + count)
                for seat, start, count in zip(seats, starts, counts, strict=True)
                if start % page_rows + count >= page_rows
            ]
        )

    def mirrored_event(self) -> torch.cuda.Event | None:
        """Returns an event that fires when all copies to the host started so far are done.

        Returns None on a CPU, where copies are synchronous, and without a host store.
        """
        return None if self._mirror is None else self._mirror.mirrored_event()

    def copy_traffic(self) -> TrafficCopy:
        """Starts a copy of the totals since start, including the step that was submitted last. Does not wait for it.

        Lookups and misses are counted on the device. They are copied only if a tiered request was in a step since the
        last copy.
        """
        if self.hot_buffers is not None and self._counts_changed:
            self._counts_copy = self.hot_buffers.copy_counts()
            self._counts_changed = False
        rows_mirrored = 0 if self._mirror is None else self._mirror.rows_mirrored
        return TrafficCopy(rows_mirrored, self.pool.shape, *self._counts_copy)

    def close(self) -> None:
        if self.host is not None:
            self.host.close()

    def audit(self, tiered: Mapping[int, int]) -> None:
        """Proves that the residency maps of tiered seats are consistent. `tiered` maps seats to context lengths."""
        for seat in tiered:
            assert seat in self.tables.tiered_seats, f"seat {seat} is not tiered in the tables"
            self._required_hot_buffers.audit(seat)

    def _view(self, batch: Batch, tiered_tokens: int) -> ResidentView:
        if self.hot_buffers is None:
            return ResidentView(self.pool, self.tables, batch)
        return TieredView(self.pool, self.tables, self.hot_buffers, self._required_mirror, batch, tiered_tokens)

    @property
    def _required_mirror(self) -> Mirror:
        assert self._mirror is not None, "there is no host store"
        return self._mirror

    @property
    def _required_hot_buffers(self) -> HotBuffers:
        assert self.hot_buffers is not None, "requests of this model cannot be tiered"
        return self.hot_buffers

    def _grant(self, grant: Grant) -> None:
        tables, seat, first, pages = self.tables, grant.seat, grant.first, grant.pages
        if self._mirror is not None:
            # The mirror may still copy what the previous owner wrote, from its device page or to its host page.
            copying = self._mirror.writing if grant.use is PageUse.HOST else self._mirror.reading
            if not copying.isdisjoint(pages):
                self._mirror.wait()
        match grant.use:
            case PageUse.ROWS:
                tables.extend_rows(seat, first, pages)
            case PageUse.KEYS:
                tables.extend_keys(seat, first, pages)
                tables.shared_keys[seat] += len(pages) if grant.shared else 0
            case PageUse.HOST:
                tables.extend_host(seat, first, pages)
            case PageUse.WORK:
                tables.work_pages[seat] += pages
            case PageUse.SLOTS:
                tables.put(tables.slots, seat, first, pages)
            case PageUse.TAIL:
                tables.set_tail(seat, pages)
            case PageUse.MAPS:
                tables.put(tables.maps, seat, first, pages)

    def _load(self, command: Load) -> None:
        seat, length = command.seat, command.length
        if command.keys:
            self._required_mirror.load_keys(seat, length)
        if command.to is Residence.RESIDENT:
            self._required_mirror.load_rows(seat, 0, length, self.tables.row_pages[seat])
        elif command.to is Residence.TIERED:
            self.tables.work_pages[seat] = []
            self._required_mirror.load_tail(seat, length)
            self._required_hot_buffers.open(seat, length)

    def _promote(self, command: Promote) -> None:
        """Loads all rows from the host, except the newest two pages, which stay in the tail's pages."""
        seat, page_rows = command.seat, self.pool.geometry.page_rows
        newest = command.length // page_rows
        self.tables.extend_rows(seat, 0, command.rows)
        self._required_mirror.load_rows(seat, 0, max(0, newest - 1) * page_rows, command.rows)
        self.tables.set_tiered(seat, False)
