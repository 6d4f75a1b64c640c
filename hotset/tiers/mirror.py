"""Copies pages between device and host: full pages are mirrored, parking flushes the last page, resuming loads pages.

A page is copied to the host when its last row has been written. The host therefore has all full pages of a context.
The rows and index keys of a newest page that is not full are only on the device until `flush`. Streamed rows are an
exception: each step copies them to the host, layer by layer. A copy is an array of runs. One kernel call copies runs of
rows in all layers. Only long runs to the device are copied layer by layer, by the GPU's copy engine, which is faster.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotset.kernels import page_copy
from hotset.kernels.device_copies import to_device
from hotset.memory.device_pool import DevicePool
from hotset.memory.geometry import WORD_BYTES
from hotset.memory.host_store import HostStore
from hotset.memory.tables import PageTables

# Runs that are this long on average are copied to the device by the copy engine: at 55 instead of 39 GB/s (H200,
# 2026-11-17). The limit is an estimate: each copy is a call on the host, during which the bus could move some 100 kB.
LONG_RUN_BYTES = 1 << 20

Numbers = npt.NDArray[np.int64]
# [runs, 3]: where a run begins in the pool and in the host store, and its size, in rows or in words of index keys.
Runs = npt.NDArray[np.int64]


class TokenRange(NamedTuple):
    """Positions [first, last) in the context of the request on `seat`."""

    seat: int
    first: int
    last: int


class KeyLayers(NamedTuple):
    """Consecutive layers of key pages. `group` is the index group whose keys the first layer holds. The next layers
    hold the keys of the next groups."""

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
        nothing = self._runs_tensor(np.zeros((1, 3), np.int64))
        pairs = [(self._pool.rows, self._host.rows)]
        if self._host.keys is not None:
            pairs.append(self._key_tensors(KeyLayers(0, self._pool.shape.groups, 0)))
        for device, host in pairs:
            page_copy.to_host(nothing, device, host)
            page_copy.to_device(nothing, device, host)

    def mirror_filled_pages(self, written: Sequence[TokenRange]) -> None:
        """Copies to the host every page that is full once the submitted step has written the rows `written`.

        For a streamed seat, only index keys are copied here. Its rows are copied during the step.
        """
        page_rows = self._pool.geometry.page_rows
        whole = ((seat, first - first % page_rows, last - last % page_rows) for seat, first, last in written)
        ranges = [TokenRange(seat, first, last) for seat, first, last in whole if first < last]
        self._store([filled for filled in ranges if not self._tables.work_pages[filled.seat]], ranges)

    def flush(self, seat: int, length: int) -> None:
        """Copies the newest page if it is not full, and for a streamed seat only its index keys."""
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
        if first >= last:
            return
        runs = self._row_runs(TokenRange(seat, first, last), pages)
        device_rows, host_rows = self._pool.rows, self._host.rows
        if (last - first) * self._pool.shape.row.stride_bytes < len(runs) * LONG_RUN_BYTES:
            page_copy.to_device(self._runs_tensor(runs), device_rows, host_rows)
            return
        for layer in range(self._pool.shape.layers):
            for device, host, size in runs.tolist():
                target, source = device_rows[layer, device : device + size], host_rows[layer, host : host + size]
                target.copy_(source, non_blocking=True)

    def load_tail(self, seat: int, length: int) -> None:
        """Copies the rows in the tail of a tiered context of `length` rows from the host."""
        self.load_rows(seat, self._pool.geometry.tail_first(length), length, self._tail_by_page(seat, length))

    def load_keys(self, seat: int, length: int) -> None:
        """Copies the index keys of a context from the host, except those in pages that the seat shares with others."""
        self.wait()
        if self._host.keys is None or length == 0:
            return
        first_page, shape = self._tables.shared_keys[seat], self._pool.shape
        # Earlier blocks are in shared pages. For some groups, the block with this number can be in a shared page, too.
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
        runs: list[Runs] = []
        page_rows = self._pool.geometry.page_rows
        for token_range in ranges:
            pages: Sequence[int] = self._tables.row_pages[token_range.seat]
            if token_range.seat in self._tables.tiered_seats:
                pages = self._tail_by_page(token_range.seat, token_range.last)
            self.reading.update(pages[token_range.first // page_rows : -(-token_range.last // page_rows)])
            runs.append(self._row_runs(token_range, pages, own=True))
        if sum(map(len, runs)):
            page_copy.to_host(self._runs_tensor(np.concatenate(runs)), self._pool.rows, self._host.rows)

    def _tail_by_page(self, seat: int, length: int) -> Sequence[int]:
        """Returns the device page in which each page of a tiered context lies while it is in the tail.

        Page n lies in tail page n % tail_pages. The result covers `length` rows.
        """
        geometry = self._pool.geometry
        return self._tables.tail_pages[seat] * (length // geometry.page_rows // geometry.tail_pages + 1)

    def _row_runs(self, token_range: TokenRange, pages: Sequence[int], own: bool = False) -> Runs:
        """Returns the runs of a range. A run ends where pages are not consecutive on the device or on the host."""
        page_rows = self._pool.geometry.page_rows
        first, host_rows, sizes = self._pieces(token_range, own, page_rows)
        device_rows = np.asarray(pages, np.int64)[first // page_rows] * page_rows + first % page_rows
        return _merged(np.stack((device_rows, host_rows, sizes), axis=1))

    def _pieces(self, token_range: TokenRange, own: bool, *multiples_of: int) -> tuple[Numbers, Numbers, Numbers]:
        """Splits a range at all multiples of the given numbers, one of which must be the number of rows in a page.
        Returns the first positions, the first host rows, and the sizes of the pieces. If `own`, pieces that other
        workers write are left out."""
        seat, first, last = token_range
        page_rows = self._pool.geometry.page_rows
        cuts = [np.arange(first - first % number + number, last, number) for number in multiples_of]
        bounds = np.unique(np.concatenate(([first], *cuts, [max(first, last)])))
        begins, sizes = bounds[:-1], np.diff(bounds)
        host_pages = np.asarray(self._tables.host_pages[seat], np.int64)[begins // page_rows]
        host_rows = host_pages * page_rows + begins % page_rows
        if not own:
            return begins, host_rows, sizes
        written = host_pages % self._host.writers == self._host.writer
        return begins[written], host_rows[written], sizes[written]

    def _store_keys(self, ranges: Sequence[TokenRange]) -> None:
        layers, groups = self._pool.shape.layers, self._pool.shape.groups
        per_block = self._pool.geometry.keys_per_block
        for seat, first, last in ranges:
            first_layer, last_layer = first // per_block * groups, -(-last // per_block) * groups
            self.reading.update(self._tables.key_pages[seat][first_layer // layers : -(-last_layer // layers)])
        for key_layers, runs in self._key_runs(ranges, own=True).items():
            page_copy.to_host(self._runs_tensor(runs), *self._key_tensors(key_layers))

    def _key_runs(self, ranges: Sequence[TokenRange], own: bool = False, first_page: int = 0) -> dict[KeyLayers, Runs]:
        """Returns the runs of index keys, in words, by the layers of key pages in which they lie.

        Block n of every group is in one of several consecutive layers. Some of these layers may be in the next page.
        Keys in key pages before number `first_page` are left out.
        """
        pool, word = self._pool, self._key_word_dtype.itemsize
        assert pool.shape.key is not None
        layers, groups, per_block = pool.shape.layers, pool.shape.groups, pool.geometry.keys_per_block
        words_per_key, words_per_page = pool.shape.key.stride_bytes // word, pool.geometry.layer_page_bytes // word
        runs: dict[KeyLayers, list[Runs]] = {}
        for token_range in ranges:
            pages = np.asarray(self._tables.key_pages[token_range.seat], np.int64)
            first, host_keys, sizes = self._pieces(token_range, own, pool.geometry.page_rows, per_block)
            block, in_block = np.divmod(first, per_block)
            page, layer = np.divmod(block * groups, layers)
            here = np.minimum(groups, layers - layer)  # groups whose blocks are in this page
            parts = ((page, layer, np.zeros_like(here), here), (page + 1, np.zeros_like(layer), here, groups - here))
            for page, layer, group, count in parts:
                wanted = (count > 0) & (page >= first_page)
                device_words = pages[page[wanted]] * words_per_page + in_block[wanted] * words_per_key
                in_words = host_keys[wanted] * words_per_key, sizes[wanted] * words_per_key
                of_part = np.stack((device_words, *in_words), axis=1)
                kinds = np.stack((layer, layer + count, group), axis=1)[wanted]
                for kind in np.unique(kinds, axis=0):
                    of_kind = of_part[(kinds == kind).all(axis=1)]
                    runs.setdefault(KeyLayers(*kind.tolist()), []).append(of_kind)
        return {key_layers: _merged(np.concatenate(of_layers)) for key_layers, of_layers in runs.items()}

    def _key_tensors(self, layers: KeyLayers) -> tuple[Tensor, Tensor]:
        """Returns two tensors [groups, words, 1]: these layers of all device pages, and their keys on the host."""
        assert self._host.keys is not None
        device = self._pool.bytes.flatten(1).view(self._key_word_dtype)[:, :, None]
        host = self._host.keys.view(torch.uint8).flatten(1).view(self._key_word_dtype)[:, :, None]
        groups = slice(layers.group, layers.group + layers.last - layers.first)
        return device[layers.first : layers.last], host[groups]

    def _runs_tensor(self, runs: Runs) -> Tensor:
        return to_device(torch.from_numpy(runs), self._pool.device)


def _merged(runs: Runs) -> Runs:
    """Merges runs that follow each other both on the device and on the host."""
    if not len(runs):
        return runs
    begins, ends = runs[1:, :2], runs[:-1, :2] + runs[:-1, 2:]
    first = np.concatenate(([0], 1 + np.flatnonzero((begins != ends).any(axis=1))))
    return np.column_stack((runs[first, :2], np.add.reduceat(runs[:, 2], first)))
