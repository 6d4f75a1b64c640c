"""Whole pages between device and host: mirrored as they fill, flushed when a request parks, loaded when it comes back.

[0, flushed) of a context is on the host, where `flushed` is the start of its newest page: a page is copied once, when
its last row has been written. What lies past that is on the device alone, until `flush`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotset.memory.device_pool import DevicePool
from hotset.memory.geometry import TAIL_PAGES
from hotset.memory.host_store import HostStore
from hotset.memory.resident import key_places
from hotset.memory.tables import PageTables


class Piece(NamedTuple):
    """`rows` rows, consecutive on both sides."""

    host_row: int
    device_row: int
    rows: int


class Mirror:
    """Copies of whole stretches. On a GPU they go over a stream of their own, each after the event that it needs."""

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables) -> None:
        self._pool = pool
        self._host = host
        self._tables = tables
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self.rows_flushed = 0  # rows copied to the host since start, each counted once for all layers

    def filled(self, seat: int, start: int, end: int) -> None:
        """Rows [start, end) of a seat were written by the step just submitted: copies every page that they filled.

        A streamed seat's rows went to the host as they were made; only its index keys are still to be copied.
        """
        page_rows = self._pool.geometry.page_rows
        first, last = start // page_rows * page_rows, end // page_rows * page_rows
        if first < last:
            self._store(seat, first, last)

    def flush(self, seat: int, length: int) -> None:
        """Copies the rows and keys of the newest page, which is not full; all before it is on the host."""
        first = length // self._pool.geometry.page_rows * self._pool.geometry.page_rows
        if first < length:
            self._store(seat, first, length)
        self.wait()

    def load_rows(self, seat: int, first: int, last: int, pages: Sequence[int]) -> None:
        """Rows [first, last) of a context from the host into its device `pages`, in every layer, by merged runs."""
        self.wait()
        for piece in self._pieces(seat, first, last, pages):
            on_host = slice(piece.host_row, piece.host_row + piece.rows)
            on_device = slice(piece.device_row, piece.device_row + piece.rows)
            for layer in range(self._pool.shape.layers):
                self._pool.rows[layer, on_device].copy_(self._host.rows[layer, on_host], non_blocking=True)

    def load_keys(self, seat: int, length: int) -> None:
        """All index keys of a context from the host: each run of host pages is one copy per group."""
        if self._host.keys is None or length == 0:
            return
        self.wait()
        part, page, key = self._key_places(seat, 0, length)
        for group in range(self._pool.shape.groups):
            runs = [self._host.keys[group, first : first + count] for first, count in self._host_runs(seat, 0, length)]
            on_device = [run.to(self._pool.device, non_blocking=True) for run in runs]
            self._pool.keys_of(group)[part, page, key] = torch.cat(on_device)

    def stream_in(self, layer: int, seat: int, length: int, work: Tensor) -> None:
        """Rows [0, length) of one layer into the rows `work` of the pool's flat rows."""
        done = 0
        for first, count in self._host_runs(seat, 0, length):
            rows = self._host.rows[layer, first : first + count].to(self._pool.device, non_blocking=True)
            self._pool.flat_rows[work[done : done + count]] = rows
            done += count

    def stream_out(self, layer: int, seat: int, first: int, rows: Tensor) -> None:
        """Rows [first, first + len(rows)) of one layer, just made, to the host."""
        done = 0
        for host_row, count in self._host_runs(seat, first, first + rows.shape[0]):
            part = rows[done : done + count]
            self._host.rows[layer, host_row : host_row + count].copy_(part, non_blocking=True)
            done += count

    def _store(self, seat: int, first: int, last: int) -> None:
        """Rows and keys [first, last) to the host, after what the device was told so far."""
        self._after_compute()
        with torch.cuda.stream(self._stream):
            if not self._tables.work_pages[seat]:
                for piece in self._pieces(seat, first, last, None):
                    on_host = slice(piece.host_row, piece.host_row + piece.rows)
                    on_device = slice(piece.device_row, piece.device_row + piece.rows)
                    for layer in range(self._pool.shape.layers):
                        self._host.rows[layer, on_host].copy_(self._pool.rows[layer, on_device], non_blocking=True)
            if self._host.keys is not None:
                self._store_keys(seat, first, last)
        self.rows_flushed += last - first

    def _store_keys(self, seat: int, first: int, last: int) -> None:
        assert self._host.keys is not None
        part, page, key = self._key_places(seat, first, last)
        for group in range(self._pool.shape.groups):
            keys = self._pool.keys_of(group)[part, page, key]
            done = 0
            for host_row, count in self._host_runs(seat, first, last):
                self._host.keys[group, host_row : host_row + count].copy_(keys[done : done + count], non_blocking=True)
                done += count

    def _pieces(self, seat: int, first: int, last: int, pages: Sequence[int] | None) -> Iterator[Piece]:
        """[first, last) of a context cut where host or device pages are not neighbours. `pages`: None: where they are
        now, in the tail or in row pages."""
        page_rows = self._pool.geometry.page_rows
        tail = self._tables.tail_pages[seat] if pages is None and self._tables.is_tiered[seat] else None
        if pages is None:
            pages = self._tables.row_pages[seat]
        host_pages = self._tables.host_pages[seat]
        piece: Piece | None = None
        for number in range(first // page_rows, -(-last // page_rows)):
            low, high = max(first, number * page_rows), min(last, (number + 1) * page_rows)
            host_row = host_pages[number] * page_rows + low % page_rows
            device_page = pages[number] if tail is None else tail[number % TAIL_PAGES]
            device_row = device_page * page_rows + low % page_rows
            if piece is not None and piece[0] + piece[2] == host_row and piece[1] + piece[2] == device_row:
                piece = Piece(piece.host_row, piece.device_row, piece.rows + high - low)
                continue
            if piece is not None:
                yield piece
            piece = Piece(host_row, device_row, high - low)
        if piece is not None:
            yield piece

    def _host_runs(self, seat: int, first: int, last: int) -> list[tuple[int, int]]:
        """(first host row, count) of [first, last), neighbours merged."""
        page_rows = self._pool.geometry.page_rows
        runs: list[tuple[int, int]] = []
        for number in range(first // page_rows, -(-last // page_rows)):
            low, high = max(first, number * page_rows), min(last, (number + 1) * page_rows)
            row = self._tables.host_pages[seat][number] * page_rows + low % page_rows
            if runs and sum(runs[-1]) == row:
                runs[-1] = (runs[-1][0], runs[-1][1] + high - low)
            else:
                runs.append((row, high - low))
        return runs

    def _key_places(self, seat: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._pool.device
        positions = torch.arange(first, last, device=device)
        return key_places(self._pool, self._tables, torch.tensor(seat, device=device), positions)

    def _after_compute(self) -> None:
        """The side stream goes on after what the main stream was told so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))

    def wait(self) -> None:
        """The main stream goes on after what the side stream was told so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)
