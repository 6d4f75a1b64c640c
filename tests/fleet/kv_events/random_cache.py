"""A prefix cache that random requests use, and what its publisher must report."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hotset.tiers.prefix_cache import CacheChange, CachedPage, PageHasher, PrefixCache, event_hash

PAGE_ROWS = 4


@dataclass
class _Request:
    used: list[CachedPage]
    private: list[int]  # pages with the same rows as another request's cached page


class RandomCache:
    """Requests with few different tokens, so that many of them have a common prefix, in a cache that is too small."""

    def __init__(self, seed: int, on_change: Callable[[CacheChange], None], capacity: int = 48) -> None:
        self.cache = PrefixCache(capacity)
        self.cache.on_change = on_change
        self._random = random.Random(seed)
        self._hasher = PageHasher("a model", PAGE_ROWS)
        self._requests: list[_Request] = []

    @property
    def hashes(self) -> set[int]:
        """The hashes that a subscriber should know."""
        return {event_hash(page_hash) for page_hash in self.cache._cached}

    def step(self) -> None:
        """Starts or ends a request, or evicts pages."""
        action = self._random.random()
        if action < 0.5:
            self._start()
        elif action < 0.9 and self._requests:
            request = self._requests.pop(self._random.randrange(len(self._requests)))
            self.cache.stop_using(request.used)
            self.cache.release(request.private)
        else:
            self.cache.evict(self._random.randrange(6))
        self.cache.audit()

    def _start(self) -> None:
        tokens = [self._random.randrange(2) for _ in range(PAGE_ROWS)] * self._random.randrange(1, 8)
        tokens += [self._random.randrange(60_000) for _ in range(PAGE_ROWS * self._random.randrange(3))]
        salt = self._random.choice(["", "", "tenant"])
        hashes: list[bytes] = []
        self._hasher.extend(hashes, tokens, salt)
        # A request that began before the others published finds less than is cached now.
        used = self.cache.find(hashes[: self._random.randrange(len(hashes) + 1)])
        self.cache.use(used)
        new = self.cache.allocate(len(hashes) - len(used))
        if new is None:
            self.cache.stop_using(used)
            return
        first = len(used)
        if new:
            self.cache.publish(used, new, hashes[first:], tokens[first * PAGE_ROWS :], salt)
        private = [page for page, cached in zip(new, used[first:], strict=True) if cached.page != page]
        self._requests.append(_Request(used, private))
