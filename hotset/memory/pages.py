"""The page allocator. It only records which pages are held and owns no memory."""

from bisect import bisect_left, insort
from collections.abc import Iterable


class PageAllocator:
    """Allocates page ids in [0, capacity), in runs of neighbours if possible.

    If too few pages are free, `allocate` returns None and does not raise.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"an allocator of {capacity} pages"
        self.capacity = capacity
        self._held = bytearray(capacity)
        self._free = 0
        # Free runs in three orders: by first page, by the page after the last, and by (length, first page).
        self._length_at: dict[int, int] = {}
        self._first_before: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._add_run(0, capacity)

    @property
    def free(self) -> int:
        return self._free

    @property
    def held(self) -> int:
        return self.capacity - self._free

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Returns `count` pages, now held by the caller, or None (and changes nothing) if fewer are free.

        The pages continue the run that ends in page `after` if its next page is free, so that a growing request stays
        in one run. Otherwise they come from the shortest run that fits or, for a growing request (`after` given), from
        the longest run, so that it can grow further.
        """
        if count > self._free:
            return None
        pages: list[int] = []
        if after is not None and after + 1 in self._length_at:
            pages = self._take(after + 1, min(count, self._length_at[after + 1]))
        while len(pages) < count:
            missing = count - len(pages)
            index = bisect_left(self._by_length, (missing, -1)) if after is None else len(self._by_length)
            length, first = self._by_length[min(index, len(self._by_length) - 1)]
            pages += self._take(first, min(missing, length))
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Releases pages. Each must be held; releasing a page twice is a bug of the caller and fails at once."""
        for page in sorted(pages):
            assert self._held[page], f"page {page} released while free"
            self._held[page] = 0
            first, length = page, 1
            if page in self._first_before:
                first = self._first_before[page]
                length += self._drop_run(first)
            if page + 1 in self._length_at:
                length += self._drop_run(page + 1)
            self._add_run(first, length)

    def audit(self) -> None:
        """Proves that the free runs are exactly the pages that are not held, and that all counts agree."""
        free = [page for page in range(self.capacity) if not self._held[page]]
        in_runs = [page for first in sorted(self._length_at) for page in range(first, first + self._length_at[first])]
        assert free == in_runs, "free runs disagree with the pages held"
        assert len(free) == self._free, f"{len(free)} pages are free, the count says {self._free}"
        assert self._by_length == sorted((length, first) for first, length in self._length_at.items())
        assert self._first_before == {first + length: first for first, length in self._length_at.items()}

    def _take(self, first: int, count: int) -> list[int]:
        length = self._drop_run(first)
        if count < length:
            self._add_run(first + count, length - count)
        pages = list(range(first, first + count))
        for page in pages:
            self._held[page] = 1
        return pages

    def _add_run(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        insort(self._by_length, (length, first))
        self._free += length

    def _drop_run(self, first: int) -> int:
        length = self._length_at.pop(first)
        del self._first_before[first + length]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        self._free -= length
        return length


def extend_runs(runs: list[tuple[int, int]], pages: Iterable[int]) -> None:
    """Appends `pages` to `runs` of (first page, count), merging neighbours."""
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
