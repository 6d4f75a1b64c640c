"""Prefix reuse: which cached pages a waiting request can start from, which requests wait for a prefix, and when pages
enter the cache."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from hotset.schedule.queues import SchedulerState
from hotset.schedule.request import Phase, Request
from hotset.tiers.prefix_cache import CachedPage, PageHasher
from hotset.tiers.residence import Residence

PAGES_OF_ANSWER = 16  # full pages of an answer that are published together
HASHED_TOKENS = 1 << 16  # while requests run, a plan hashes at most so many tokens of waiting requests


class Prefixes:
    """Connects requests with the prefix cache of the ledger. Without a hasher or a host store, no prefix is reused."""

    def __init__(self, state: SchedulerState, hasher: PageHasher | None) -> None:
        self._ledger, self._queues, self._counters = state.ledger, state.queues, state.counters
        self._hasher = None if state.ledger.host is None else hasher
        self._page_rows = state.ledger.geometry.page_rows
        self._pages_to_hash = 0  # how many pages of waiting requests this plan may still hash while requests run
        self._last_hashed: Request | None = None
        self._landing: list[Request] = []  # requests whose prompts land; some may have ended
        self._cached_tokens: dict[str, int] = {}  # of requests admitted since the last call of `take_cached_tokens`

    def begin_plan(self) -> None:
        self._pages_to_hash = max(1, HASHED_TOKENS // self._page_rows)
        self._landing = [request for request in self._landing if self._lands(request)]

    def add_landing(self, request: Request) -> None:
        """Adds a request whose prompt a prefill worker computes. Others can wait for its pages."""
        if self._hasher is not None:
            self._landing.append(request)

    def must_wait(self, request: Request) -> bool:
        """Returns True if the next page that a waiting request could use will be in the cache soon, because a running
        request computes it or it lands for another request.

        If that other request is preempted, fails or ends first, the waiting one is admitted without the page. While
        requests run, a plan hashes few tokens. A request whose pages are not all hashed then waits for the next plan.
        """
        other = request.waits_for
        if other is not None and len(other.holding.cached) == request.waits_for_page and self._will_publish(other):
            return True  # nothing has changed since the last check; many requests can wait for the same prefix
        if self._hasher is None or not self._reusable_pages(request):
            return False
        if not self._hash(self._hasher, request, self._pages_to_hash if self._queues.running else None):
            return True
        request.waits_for = self._find_publisher(request)
        request.waits_for_page = 0 if request.waits_for is None else len(request.waits_for.holding.cached)
        return request.waits_for is not None

    def find(self, request: Request) -> list[CachedPage]:
        """Returns the cached pages from which a waiting request can start."""
        if self._hasher is None or not self._reusable_pages(request):
            return []
        self._hash(self._hasher, request)
        return self._ledger.find_prefix(request.page_hashes[: self._reusable_pages(request)])

    def cached_tokens(self, request: Request, others: Iterable[Request]) -> int:
        """Returns how many tokens of a new request need not be computed: their rows are in the cache, or will be when
        the other requests have been computed."""
        if self._hasher is None:
            return 0
        self._hash(self._hasher, request)
        hashes = request.page_hashes[: self._reusable_pages(request)]
        known = len(self._ledger.find_prefix(hashes))
        for other in others:
            if known == len(hashes):
                break
            theirs = other.page_hashes
            if known < len(theirs) and hashes[known] == theirs[known]:
                known = _common_pages(hashes, theirs)
        return known * self._page_rows

    def on_admitted(self, request: Request, prefix: Sequence[CachedPage]) -> None:
        """Counts a request that is admitted with these cached pages, and decides when it publishes its own. A request
        that is admitted again, after it was preempted or its landing failed, is not counted again."""
        if self._hasher is None:
            return
        reused, pages = len(prefix) * self._page_rows, max(len(prefix), len(request.holding.cached))
        request.publish_at = self._next_publication(request, pages)
        if request.num_cached is None and not request.needs_prompt_logits:
            request.num_cached = reused
            self._counters.tokens_queried += len(request.tokens)
            self._counters.tokens_reused += reused
            if reused:
                self._cached_tokens[request.request_id] = reused

    def take_cached_tokens(self) -> dict[str, int]:
        """Returns how many tokens newly admitted requests found in the cache, each request once."""
        cached_tokens, self._cached_tokens = self._cached_tokens, {}
        return cached_tokens

    def publish(self, request: Request, computed: int) -> None:
        """Makes the full pages of a request available to others. Its rows [0, computed) have been computed. Rows beyond
        its known tokens are not published: they were computed before it was known that the answer had ended."""
        assert self._hasher is not None, "without a hasher, `publish_at` is never reached"
        first, pages = len(request.holding.cached), min(computed, len(request.tokens)) // self._page_rows
        request.publish_at = self._next_publication(request, pages)
        if pages > first:
            salt = request.prompt.cache_salt
            self._hash(self._hasher, request)
            tokens: Sequence[int] = ()
            if self._ledger.announces_tokens:
                tokens = request.tokens[first * self._page_rows : pages * self._page_rows]
            self._ledger.publish(request.holding, request.page_hashes[first:pages], tokens, salt)

    def publish_rest(self, request: Request) -> None:
        """Publishes the remaining full pages of a request that is about to lose its pages. No plan in flight uses it,
        so all scheduled rows have been computed. Rows of a landing may not have arrived yet."""
        if self._hasher is not None and request.holding.residence not in (Residence.ABSENT, Residence.LANDING):
            self.publish(request, request.num_scheduled)

    def _next_publication(self, request: Request, published: int) -> int:
        """Returns how many rows must be computed before pages are published again.

        Others may wait for the pages of a prompt, so each page is published at once. Pages of an answer are published
        in groups, which costs less, and the rest when the request loses its pages.
        """
        known = len(request.tokens) // self._page_rows
        return (published + (1 if published < known else PAGES_OF_ANSWER)) * self._page_rows

    def _reusable_pages(self, request: Request) -> int:
        """Returns how many pages a request without pages can take from the cache. Its last token is always computed.
        If the logits of the whole prompt are needed, all tokens are computed."""
        if request.phase is not Phase.WAITING or request.needs_prompt_logits:
            return 0
        return (len(request.tokens) - 1) // self._page_rows

    def _find_publisher(self, request: Request) -> Request | None:
        """Returns another request whose next page to publish is a page that `request` can use."""
        reusable = min(self._reusable_pages(request), len(request.page_hashes))
        for other in (*self._queues.prefilling(), *self._landing):
            published = len(other.holding.cached)
            if published < min(reusable, len(other.page_hashes)) and self._will_publish(other):
                page_hash = other.page_hashes[published]
                if page_hash != request.page_hashes[published] or self._ledger.find_prefix([page_hash]):
                    continue
                if other.phase is Phase.PREFILL or self._lands_enough(other, request, reusable - published):
                    return other
        return None

    @staticmethod
    def _lands_enough(other: Request, request: Request, unknown: int) -> bool:
        """Returns True if the pages that land for `other` are at least half of the `unknown` pages of `request`. Unlike
        a prompt that is computed here, a landing publishes no page before all have arrived, so waiting for it takes
        long."""
        common = _common_pages(request.page_hashes, other.page_hashes) - len(other.holding.cached)
        return 2 * common >= unknown

    def _hash(self, hasher: PageHasher, request: Request, max_pages: int | None = None) -> bool:
        """Computes the missing hashes of full pages of a request, at most `max_pages`. The choices of one prompt arrive
        one after the other, and share the hashes of the prompt.

        Returns True if all hashes of the request are known now.
        """
        pages, last = len(request.tokens) // self._page_rows, self._last_hashed
        if len(request.page_hashes) == pages:
            return True
        if not request.page_hashes and last is not None and _same_prompt(last, request):
            request.page_hashes = last.page_hashes[: len(request.prompt) // self._page_rows]
        known = len(request.page_hashes)
        hasher.extend(request.page_hashes, request.tokens, request.prompt.cache_salt, max_pages)
        self._pages_to_hash = max(0, self._pages_to_hash - (len(request.page_hashes) - known))
        self._last_hashed = request
        return len(request.page_hashes) == pages

    def _will_publish(self, other: Request) -> bool:
        return self._lands(other) or (other.phase is Phase.PREFILL and other not in self._queues.pending)

    def _lands(self, request: Request) -> bool:
        """Returns True if the prompt of a request lands, or has landed and its first step is not committed yet."""
        if request.prefill_at is None or request.phase not in (Phase.LANDING, Phase.PARKED, Phase.DECODE):
            return False
        return len(request.holding.cached) < len(request.prompt) // self._page_rows


def _same_prompt(one: Request, other: Request) -> bool:
    return one.prompt.token_ids == other.prompt.token_ids and one.prompt.cache_salt == other.prompt.cache_salt


def _common_pages(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Returns how many pages two contexts have in common. If one page differs, so do the hashes of all later pages."""
    if not hashes or not others or hashes[0] != others[0]:
        return 0
    pages = range(min(len(hashes), len(others)))
    return bisect_left(pages, True, key=lambda page: hashes[page] != others[page])
