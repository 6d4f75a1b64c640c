"""Whole pages between device and host: mirrored as they fill, flushed when a request parks, loaded when it comes back.

[0, flushed) of a context is on the host, where `flushed` is the start of its newest page: a page is copied once, when
its last row has been written. What lies past that is on the device alone, until `flush`. A copy is a list of pieces,
carried out in all layers by one kernel.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotset.kernels import page_copy
from hotset.kernels.device_copies import list_to_device
from hotset.memory.device_pool import DevicePool
from hotset.memory.geometry import TAIL_PAGES, WORD_BYTES
from hotset.memory.host_store import HostStore
from hotset.memory.tables import PageTables


class TokenRange(NamedTuple):
    """Positions [first, last) of the context on a seat."""

    seat: int
    first: int
    last: int


class CopyRun(NamedTuple):
    """`size` rows, or words of keys, consecutive on both sides."""

    device: int
    host: int
    size: int


class Mirror:
    """Copies of whole stretches. On a GPU, what is stored goes over a stream of its own, after the event it needs."""

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables) -> None:
        self._pool = pool
        self._host = host
        self._tables = tables
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        key = pool.shape.key
        self._key_word = torch.uint8 if key is None or key.stride_bytes % WORD_BYTES else torch.int32
        self.reading: set[int] = set()  # device pages that the side stream may not have read yet
        self.rows_flushed = 0  # rows copied to the host since start, each counted once for all layers

    def warm_up(self) -> None:
        """Compiles the copies, by copies of nothing."""
        nothing = self._sent([CopyRun(0, 0, 0)])
        tiers = [(self._pool.rows, self._host.rows)]
        if self._host.keys is not None:
            tiers += self._key_words(0)
        for device, host in tiers:
            page_copy.to_host(nothing, device, host)
            page_copy.to_device(nothing, device, host)

    def filled(self, written: Sequence[TokenRange]) -> None:
        """The step just submitted has written these rows: copies every page that they filled.

        A streamed seat's rows went to the host as they were made; only its index keys are still to be copied.
        """
        page_rows = self._pool.geometry.page_rows
        whole = ((seat, first - first % page_rows, last - last % page_rows) for seat, first, last in written)
        stretches = [TokenRange(seat, first, last) for seat, first, last in whole if first < last]
        self._store([each for each in stretches if not self._tables.work_pages[each.seat]], stretches)

    def flush(self, seat: int, length: int) -> None:
        """Copies the rows and keys of the newest page, which is not full; all before it is on the host."""
        first = length // self._pool.geometry.page_rows * self._pool.geometry.page_rows
        if first < length:
            newest = [TokenRange(seat, first, length)]
            self._store([] if self._tables.work_pages[seat] else newest, newest)
        self.wait()

    def keep(self, seat: int, length: int, rows: bool) -> None:
        """Copies the full pages of a context of `length` rows that landed: its index keys, and its rows if `rows`."""
        last = length - length % self._pool.geometry.page_rows
        if last > 0:
            whole = [TokenRange(seat, 0, last)]
            self._store(whole if rows else [], whole)

    def stored(self) -> torch.cuda.Event | None:
        """Happens when everything that was to be stored so far is on the host; None: it is."""
        return None if self._stream is None else self._stream.record_event()

    def load_rows(self, seat: int, first: int, last: int, pages: Sequence[int]) -> None:
        """Rows [first, last) of a context from the host into its device `pages`, in every layer."""
        self.wait()
        if first < last:
            pieces = self.row_pieces(TokenRange(seat, first, last), pages)
            page_copy.to_device(pieces, self._pool.rows, self._host.rows)

    def load_keys(self, seat: int, length: int) -> None:
        """All index keys of a context from the host."""
        if self._host.keys is None or length == 0:
            return
        self.wait()
        for part, pieces in self._key_pieces([TokenRange(seat, 0, length)]).items():
            sent = self._sent(pieces)
            for device, host in self._key_words(part):
                page_copy.to_device(sent, device, host)

    def stream_in(self, layer: int, pieces: Tensor) -> None:
        """Rows of one layer into a workspace: `pieces` are of the pool's flat rows."""
        page_copy.to_device(pieces, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def stream_out(self, layer: int, pieces: Tensor) -> None:
        """Rows of one layer, just made in a workspace, to the host."""
        if len(pieces):
            page_copy.to_host(pieces, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def row_pieces(self, stretch: TokenRange, pages: Sequence[int], *, own: bool = False) -> Tensor:
        """[pieces, 3] on the device: a stretch of a context whose device pages are `pages`, for `page_copy`. `own`:
        of the host pages that this worker writes."""
        return self._sent(self._row_pieces(stretch, pages, own))

    def wait(self) -> None:
        """The main stream goes on after what the side stream was told so far."""
        self.reading.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)

    def _store(self, rows: Sequence[TokenRange], keys: Sequence[TokenRange]) -> None:
        """Rows and keys to the host, after what the device was told so far."""
        if not keys:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._store_rows(rows)
            if self._host.keys is not None:
                self._store_keys(keys)
        self.rows_flushed += sum(last - first for _seat, first, last in keys)

    def _store_rows(self, stretches: Sequence[TokenRange]) -> None:
        pieces: list[CopyRun] = []
        page_rows = self._pool.geometry.page_rows
        for stretch in stretches:
            pages: Sequence[int] = self._tables.row_pages[stretch.seat]
            if stretch.seat in self._tables.tiered_seats:
                tail = self._tables.tail_pages[stretch.seat]
                pages = tail * (stretch.last // page_rows // TAIL_PAGES + 1)  # page n lies in tail page n % 2
            self.reading.update(pages[stretch.first // page_rows : -(-stretch.last // page_rows)])
            pieces += self._row_pieces(stretch, pages, own=True)
        if pieces:
            page_copy.to_host(self._sent(pieces), self._pool.rows, self._host.rows)

    def _row_pieces(self, stretch: TokenRange, pages: Sequence[int], own: bool = False) -> list[CopyRun]:
        """Cut where pages of either side are no neighbours."""
        page_rows, host_pages = self._pool.geometry.page_rows, self._tables.host_pages[stretch.seat]
        return _merged(
            CopyRun(
                pages[low // page_rows] * page_rows + low % page_rows,
                host_pages[low // page_rows] * page_rows + low % page_rows,
                high - low,
            )
            for low, high in _cuts(stretch.first, stretch.last, page_rows)
            if not own or self._host.writes(host_pages[low // page_rows])
        )

    def _store_keys(self, stretches: Sequence[TokenRange]) -> None:
        per_page = self._pool.geometry.keys_per_page
        for seat, first, last in stretches:
            self.reading.update(self._tables.key_pages[seat][first // per_page : -(-last // per_page)])
        for part, pieces in self._key_pieces(stretches, own=True).items():
            sent = self._sent(pieces)
            for device, host in self._key_words(part):
                page_copy.to_host(sent, device, host)

    def _key_pieces(self, stretches: Sequence[TokenRange], own: bool = False) -> dict[int, list[CopyRun]]:
        """By part of a page: pieces in words, the same for every index group."""
        pool, page_rows, word = self._pool, self._pool.geometry.page_rows, self._key_word.itemsize
        assert pool.shape.key is not None and pool.key_blocks is not None
        key_words, per_block = pool.shape.key.stride_bytes // word, pool.key_blocks.shape[2]
        per_page, words_per_page = pool.geometry.keys_per_page, pool.geometry.part_bytes // word
        pieces: dict[int, list[CopyRun]] = {}
        for seat, first, last in stretches:
            pages, host_pages = self._tables.key_pages[seat], self._tables.host_pages[seat]
            for low, high in _cuts(first, last, page_rows, per_block, per_page):
                if own and not self._host.writes(host_pages[low // page_rows]):
                    continue
                part, key = divmod(low % per_page, per_block)
                device = pages[low // per_page] * words_per_page + key * key_words
                host = (host_pages[low // page_rows] * page_rows + low % page_rows) * key_words
                pieces.setdefault(part, []).append(CopyRun(device, host, (high - low) * key_words))
        return {part: _merged(of_part) for part, of_part in pieces.items()}

    def _key_words(self, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(device, host) words [groups, words, 1] of this part: of all groups at once where they are evenly apart."""
        assert self._host.keys is not None
        layers = self._pool.shape.key_layers
        device = self._pool.bytes.flatten(1).view(self._key_word)[:, :, None]
        host = self._host.keys.view(torch.uint8).flatten(1).view(self._key_word)[:, :, None]
        apart = {after - before for before, after in pairwise(layers)} or {1}
        if len(apart) == 1:
            every = slice(layers[0] + part, layers[-1] + part + 1, *apart)
            yield device[every], host
            return
        for group, layer in enumerate(layers):
            yield device[layer + part][None], host[group : group + 1]

    def _sent(self, pieces: Sequence[CopyRun]) -> Tensor:
        return list_to_device([number for piece in pieces for number in piece], torch.int64, self._pool.device).view(
            -1, 3
        )


def _cuts(first: int, last: int, page_rows: int, per_block: int = 0, per_page: int = 0) -> Iterator[tuple[int, int]]:
    """[first, last) cut where a page of rows ends, and, for keys, where a block of a page of keys ends."""
    while first < last:
        end = min(last, first - first % page_rows + page_rows)
        if per_page:
            within = first % per_page
            end = min(end, first - within % per_block + per_block, first - within + per_page)
        yield first, end
        first = end


def _merged(pieces: Iterable[CopyRun]) -> list[CopyRun]:
    """Neighbours on both sides become one."""
    merged: list[CopyRun] = []
    for piece in pieces:
        if merged:
            device, host, size = merged[-1]
            if (device + size, host + size) == (piece.device, piece.host):
                merged[-1] = CopyRun(device, host, size + piece.size)
                continue
        merged.append(piece)
    return merged
