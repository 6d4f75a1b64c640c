"""Memory of one worker in tests of handoffs: rows and index keys in pages, all POISON until they are written.

Rows are sharded over ranks by heads. What a model computes is replaced by bytes that depend on token and position.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.layout import head_shards
from hotset.fleet.handoff.messages import Store
from hotset.fleet.transfer.api import Region
from hotset.schedule.handoffs import ContextPages

POISON = 0xAB
HEAD_BYTES, KEY_BYTES = 7, 5
GAP_BYTES = 64  # after each layer and each part of an index group
Bytes = NDArray[np.uint8]


def computed_bytes(token_ids: Sequence[int], first: int, last: int, units: int, width: int) -> Bytes:
    """Returns the bytes of positions [first, last) of a prompt in all layers, or index groups:
    [units, last - first, width]."""
    tokens = np.asarray(token_ids[first:last], np.int64)[None, :, None]
    positions = np.arange(first, last, dtype=np.int64)[None, :, None]
    unit = np.arange(units)[:, None, None]
    mixed = tokens * 2654435761 + positions * 40503 + unit * 9176 + np.arange(width) * 131
    return ((mixed >> 7) & 0xFF).astype(np.uint8)


class Pool:
    """The pages of rows of one rank, or of index keys. A unit is a layer or an index group. Each page is divided into
    parts, as in `PagedSpan`."""

    def __init__(self, units: Sequence[Bytes], part_rows: int, row_bytes: int, width: int, step: int = 1) -> None:
        """`units` have the shape [parts, pages, bytes of a part]. Only the first `width` bytes of each row are used."""
        self.units, self._width = units, width
        bases = tuple(tuple(part.ctypes.data for part in unit) for unit in units)
        self.span = PagedSpan(bases, units[0].shape[2], part_rows, row_bytes, step)

    def _rows(self, unit: Bytes) -> Bytes:
        """Returns a view of all rows: [parts, pages, part_rows, row_bytes]."""
        part_rows, row_bytes = self.span.part_rows, self.span.row_bytes
        return unit[..., : part_rows * row_bytes].reshape(*unit.shape[:2], part_rows, row_bytes)

    def _index(self, unit: int, pages: Sequence[int], first: int, last: int) -> tuple[Bytes, Bytes, Bytes]:
        """Returns where rows [first, last) of a context are, by the formula of `PagedSpan`: parts, pages and rows."""
        block, row = np.divmod(np.arange(first, last), self.span.part_rows)
        first_part = unit * self.span.step // len(self.units)
        page, part = np.divmod(block * self.span.step + first_part, len(self.units[0]))
        return part, np.asarray(pages, int)[page], row

    def write(self, pages: Sequence[int], first: int, values: Bytes) -> None:
        """Writes `values` of all units, [units, rows, width], to the rows of a context from row `first` on."""
        for number, (unit, rows) in enumerate(zip(self.units, values, strict=True)):
            self._rows(unit)[..., : self._width][self._index(number, pages, first, first + len(rows))] = rows

    def read(self, pages: Sequence[int], first: int, last: int) -> Bytes:
        """Returns rows [first, last) of a context in all units: [units, last - first, width]."""
        return np.stack(
            [
                self._rows(unit)[self._index(number, pages, first, last)][:, : self._width]
                for number, unit in enumerate(self.units)
            ]
        )

    def holds_nothing_but(self, pages: Sequence[int], first: int, last: int) -> bool:
        """Returns whether all bytes are POISON, except rows [first, last) of this context in all units, and unused
        bytes of its pages, which writes may change."""
        for number, unit in enumerate(self.units):
            others = unit.copy()
            others[:, list(pages), self.span.part_rows * self.span.row_bytes :] = POISON
            rows = self._rows(others)
            rows[self._index(number, pages, first, last)] = POISON
            rows[:, list(pages), :, self._width :] = POISON
            if (others != POISON).any():
                return False
        return True

    def poison(self, pages: Sequence[int]) -> None:
        for unit in self.units:
            unit[:, list(pages)] = POISON

    def is_poison(self, pages: Sequence[int]) -> bool:
        return all((unit[:, list(pages)] == POISON).all() for unit in self.units)


class ShardedMemory:
    """One pool of rows for each rank, and a pool of index keys if the model has index groups.

    The layers of all ranks are in one block of memory, in random order and with gaps. The index keys follow.
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
        head_bytes: int = HEAD_BYTES,
        key_bytes: int = KEY_BYTES,
        row_spare: int = 0,
        key_page_rows: int | None = None,
        key_pages: int | None = None,
        key_parts: int = 1,
        key_spare: int = 0,
        seed: int = 0,
        allocate: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        """Each row of a rank ends with `row_spare` unused bytes, and each part of a page of index keys with
        `key_spare`. By default, index keys have as many pages, and as many rows in each, as rows."""
        self.pages, self.page_rows = pages, page_rows
        self._heads, self._head_bytes, self._layers, self._groups = heads, head_bytes, layers, groups
        self._heads_per_rank = max(1, heads // ranks)
        self._width = width = 2 * self._heads_per_rank * head_bytes
        part_rows = (key_page_rows or page_rows) // key_parts
        row_shape = 1, pages, page_rows * (width + row_spare)
        key_shape = key_parts, key_pages or pages, part_rows * key_bytes + key_spare
        layer_bytes, group_bytes = (int(np.prod(shape)) + GAP_BYTES for shape in (row_shape, key_shape))
        self.buffer = allocate(ranks * layers * layer_bytes + groups * group_bytes)
        self.buffer[:] = POISON

        def block(start: int, shape: tuple[int, int, int]) -> Bytes:
            return self.buffer[start : start + int(np.prod(shape))].reshape(shape)

        order = np.random.default_rng(seed).permutation(ranks * layers).reshape(ranks, layers)
        units_of_ranks = [[block(int(index) * layer_bytes, row_shape) for index in indices] for indices in order]
        self.ranks = [Pool(units, page_rows, width + row_spare, width) for units in units_of_ranks]
        first_key = ranks * layers * layer_bytes
        key_units = [block(first_key + group * group_bytes, key_shape) for group in range(groups)]
        self.keys = Pool(key_units, part_rows, key_bytes, key_bytes) if groups else None
        shards = head_shards([pool.span for pool in self.ranks], heads, head_bytes)
        self.store = Store(shards, None if self.keys is None else self.keys.span)

    @property
    def region(self) -> Region:
        return Region(self.buffer.ctypes.data, self.buffer.nbytes)

    def contains(self, address: int, nbytes: int) -> bool:
        """Returns whether these addresses are inside this memory."""
        return self.region.address <= address and address + nbytes <= self.region.address + self.region.nbytes

    def _computed(self, token_ids: Sequence[int], first: int, last: int) -> list[Bytes]:
        """Returns the computed bytes of each pool."""
        rows = computed_bytes(token_ids, first, last, self._layers, 2 * self._heads * self._head_bytes)
        by_head = rows.reshape(self._layers, last - first, 2, self._heads, self._head_bytes)  # K, then V
        found = []
        for rank in range(len(self.ranks)):
            head = rank * self._heads // len(self.ranks)
            of_rank = by_head[:, :, :, head : head + self._heads_per_rank]
            found.append(of_rank.reshape(self._layers, last - first, self._width))
        if self.keys is not None:
            key_bytes = self.keys.span.row_bytes
            found.append(computed_bytes(token_ids, first, last, self._groups, key_bytes))
        return found

    def _pools(self, pages: ContextPages) -> list[tuple[Pool, Sequence[int]]]:
        """Returns all pools, and the pages of a context in each."""
        keys = [] if self.keys is None else [(self.keys, pages.keys)]
        return [*((pool, pages.rows) for pool in self.ranks), *keys]

    def write(self, pages: ContextPages, token_ids: Sequence[int], first: int, last: int) -> None:
        """Writes the computed bytes of rows and index keys [first, last) of a prompt."""
        values = self._computed(token_ids, first, last)
        for (pool, numbers), of_pool in zip(self._pools(pages), values, strict=True):
            pool.write(numbers, first, of_pool)

    def check(self, pages: ContextPages, token_ids: Sequence[int], first: int, last: int) -> None:
        """Asserts that the pages contain the computed bytes of rows and index keys [first, last) of a prompt."""
        values = self._computed(token_ids, first, last)
        for (pool, numbers), expected in zip(self._pools(pages), values, strict=True):
            what = "index keys" if pool is self.keys else "rows"
            np.testing.assert_array_equal(pool.read(numbers, first, last), expected, f"{what} are wrong")

    def check_alone(self, pages: ContextPages, token_ids: Sequence[int], first: int, last: int) -> None:
        """Does the same as `check`, and asserts that all other rows and index keys are POISON."""
        self.check(pages, token_ids, first, last)
        for pool, numbers in self._pools(pages):
            assert pool.holds_nothing_but(numbers, first, last), "other rows or index keys were written to"

    def poison(self, pages: ContextPages) -> None:
        for pool, numbers in self._pools(pages):
            pool.poison(numbers)

    def are_rows_poison(self, row_pages: Sequence[int]) -> bool:
        return all(pool.is_poison(row_pages) for pool in self.ranks)


def fresh_pages(
    source: ShardedMemory, target: ShardedMemory, *, rows: int, seed: int = 0
) -> tuple[ContextPages, ContextPages]:
    """Returns random pages for a context at the source, where index keys have the pages of rows, and at the target."""
    random = np.random.default_rng(seed)

    def pages(pool: Pool) -> tuple[int, ...]:
        count = pool.units[0].shape[1]
        return tuple(random.permutation(count)[: pool.span.pages_for(rows)].tolist())

    at_source, row_pages = pages(source.ranks[0]), pages(target.ranks[0])
    key_pages = () if target.keys is None else pages(target.keys)
    return ContextPages(at_source, at_source), ContextPages(row_pages, key_pages)
