"""Memory of an engine whose rows are sharded over ranks by heads, for tests that compare bytes head by head."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.layout import head_shards
from hotset.fleet.handoff.messages import Store
from hotset.fleet.transfer.api import Region

POISON = 0xAB
HEAD_BYTES, KEY_BYTES = 7, 5
Bytes = NDArray[np.uint8]


class ShardedMemory:
    """Rows and index keys in pages. Each rank has an array [page][row][byte] for each layer, with `spare` unused bytes
    after each row. The index keys have such an array for each index group. All bytes are POISON until rows are written.
    """

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
        self.heads_per_rank = max(1, heads // ranks)
        width = 2 * self.heads_per_rank * head_bytes
        # All layers of all ranks are in one block of memory, in random order and with gaps. The index keys follow.
        layer_bytes = pages * page_rows * (width + spare) + 64
        group_bytes = pages * page_rows * KEY_BYTES + 64
        self.memory = np.full(ranks * layers * layer_bytes + groups * group_bytes, POISON, np.uint8)
        order = np.random.default_rng(seed).permutation(ranks * layers).reshape(ranks, layers)
        self.rows = [
            [self._pages(int(index) * layer_bytes, page_rows, width + spare)[:, :, :width] for index in indices]
            for indices in order
        ]
        first_key = ranks * layers * layer_bytes
        self.keys = [self._pages(first_key + group * group_bytes, page_rows, KEY_BYTES) for group in range(groups)]
        spans = [self._span(layers_of_rank, width + spare) for layers_of_rank in self.rows]
        keys = self._span(self.keys, KEY_BYTES) if groups else None
        self.store = Store(head_shards(spans, heads, head_bytes), keys)

    @property
    def region(self) -> Region:
        return Region(self.memory.ctypes.data, self.memory.nbytes)

    def _pages(self, start: int, page_rows: int, stride: int) -> Bytes:
        return self.memory[start : start + self.pages * page_rows * stride].reshape(self.pages, page_rows, stride)

    def _span(self, arrays: Sequence[Bytes], stride: int) -> PagedSpan:
        bases = tuple((array.ctypes.data,) for array in arrays)
        return PagedSpan(bases, self.page_rows * stride, self.page_rows, stride)

    def heads_of_rank(self, rank: int) -> range:
        first = rank * self.heads // self.ranks
        return range(first, first + self.heads_per_rank)

    def contains(self, address: int, nbytes: int) -> bool:
        """Returns whether these addresses are inside this memory."""
        start = self.memory.ctypes.data
        return start <= address and address + nbytes <= start + self.memory.nbytes

    def compute(self, pages: Sequence[int], first: int, last: int, seed: int = 0) -> None:
        """Writes rows and index keys [first, last) of the context `seed` to these pages."""
        self._write(self.rows, self.keys, pages, pages, first, last, seed)

    def check(self, row_pages: Sequence[int], key_pages: Sequence[int], first: int, last: int, seed: int = 0) -> None:
        """Asserts that these pages contain rows and index keys [first, last) of the context `seed`, and that all other
        rows and index keys are POISON."""
        expected = ShardedMemory(
            self.ranks,
            self.heads,
            page_rows=self.page_rows,
            pages=self.pages,
            layers=self.layers,
            groups=self.groups,
            head_bytes=self.head_bytes,
        )
        expected._write(expected.rows, expected.keys, row_pages, key_pages, first, last, seed)
        for rows, expected_rows in zip(self.rows, expected.rows, strict=True):
            np.testing.assert_array_equal(np.stack(rows), np.stack(expected_rows))
        for keys, expected_keys in zip(self.keys, expected.keys, strict=True):
            np.testing.assert_array_equal(keys, expected_keys)

    def check_rows(
        self, row_pages: Sequence[int], key_pages: Sequence[int], first: int, last: int, seed: int = 0
    ) -> None:
        """Asserts that these pages contain rows and index keys [first, last) of the context `seed`. Other bytes are not
        compared."""
        rows = [[np.full_like(array, POISON) for array in arrays] for arrays in self.rows]
        keys = [np.full_like(array, POISON) for array in self.keys]
        self._write(rows, keys, row_pages, key_pages, first, last, seed)
        page, row = np.divmod(np.arange(first, last), self.page_rows)
        arrays_found = [
            *((array, row_pages) for arrays in self.rows for array in arrays),
            *((array, key_pages) for array in self.keys),
        ]
        arrays_expected = [*(array for arrays in rows for array in arrays), *keys]
        for (found, pages), expected in zip(arrays_found, arrays_expected, strict=True):
            index = np.asarray(pages)[page], row
            np.testing.assert_array_equal(found[index], expected[index])

    def poison(self, row_pages: Sequence[int], key_pages: Sequence[int]) -> None:
        for arrays in self.rows:
            for array in arrays:
                array[list(row_pages)] = POISON
        for keys in self.keys:
            keys[list(key_pages)] = POISON

    def _write(
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
            for rank, arrays in enumerate(rows):
                for layer, array in enumerate(arrays):
                    heads = [
                        self.head(layer, position, half, head, seed)
                        for half in "KV"
                        for head in self.heads_of_rank(rank)
                    ]
                    array[row_pages[page], row] = np.concatenate(heads)
            for group, array in enumerate(keys):
                array[key_pages[page], row] = _bytes(KEY_BYTES, 91, group, position, seed)

    def head(self, layer: int, position: int, half: str, head: int, seed: int) -> Bytes:
        return _bytes(self.head_bytes, layer, position, ord(half), head, seed)


def _bytes(count: int, *coordinates: int) -> Bytes:
    """Returns `count` bytes that are computed from the coordinates."""
    mixed = 17
    for coordinate in coordinates:
        mixed = (mixed * 1000003 + coordinate * 7919 + 13) % (1 << 31)
    return ((mixed >> 3) + np.arange(count) * 37 & 0xFF).astype(np.uint8)


def fresh_pages(
    source: ShardedMemory, target: ShardedMemory, *, rows: int, seed: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """Returns random pages for a context: at the source, at the target for rows, and at the target for index keys."""
    random = np.random.default_rng(seed)
    spans = (source.store.shards[0].span, target.store.shards[0].span, target.store.shards[0].span)
    sides = (source, target, target)
    found = [
        random.permutation(side.pages)[: span.pages_for(rows)].tolist() for side, span in zip(sides, spans, strict=True)
    ]
    return found[0], found[1], found[2]
