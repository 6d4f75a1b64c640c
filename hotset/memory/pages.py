"""The page allocator. It only records which pages are held and owns no memory."""

from bisect import bisect_left, insort
from collections.abc import Iterable

from hotset.base.errors import InternalError


class PageAllocator:
    """Allocates page ids in [0, capacity), as runs of consecutive pages if possible.

    If too few pages are free, `allocate` returns None and does not raise.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise InternalError(f"an allocator needs at least one page, not {capacity}")
        self.capacity = capacity
        self._held = bytearray(capacity)
        self._free = 0
        # The free runs, by first page, by the page after the last, and sorted by (length, first page).
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

        A growing request passes its last page as `after`. It gets the free pages that follow this page, so that it
        stays in one run. If these are too few, the others come from the longest free runs, so that it can grow again.
        Without `after`, the pages come from the shortest free run that is long enough or, if there is none, from the
        longest runs.
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
        """Releases pages. Each must be held: releasing a page twice raises InternalError."""
        runs: list[tuple[int, int]] = []
        extend_runs(runs, sorted(pages))
        for first, length in runs:
            if self._held.count(1, first, first + length) < length:
                free = next(page for page in range(first, first + length) if not self._held[page])
                raise InternalError(f"page {free} was released while it was free")
            self._held[first : first + length] = bytes(length)
            if first in self._first_before:
                before = self._first_before[first]
                first, length = before, length + self._drop_run(before)
            if first + length in self._length_at:
                length += self._drop_run(first + length)
            self._add_run(first, length)

    def audit(self) -> None:
        """Proves that the free runs are exactly the pages that are not held, and that all counts agree."""
        free = [page for page in range(self.capacity) if not self._held[page]]
        in_runs = [page for first in sorted(self._length_at) for page in range(first, first + self._length_at[first])]
        assert free == in_runs, "the free runs are not the pages that are not held"
        assert len(free) == self._free, f"{len(free)} pages are free, but {self._free} are counted"
        assert self._by_length == sorted((length, first) for first, length in self._length_at.items())
        assert self._first_before == {first + length: first for first, length in self._length_at.items()}

    def _take(self, first: int, count: int) -> list[int]:
        length = self._drop_run(first)
        if count < length:
            self._add_run(first + count, length - count)
        self._held[first : first + count] = b"\1" * count
        return list(range(first, first + count))

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
    """Appends `pages` to `runs` of (first page, count), and merges consecutive pages."""
    first, count = runs.pop() if runs else (0, 0)
    for page in pages:
        if page == first + count:
            count += 1
        else:
            if count:
                runs.append((first, count))
            first, count = page, 1
    if count:
        runs.append((first, count))
