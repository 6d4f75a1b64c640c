"""Copies pages between device and host: full pages are mirrored, parking flushes the last page, resuming loads pages.

[0, flushed) of a context is on the host, where `flushed` is the start of its newest page: a page is copied once, when
its last row has been written. [flushed, length) is only on the device until `flush`. A copy is a list of runs, and one
kernel carries it out in all layers.
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
    """`size` rows, or words of keys, that are consecutive on the device and on the host."""

    device: int
    host: int
    size: int


class Mirror:
    """Copies ranges of rows and keys. On a GPU, copies to the host run on a stream of their own (the side stream)."""

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables) -> None:
        self._pool = pool
        self._host = host
        self._tables = tables
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        key = pool.shape.key
        self._key_word = torch.uint8 if key is None or key.stride_bytes % WORD_BYTES else torch.int32
        self.reading: set[int] = set()  # device pages that the side stream may still have to read
        self.rows_mirrored = 0  # rows copied to the host since start, each counted once for all layers

    def warm_up(self) -> None:
        """Compiles the copy kernels by copying nothing."""
        nothing = self._to_device([CopyRun(0, 0, 0)])
        pairs = [(self._pool.rows, self._host.rows)]
        if self._host.keys is not None:
            pairs += self._key_words(0)
        for device, host in pairs:
            page_copy.to_host(nothing, device, host)
            page_copy.to_device(nothing, device, host)

    def mirror_filled_pages(self, written: Sequence[TokenRange]) -> None:
        """Copies every page that the step just submitted has filled by writing these rows.

        A streamed seat's rows went to the host during the step; only its index keys are copied here.
        """
        page_rows = self._pool.geometry.page_rows
        whole = ((seat, first - first % page_rows, last - last % page_rows) for seat, first, last in written)
        ranges = [TokenRange(seat, first, last) for seat, first, last in whole if first < last]
        self._store([pages for pages in ranges if not self._tables.work_pages[pages.seat]], ranges)

    def flush(self, seat: int, length: int) -> None:
        """Copies the rows and keys of the newest page if it is not full. All earlier pages are on the host already."""
        first = length // self._pool.geometry.page_rows * self._pool.geometry.page_rows
        if first < length:
            newest = [TokenRange(seat, first, length)]
            self._store([] if self._tables.work_pages[seat] else newest, newest)
        self.wait()

    def mirror_landed(self, seat: int, length: int, rows: bool) -> None:
        """Copies the full pages of a context of `length` rows that landed: its index keys and, if `rows`, its rows."""
        last = length - length % self._pool.geometry.page_rows
        if last > 0:
            whole = [TokenRange(seat, 0, last)]
            self._store(whole if rows else [], whole)

    def mirrored_event(self) -> torch.cuda.Event | None:
        """Returns an event that fires when all copies to the host started so far are done; None if they are done."""
        return None if self._stream is None else self._stream.record_event()

    def load_rows(self, seat: int, first: int, last: int, pages: Sequence[int]) -> None:
        """Copies rows [first, last) of a context from the host into its device `pages`, in every layer."""
        self.wait()
        if first < last:
            runs = self.row_runs(TokenRange(seat, first, last), pages)
            page_copy.to_device(runs, self._pool.rows, self._host.rows)

    def load_keys(self, seat: int, length: int) -> None:
        """Copies all index keys of a context from the host."""
        if self._host.keys is None or length == 0:
            return
        self.wait()
        for part, runs in self._key_runs([TokenRange(seat, 0, length)]).items():
            on_device = self._to_device(runs)
            for device, host in self._key_words(part):
                page_copy.to_device(on_device, device, host)

    def stream_in(self, layer: int, runs: Tensor) -> None:
        """Copies rows of one layer into a workspace. `runs` number the pool's flat rows."""
        page_copy.to_device(runs, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def stream_out(self, layer: int, runs: Tensor) -> None:
        """Copies new rows of one layer from a workspace to the host."""
        if len(runs):
            page_copy.to_host(runs, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def row_runs(self, token_range: TokenRange, pages: Sequence[int], *, own: bool = False) -> Tensor:
        """Returns [runs, 3] on the device, for `page_copy`: a range of a context whose device pages are `pages`.

        If `own`, host pages that other workers write are left out.
        """
        return self._to_device(self._row_runs(token_range, pages, own))

    def wait(self) -> None:
        """Makes the main stream wait for all copies started so far on the side stream."""
        self.reading.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)

    def _store(self, rows: Sequence[TokenRange], keys: Sequence[TokenRange]) -> None:
        """Copies rows and keys to the host, after all work submitted to the device so far."""
        if not keys:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._store_rows(rows)
            if self._host.keys is not None:
                self._store_keys(keys)
        self.rows_mirrored += sum(last - first for _seat, first, last in keys)

    def _store_rows(self, ranges: Sequence[TokenRange]) -> None:
        runs: list[CopyRun] = []
        page_rows = self._pool.geometry.page_rows
        for token_range in ranges:
            pages: Sequence[int] = self._tables.row_pages[token_range.seat]
            if token_range.seat in self._tables.tiered_seats:
                tail = self._tables.tail_pages[token_range.seat]
                pages = tail * (token_range.last // page_rows // TAIL_PAGES + 1)  # page n lies in tail page n % 2
            self.reading.update(pages[token_range.first // page_rows : -(-token_range.last // page_rows)])
            runs += self._row_runs(token_range, pages, own=True)
        if runs:
            page_copy.to_host(self._to_device(runs), self._pool.rows, self._host.rows)

    def _row_runs(self, token_range: TokenRange, pages: Sequence[int], own: bool = False) -> list[CopyRun]:
        """Returns the runs of a range, split where pages of either side are not neighbours."""
        page_rows, host_pages = self._pool.geometry.page_rows, self._tables.host_pages[token_range.seat]
        return _merged(
            CopyRun(
                pages[low // page_rows] * page_rows + low % page_rows,
                host_pages[low // page_rows] * page_rows + low % page_rows,
                high - low,
            )
            for low, high in _split(token_range.first, token_range.last, page_rows)
            if not own or self._host.writes(host_pages[low // page_rows])
        )

    def _store_keys(self, ranges: Sequence[TokenRange]) -> None:
        per_page = self._pool.geometry.keys_per_page
        for seat, first, last in ranges:
            self.reading.update(self._tables.key_pages[seat][first // per_page : -(-last // per_page)])
        for part, runs in self._key_runs(ranges, own=True).items():
            on_device = self._to_device(runs)
            for device, host in self._key_words(part):
                page_copy.to_host(on_device, device, host)

    def _key_runs(self, ranges: Sequence[TokenRange], own: bool = False) -> dict[int, list[CopyRun]]:
        """Returns runs in words, by part of a page. They are the same for every index group."""
        pool, page_rows, word = self._pool, self._pool.geometry.page_rows, self._key_word.itemsize
        assert pool.shape.key is not None and pool.key_blocks is not None
        key_words, per_block = pool.shape.key.stride_bytes // word, pool.key_blocks.shape[2]
        per_page, words_per_page = pool.geometry.keys_per_page, pool.geometry.layer_page_bytes // word
        runs: dict[int, list[CopyRun]] = {}
        for seat, first, last in ranges:
            pages, host_pages = self._tables.key_pages[seat], self._tables.host_pages[seat]
            for low, high in _split(first, last, page_rows, per_block, per_page):
                if own and not self._host.writes(host_pages[low // page_rows]):
                    continue
                part, key = divmod(low % per_page, per_block)
                device = pages[low // per_page] * words_per_page + key * key_words
                host = (host_pages[low // page_rows] * page_rows + low % page_rows) * key_words
                runs.setdefault(part, []).append(CopyRun(device, host, (high - low) * key_words))
        return {part: _merged(of_part) for part, of_part in runs.items()}

    def _key_words(self, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (device, host) words [groups, words, 1] of this part, all groups at once if evenly spaced."""
        assert self._host.keys is not None
        layers = self._pool.shape.key_layers
        device = self._pool.bytes.flatten(1).view(self._key_word)[:, :, None]
        host = self._host.keys.view(torch.uint8).flatten(1).view(self._key_word)[:, :, None]
        distances = {after - before for before, after in pairwise(layers)} or {1}
        if len(distances) == 1:
            every = slice(layers[0] + part, layers[-1] + part + 1, distances.pop())
            yield device[every], host
            return
        for group, layer in enumerate(layers):
            yield device[layer + part][None], host[group : group + 1]

    def _to_device(self, runs: Sequence[CopyRun]) -> Tensor:
        return list_to_device([number for run in runs for number in run], torch.int64, self._pool.device).view(-1, 3)


def _split(first: int, last: int, page_rows: int, per_block: int = 0, per_page: int = 0) -> Iterator[tuple[int, int]]:
    """Splits [first, last) at the ends of row pages and, for keys, also at the ends of blocks of a key page."""
    while first < last:
        end = min(last, first - first % page_rows + page_rows)
        if per_page:
            within = first % per_page
            end = min(end, first - within % per_block + per_block, first - within + per_page)
        yield first, end
        first = end


def _merged(runs: Iterable[CopyRun]) -> list[CopyRun]:
    """Joins runs that are neighbours on both sides."""
    merged: list[CopyRun] = []
    for run in runs:
        if merged:
            device, host, size = merged[-1]
            if (device + size, host + size) == (run.device, run.host):
                merged[-1] = CopyRun(device, host, size + run.size)
                continue
        merged.append(run)
    return merged
