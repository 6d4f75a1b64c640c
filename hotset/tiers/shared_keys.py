"""Device pages of index keys that several requests share, because their contexts begin with the same cached pages.

A key page can be shared once it is *whole*: all keys that it has room for, of all index groups and on every worker,
belong to cached pages. A request computes only tokens after its cached pages, so nothing is written to a whole page.
A whole page is registered under the hash of the cached page in which its last key lies. The requests that use the key
page use this cached page, too, so it is not evicted meanwhile.
"""

from collections import Counter
from collections.abc import Sequence

from hotset.base.units import ceil_div
from hotset.memory.geometry import Geometry
from hotset.tiers.prefix_cache import CachedPage
from hotset.tiers.residence import Holding, PageUse

KeyPageId = tuple[bytes, int]  # hash of the cached page in which the key page ends, number of the key page


class SharedKeys:
    """The whole key pages that can be shared, and the number of requests that use each. It allocates no pages."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._page_of: dict[KeyPageId, int] = {}
        self._id_of: dict[int, KeyPageId] = {}
        self._users: Counter[int] = Counter()  # by device page
        self.version = 0  # grows whenever `find` may find other pages, or a request loses its pages

    def find(self, cached: Sequence[CachedPage]) -> list[int]:
        """Returns the first key pages of a context that begins with the pages `cached`, as many as are on the device.

        The caller must `use` them before anything else changes.
        """
        found: list[int] = []
        for number in range(self._whole_pages(len(cached))):
            if (page := self._page_of.get(self._id(cached, number))) is None:
                break
            found.append(page)
        return found

    def use(self, pages: Sequence[int]) -> None:
        """Records one more request that uses these pages."""
        self._users.update(pages)

    def register(self, cached: Sequence[CachedPage], key_pages: Sequence[int], first: int = 0) -> None:
        """Lets other requests use the whole pages among `key_pages`, the key pages of a context that begins with the
        pages `cached`. Their keys have been written, or will be before any later command is executed.

        The pages that were whole when the context had `first` cached pages are registered already. If another request
        has registered a page with the same keys, this request keeps its own.
        """
        for number in range(self._whole_pages(first), min(self._whole_pages(len(cached)), len(key_pages))):
            page_id, page = self._id(cached, number), key_pages[number]
            if page_id not in self._page_of:
                self._page_of[page_id], self._id_of[page], self._users[page] = page, page_id, 1
                self.version += 1

    def count(self, key_pages: Sequence[int]) -> int:
        """Returns how many of the first key pages of a context can be shared, so that nobody writes to them."""
        return next((number for number, page in enumerate(key_pages) if page not in self._id_of), len(key_pages))

    def stop_using(self, key_pages: Sequence[int]) -> list[int]:
        """Records that a request no longer uses its key pages. Returns those that no other request uses."""
        self.version += 1
        unused = []
        for page in key_pages:
            if self._users[page] > 1:
                self._users[page] -= 1
                continue
            unused.append(page)
            del self._users[page]
            if page in self._id_of:
                del self._page_of[self._id_of.pop(page)]
        return unused

    def audit(self, holdings: Sequence[Holding]) -> None:
        """Proves that the users of every page are counted, and that no request can write to a page in use by others."""
        users = Counter(page for holding in holdings for page in holding.pages[PageUse.KEYS])
        assert {page: users[page] for page in self._id_of} == self._users, "the users of a key page are miscounted"
        assert all(count == 1 or page in self._id_of for page, count in users.items()), "a private key page is shared"
        assert self._page_of == {page_id: page for page, page_id in self._id_of.items()}
        for holding in holdings:
            for number, page in enumerate(holding.pages[PageUse.KEYS]):
                if page in self._id_of:
                    whole = number < self._whole_pages(len(holding.cached))
                    assert whole, f"key page {number} is shared, but its request has yet to write to it"
                    assert self._id_of[page] == self._id(holding.cached, number), "a request uses keys of other tokens"

    def _whole_pages(self, num_cached: int) -> int:
        return self._geometry.whole_key_pages(num_cached * self._geometry.page_rows)

    def _id(self, cached: Sequence[CachedPage], number: int) -> KeyPageId:
        end = ceil_div(self._geometry.key_page_end(number), self._geometry.page_rows)
        return cached[end - 1].page_hash, number
