"""Copies pages between device and host: full pages are mirrored, parking flushes the last page, resuming loads pages.

A page is copied to the host when its last row has been written. The host therefore has all rows and index keys of a
context except those of a newest page that is not full, which are only on the device until `flush`. Streamed rows are an
exception: each step copies them to the host, layer by layer. A copy is a list of runs. One kernel call copies runs of
rows in all layers.
"""

from collections.abc import Iterable, Iterator, Sequence
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
    """Positions [first, last) in the context of the request on `seat`."""

    seat: int
    first: int
    last: int


class CopyRun(NamedTuple):
    """`size` rows, or words of index keys, that begin at `device` in the pool and at `host` in the host store."""

    device: int
    host: int
    size: int


class KeyLayers(NamedTuple):
    """Consecutive layers of key pages, and the index group whose keys the first of them holds. The groups that follow
    are in the layers that follow."""

    first: int
    last: int
    group: int


class Mirror:
    """Copies ranges of rows and keys. On a GPU, copies to the host, except `stream_out`, run on a side stream."""

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables) -> None:
        self._pool = pool
        self._host = host
        self._tables = tables
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        key = pool.shape.key
        self._key_word_dtype = torch.uint8 if key is None or key.stride_bytes % WORD_BYTES else torch.int32
        self.reading: set[int] = set()  # device pages that the side stream may not have read yet
        self.writing: set[int] = set()  # host pages that the side stream may not have written yet
        self.rows_mirrored = 0  # positions copied to the host since start, each counted once for all layers

    def warm_up(self) -> None:
        """Compiles the copy kernels by calling them with an empty run. Rows mirrored before this are not counted."""
        self.rows_mirrored = 0
        nothing = self._runs_tensor([CopyRun(0, 0, 0)])
        pairs = [(self._pool.rows, self._host.rows)]
        if self._host.keys is not None:
            pairs.append(self._key_tensors(KeyLayers(0, self._pool.shape.groups, 0)))
        for device, host in pairs:
            page_copy.to_host(nothing, device, host)
            page_copy.to_device(nothing, device, host)

    def mirror_filled_pages(self, written: Sequence[TokenRange]) -> None:
        """Copies to the host every page that is full once the submitted step has written the rows `written`.

        Of a streamed seat, only index keys are copied here. Its rows are copied during the step.
        """
        page_rows = self._pool.geometry.page_rows
        whole = ((seat, first - first % page_rows, last - last % page_rows) for seat, first, last in written)
        ranges = [TokenRange(seat, first, last) for seat, first, last in whole if first < last]
        self._store([filled for filled in ranges if not self._tables.work_pages[filled.seat]], ranges)

    def flush(self, seat: int, length: int) -> None:
        """Copies the newest page if it is not full; of a streamed seat, only index keys. All else is on the host."""
        first = length // self._pool.geometry.page_rows * self._pool.geometry.page_rows
        if first < length:
            newest = [TokenRange(seat, first, length)]
            self._store([] if self._tables.work_pages[seat] else newest, newest)
        self.wait()

    def mirror_landed(self, seat: int, length: int, rows: bool, first: int = 0) -> None:
        """Copies the full pages from row `first` on of a context of `length` rows that landed: index keys and, if
        `rows`, the rows."""
        last = length - length % self._pool.geometry.page_rows
        if first < last:
            whole = [TokenRange(seat, first, last)]
            self._store(whole if rows else [], whole)

    def mirrored_event(self) -> torch.cuda.Event | None:
        """Returns an event that fires when all copies to the host started so far are done; on a CPU, None."""
        return None if self._stream is None else self._stream.record_event()

    def load_rows(self, seat: int, first: int, last: int, pages: Sequence[int]) -> None:
        """Copies rows [first, last) of a context from the host into its device `pages`, in every layer."""
        self.wait()
        if first < last:
            runs = self.row_runs(TokenRange(seat, first, last), pages)
            page_copy.to_device(runs, self._pool.rows, self._host.rows)

    def load_tail(self, seat: int, length: int) -> None:
        """Copies those of the first `length` rows of a tiered context that belong in its tail from the host."""
        self.load_rows(seat, self._pool.geometry.tail_first(length), length, self._tail_by_page(seat, length))

    def load_keys(self, seat: int, length: int) -> None:
        """Copies the index keys of a context from the host, except those in pages that the seat shares with others."""
        self.wait()
        if self._host.keys is None or length == 0:
            return
        first_page, shape = self._tables.shared_keys[seat], self._pool.shape
        # Blocks before this one are in shared pages. Of this one, the blocks of some groups can be there, too.
        first_block = first_page * shape.layers // shape.groups
        unshared = [TokenRange(seat, first_block * self._pool.geometry.keys_per_block, length)]
        for layers, runs in self._key_runs(unshared, first_page=first_page).items():
            page_copy.to_device(self._runs_tensor(runs), *self._key_tensors(layers))

    def stream_in(self, layer: int, runs: Tensor) -> None:
        """Copies rows of one layer from the host to a workspace. Device rows in `runs` are indices into `flat_rows`."""
        page_copy.to_device(runs, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def stream_out(self, layer: int, runs: Tensor) -> None:
        """Copies new rows of one layer from a workspace to the host. `runs` are as for `stream_in`."""
        if len(runs):
            page_copy.to_host(runs, self._pool.flat_rows[None], self._host.rows[layer : layer + 1])

    def row_runs(self, token_range: TokenRange, pages: Sequence[int], *, own: bool = False) -> Tensor:
        """Returns the runs of a range as a device tensor [runs, 3], which `page_copy` takes.

        `pages` are the device pages of the whole context. If `own`, host pages that other workers write are left out.
        """
        return self._runs_tensor(self._row_runs(token_range, pages, own))

    def wait(self) -> None:
        """Makes the main stream wait for all copies started so far on the side stream."""
        self.reading.clear()
        self.writing.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)

    def _store(self, rows: Sequence[TokenRange], keys: Sequence[TokenRange]) -> None:
        """Copies rows and keys to the host, after all work submitted to the device so far."""
        if not keys:
            return
        page_rows = self._pool.geometry.page_rows
        for seat, first, last in keys:
            self.writing.update(self._tables.host_pages[seat][first // page_rows : -(-last // page_rows)])
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
                pages = self._tail_by_page(token_range.seat, token_range.last)
            self.reading.update(pages[token_range.first // page_rows : -(-token_range.last // page_rows)])
            runs += self._row_runs(token_range, pages, own=True)
        if runs:
            page_copy.to_host(self._runs_tensor(runs), self._pool.rows, self._host.rows)

    def _tail_by_page(self, seat: int, length: int) -> Sequence[int]:
        """Returns the device page in which each page of a tiered context lies while it is in the tail.

        Page n lies in tail page n % TAIL_PAGES. The result covers `length` rows.
        """
        return self._tables.tail_pages[seat] * (length // self._pool.geometry.page_rows // TAIL_PAGES + 1)

    def _row_runs(self, token_range: TokenRange, pages: Sequence[int], own: bool = False) -> list[CopyRun]:
        """Returns the runs of a range. A run ends where pages are not consecutive on the device or on the host."""
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
        layers, groups = self._pool.shape.layers, self._pool.shape.groups
        per_block = self._pool.geometry.keys_per_block
        for seat, first, last in ranges:
            first_layer, last_layer = first // per_block * groups, -(-last // per_block) * groups
            self.reading.update(self._tables.key_pages[seat][first_layer // layers : -(-last_layer // layers)])
        for key_layers, runs in self._key_runs(ranges, own=True).items():
            page_copy.to_host(self._runs_tensor(runs), *self._key_tensors(key_layers))

    def _key_runs(
        self, ranges: Sequence[TokenRange], own: bool = False, first_page: int = 0
    ) -> dict[KeyLayers, list[CopyRun]]:
        """Returns the runs of index keys, in words, by the layers of key pages in which they lie.

        The blocks of all groups with the same number are in consecutive layers, some of which may be in the next page.
        Keys in key pages before number `first_page` are left out.
        """
        pool, page_rows, word = self._pool, self._pool.geometry.page_rows, self._key_word_dtype.itemsize
        assert pool.shape.key is not None
        layers, groups, per_block = pool.shape.layers, pool.shape.groups, pool.geometry.keys_per_block
        words_per_key, words_per_page = pool.shape.key.stride_bytes // word, pool.geometry.layer_page_bytes // word
        runs: dict[KeyLayers, list[CopyRun]] = {}
        for seat, first, last in ranges:
            pages, host_pages = self._tables.key_pages[seat], self._tables.host_pages[seat]
            for low, high in _split(first, last, page_rows, per_block):
                if own and not self._host.writes(host_pages[low // page_rows]):
                    continue
                host = (host_pages[low // page_rows] * page_rows + low % page_rows) * words_per_key
                page, layer = divmod(low // per_block * groups, layers)
                group = 0
                while group < groups:
                    end = min(layers, layer + groups - group)
                    device = pages[page] * words_per_page + low % per_block * words_per_key
                    run = CopyRun(device, host, (high - low) * words_per_key)
                    if page >= first_page:
                        runs.setdefault(KeyLayers(layer, end, group), []).append(run)
                    page, layer, group = page + 1, 0, group + end - layer
        return {key_layers: _merged(runs_there) for key_layers, runs_there in runs.items()}

    def _key_tensors(self, layers: KeyLayers) -> tuple[Tensor, Tensor]:
        """Returns two tensors [groups, words, 1]: these layers of all device pages, and their keys on the host."""
        assert self._host.keys is not None
        device = self._pool.bytes.flatten(1).view(self._key_word_dtype)[:, :, None]
        host = self._host.keys.view(torch.uint8).flatten(1).view(self._key_word_dtype)[:, :, None]
        groups = slice(layers.group, layers.group + layers.last - layers.first)
        return device[layers.first : layers.last], host[groups]

    def _runs_tensor(self, runs: Sequence[CopyRun]) -> Tensor:
        return list_to_device([number for run in runs for number in run], torch.int64, self._pool.device).view(-1, 3)


def _split(first: int, last: int, *sizes: int) -> Iterator[tuple[int, int]]:
    """Splits [first, last) at the multiples of each of `sizes`."""
    while first < last:
        end = min(last, *(first - first % size + size for size in sizes))
        yield first, end
        first = end


def _merged(runs: Iterable[CopyRun]) -> list[CopyRun]:
    """Merges runs that follow each other both on the device and on the host."""
    merged: list[CopyRun] = []
    for run in runs:
        if merged:
            device, host, size = merged[-1]
            if (device + size, host + size) == (run.device, run.host):
                merged[-1] = CopyRun(device, host, size + run.size)
                continue
        merged.append(run)
    return merged
