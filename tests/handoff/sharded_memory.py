"""Memory of an engine whose ranks hold some heads each. It is filled and checked by head, and poisoned elsewhere."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.handoff.layout import head_shards, pages_for
from hotset.handoff.messages import PagedSpan, Store
from hotset.transfer.api import Region

POISON = 0xAB
HEAD_BYTES, KEY_BYTES = 7, 5
Bytes = NDArray[np.uint8]


class Sharded:
    """[layer][page][row] for each rank, with some unused bytes after each row, and index keys likewise."""

    def __init__(
        self,
        ranks: int,
        heads: int,
        *,
        page_rows: int,
        pages: int = 80,
        layers: int = 3,
        groups: int = 2,
        spare: int = 0,
        seed: int = 0,
        head_bytes: int = HEAD_BYTES,
    ) -> None:
        self.ranks, self.heads, self.layers, self.groups, self.page_rows = ranks, heads, layers, groups, page_rows
        self.pages, self.head_bytes = pages, head_bytes
        self.per_rank = max(1, heads // ranks)
        width = 2 * self.per_rank * head_bytes
        # All units are in one block of memory, shuffled and never adjacent.
        unit = pages * page_rows * (width + spare) + 64
        key_unit = pages * page_rows * KEY_BYTES + 64
        self.memory = np.full(ranks * layers * unit + groups * key_unit, POISON, np.uint8)
        order = np.random.default_rng(seed).permutation(ranks * layers).reshape(ranks, layers)
        self.rows = [
            [self._unit(int(at) * unit, page_rows, width + spare)[:, :, :width] for at in starts] for starts in order
        ]
        first_key = ranks * layers * unit
        self.keys = [self._unit(first_key + group * key_unit, page_rows, KEY_BYTES) for group in range(groups)]
        spans = [self._span(units, width + spare) for units in self.rows]
        keys = self._span(self.keys, KEY_BYTES) if groups else None
        self.store = Store(head_shards(spans, heads, head_bytes), keys)

    @property
    def region(self) -> Region:
        return Region(self.memory.ctypes.data, self.memory.nbytes)

    def _unit(self, start: int, page_rows: int, stride: int) -> Bytes:
        return self.memory[start : start + self.pages * page_rows * stride].reshape(self.pages, page_rows, stride)

    def _span(self, units: Sequence[Bytes], stride: int) -> PagedSpan:
        bases = tuple((unit.ctypes.data,) for unit in units)
        return PagedSpan(bases, self.page_rows * stride, self.page_rows, self.page_rows, stride)

    def heads_of(self, rank: int) -> range:
        first = rank * self.heads // self.ranks
        return range(first, first + self.per_rank)

    def holds(self, address: int, nbytes: int) -> bool:
        start = self.memory.ctypes.data
        return start <= address and address + nbytes <= start + self.memory.nbytes

    def compute(self, pages: Sequence[int], first: int, last: int, seed: int = 0) -> None:
        """Writes rows and keys [first, last) of a context, as a model would."""
        self._place(self.rows, self.keys, pages, pages, first, last, seed)

    def check(self, row_pages: Sequence[int], key_pages: Sequence[int], first: int, last: int, seed: int = 0) -> None:
        """Asserts that exactly these rows are here, and that nothing else was changed."""
        expected = Sharded(
            self.ranks,
            self.heads,
            page_rows=self.page_rows,
            pages=self.pages,
            layers=self.layers,
            groups=self.groups,
            head_bytes=self.head_bytes,
        )
        expected._place(expected.rows, expected.keys, row_pages, key_pages, first, last, seed)
        for mine, wanted in zip(self.rows, expected.rows, strict=True):
            np.testing.assert_array_equal(np.stack(mine), np.stack(wanted))
        for keys, wanted_keys in zip(self.keys, expected.keys, strict=True):
            np.testing.assert_array_equal(keys, wanted_keys)

    def check_rows(self, row_pages: Sequence[int], key_pages: Sequence[int], last: int, seed: int = 0) -> None:
        """Asserts that rows [0, last) are here."""
        rows = [[np.full_like(unit, POISON) for unit in units] for units in self.rows]
        keys = [np.full_like(unit, POISON) for unit in self.keys]
        self._place(rows, keys, row_pages, key_pages, 0, last, seed)
        page, row = np.divmod(np.arange(last), self.page_rows)
        units = [
            *((unit, row_pages) for units in self.rows for unit in units),
            *((unit, key_pages) for unit in self.keys),
        ]
        wanted = [*(unit for units in rows for unit in units), *keys]
        for (found, pages), expected in zip(units, wanted, strict=True):
            at = np.asarray(pages)[page], row
            np.testing.assert_array_equal(found[at], expected[at])

    def poison(self, row_pages: Sequence[int], key_pages: Sequence[int]) -> None:
        for units in self.rows:
            for unit in units:
                unit[list(row_pages)] = POISON
        for keys in self.keys:
            keys[list(key_pages)] = POISON

    def _place(
        self,
        rows: Sequence[Sequence[Bytes]],
        keys: Sequence[Bytes],
        row_pages: Sequence[int],
        key_pages: Sequence[int],
        first: int,
        last: int,
        seed: int,
    ) -> None:
        for position in range(first, last):
            page, row = divmod(position, self.page_rows)
            for rank, units in enumerate(rows):
                for layer, unit in enumerate(units):
                    heads = [
                        self.head(layer, position, half, head, seed) for half in "KV" for head in self.heads_of(rank)
                    ]
                    unit[row_pages[page], row] = np.concatenate(heads)
            for group, unit in enumerate(keys):
                unit[key_pages[page], row] = _bytes(KEY_BYTES, 91, group, position, seed)

    def head(self, layer: int, position: int, half: str, head: int, seed: int) -> Bytes:
        return _bytes(self.head_bytes, layer, position, ord(half), head, seed)


def _bytes(count: int, *names: int) -> Bytes:
    mixed = 17
    for name in names:
        mixed = (mixed * 1000003 + name * 7919 + 13) % (1 << 31)
    return ((mixed >> 3) + np.arange(count) * 37 & 0xFF).astype(np.uint8)


def fresh_pages(
    source: Sharded, target: Sharded, *, rows: int, seed: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """Returns shuffled pages: of the source, of the target for rows, and of the target for keys."""
    random = np.random.default_rng(seed)
    spans = (source.store.shards[0].span, target.store.shards[0].span, target.store.shards[0].span)
    sides = (source, target, target)
    found = [
        random.permutation(side.pages)[: pages_for(span, rows)].tolist()
        for side, span in zip(sides, spans, strict=True)
    ]
    return found[0], found[1], found[2]
