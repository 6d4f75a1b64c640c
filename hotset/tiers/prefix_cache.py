"""The prefix cache: full host pages that stay in the host store when their request ends, until their memory is needed.

A page is found by the hash of everything that its rows depend on: the model, the request's `cache_salt`, and all tokens
up to the end of the page (`PageHasher`). A new request that begins with the same tokens uses such pages as they are, so
its prefix is not computed again. Pages in the cache are never written.

A request that uses a page also uses all pages before it. When it stops, its last page is the first to become evictable.
In the order of eviction, every page therefore comes after all pages that continue it: least recently used first, and
the end of a prefix before its beginning.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from hotset.memory.pages import PageAllocator

# Evictions free at least 1/64 of all pages, because few pages at a time would be scattered. On a trace of conversations
# (docs/history/measured.md), runs of allocated pages are 2 times as long as if only needed pages were evicted, and
# at most 1 % of the hits are lost.
EVICTED_SHARE = 64
TOKEN_BYTES = 8  # of a token id that is hashed


def event_hash(page_hash: bytes) -> int:
    """Returns the hash of a page as KV events contain it: the last 64 bits."""
    return int.from_bytes(page_hash[-8:], "big")


class PageHasher:
    """Computes the hashes of the full pages of a context. Each depends on all tokens up to the end of its page."""

    def __init__(self, model: str, page_rows: int) -> None:
        """`model` names everything besides the tokens that determines the bytes of a page, such as dtypes."""
        self._model, self.page_rows = model, page_rows

    def extend(self, hashes: list[bytes], tokens: Sequence[int], salt: str, max_pages: int | None = None) -> None:
        """Appends the hashes of the full pages of `tokens` that `hashes` does not have yet, at most `max_pages`."""
        page_rows, known, pages = self.page_rows, len(hashes), len(tokens) // self.page_rows
        if max_pages is not None:
            pages = min(pages, known + max_pages)
        parent = hashes[-1] if hashes else self.root(salt)
        unhashed = tokens[known * page_rows : pages * page_rows]
        packed, page_bytes = struct.pack(f"{len(unhashed)}q", *unhashed), page_rows * TOKEN_BYTES
        for first in range(0, len(packed), page_bytes):
            parent = sha256(parent + packed[first : first + page_bytes]).digest()
            hashes.append(parent)

    def root(self, salt: str) -> bytes:
        """Returns the hash that the first page of a context continues."""
        return sha256(f"{len(self._model)} {self._model} {self.page_rows} {salt}".encode()).digest()


class CachedPage:
    """A host page in the cache. `users` is the number of requests that use it."""

    __slots__ = ("page", "page_hash", "users")

    def __init__(self, page: int, page_hash: bytes) -> None:
        self.page, self.page_hash, self.users = page, page_hash, 1


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages of one context that entered the cache."""

    hashes: tuple[bytes, ...]
    parent: bytes | None  # the hash of the page before them; None if they begin the context
    token_ids: tuple[int, ...]  # the tokens of these pages
    salt: str  # the request's `cache_salt`


@dataclass(frozen=True, slots=True)
class PagesEvicted:
    """Pages that left the cache."""

    hashes: tuple[bytes, ...]


CacheChange = PagesStored | PagesEvicted


class PrefixCache(PageAllocator):
    """The allocator of host pages, and the cache. Pages that no request uses count as free: `allocate` evicts them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._cached: dict[bytes, CachedPage] = {}
        self._unused: OrderedDict[bytes, CachedPage] = OrderedDict()  # in the order of eviction
        self.on_change: Callable[[CacheChange], None] | None = None
        self.evictions = 0  # pages evicted since start
        self.version = 0  # grows whenever pages enter or leave the cache, or their users change

    @property
    def free(self) -> int:
        """The number of pages that `allocate` can return: free ones, and cached ones that no request uses."""
        return self._free + len(self._unused)

    @property
    def held(self) -> int:
        """The number of pages that requests use or that are in quarantine."""
        return self.capacity - self.free

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def unused(self) -> int:
        """The number of cached pages that no request uses."""
        return len(self._unused)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._cached

    def find(self, hashes: Sequence[bytes]) -> list[CachedPage]:
        """Returns the cached pages of the longest known prefix. The caller must `use` them before anything else
        changes."""
        found = []
        for page_hash in hashes:
            if (cached := self._cached.get(page_hash)) is None:
                break
            found.append(cached)
        return found

    def use(self, pages: Sequence[CachedPage]) -> None:
        """Records one more request that uses these pages, which are a whole prefix."""
        self.version += 1
        for cached in pages:
            if cached.users == 0:
                del self._unused[cached.page_hash]
            cached.users += 1

    def publish(
        self,
        used: list[CachedPage],
        pages: Sequence[int],
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        """Adds the full pages of a context that come next after those in `used`, and extends `used` by them.

        If another request has published a page with the same hash before, this request uses the other's page, too, and
        keeps its own. `token_ids` are needed only if there is an `on_change`.
        """
        self.version += 1
        if self.on_change is None and self._cached.keys().isdisjoint(hashes):
            new = [CachedPage(page, page_hash) for page, page_hash in zip(pages, hashes, strict=True)]
            self._cached.update(zip(hashes, new, strict=True))
            used += new
            return
        page_rows = len(token_ids) // len(hashes)
        parent = used[-1].page_hash if used else None
        first = 0  # pages [first, number) are new
        for number, (page, page_hash) in enumerate(zip(pages, hashes, strict=True)):
            own = CachedPage(page, page_hash)
            cached = self._cached.setdefault(page_hash, own)
            if cached is not own:
                self.use([cached])
                self._announce(parent, hashes[first:number], token_ids[first * page_rows : number * page_rows], salt)
                parent, first = page_hash, number + 1
            used.append(cached)
        self._announce(parent, hashes[first:], token_ids[first * page_rows :], salt)

    def _announce(self, parent: bytes | None, hashes: Sequence[bytes], token_ids: Sequence[int], salt: str) -> None:
        if hashes and self.on_change is not None:
            self.on_change(PagesStored(tuple(hashes), parent, tuple(token_ids), salt))

    def stop_using(self, pages: Sequence[CachedPage]) -> None:
        """Records that one request no longer uses these pages, which are a whole prefix."""
        self.version += 1
        unused = self._unused
        for cached in reversed(pages):
            cached.users -= 1
            if cached.users == 0:
                unused[cached.page_hash] = cached

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Returns `count` pages as `PageAllocator` does, after evicting cached pages if necessary."""
        if count > self.free:
            return None
        if count > self._free:
            self.evict(max(count - self._free, self.capacity // EVICTED_SHARE))
        return super().allocate(count, after)

    def evict(self, count: int) -> None:
        """Evicts `count` pages, or all that no request uses if these are fewer."""
        self.version += 1
        evicted = [self._unused.popitem(last=False)[1] for _ in range(min(count, len(self._unused)))]
        for cached in evicted:
            del self._cached[cached.page_hash]
        self.release([cached.page for cached in evicted])
        self.evictions += len(evicted)
        if evicted and self.on_change is not None:
            self.on_change(PagesEvicted(tuple(cached.page_hash for cached in evicted)))

    def audit(self) -> None:
        """Proves that the free runs are correct, and that exactly the pages without users are evictable."""
        super().audit()
        pages = [cached.page for cached in self._cached.values()]
        assert len(pages) == len(set(pages)), "a page is in the cache twice"
        assert all(self._held[page] for page in pages), "a cached page is free"
        unused = {page_hash for page_hash, cached in self._cached.items() if cached.users == 0}
        assert unused == set(self._unused), "a page that is used can be evicted, or one that is unused cannot"

    def users(self) -> dict[int, int]:
        """Returns the number of users of each cached page, for audits."""
        return {cached.page: cached.users for cached in self._cached.values()}
