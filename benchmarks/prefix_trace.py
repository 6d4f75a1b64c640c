"""Replays a trace of conversations through the scheduler and the prefix cache, and compares the hit rate with oracles.

    python benchmarks/prefix_trace.py mooncake_conversation.jsonl --json prefix_trace.json

The trace is one JSON object per line, with `input_length`, `output_length` and `hash_ids`, one id per block of 512
tokens; equal ids mean equal blocks and equal blocks before them (the traces that kvcache-ai/Mooncake publishes, FAST'25
release). All lengths are divided by 8, and a page has 8 rows, so a block is still 8 pages. Nothing is computed: a
runner returns a new token for every sampled one, so answers are never found again, as in the trace, where the answer of
a turn is a part of the next prompt under a new id.

`--seats 1` replays the requests one after another. With more seats, a new request arrives whenever one ends. The
oracles are plain Python: a set of all pages of earlier requests, without a limit, and the same with the least recently
used pages dropped. Both process the requests one after another. A page is reused only if all pages before it are.

Bars (required results): without a limit, the hit rate is that of the oracle; with 25 % of the pages, it is at least
90 % of what the LRU oracle of that size gets. The replay with 25 % is repeated with different numbers of pages that an
eviction frees at least, and shows in how long runs of consecutive pages allocations and reused prefixes lie. A run
takes a few minutes.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from report import make_parser, report

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator, extend_runs
from hotset.schedule.plan import Plan, StepResult
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import EVICTED_SHARE, CachedPage, PageHasher, PrefixCache

BLOCK_TOKENS = 512
SCALE = 8
PAGE_ROWS = 8
STEP_TOKENS = 4096
BOUNDED_SHARE = 0.25
# Evictions free at least 1/n of all pages. The first is so small that they free only what is needed.
EVICTED_SHARES = (1 << 30, 1024, 512, 256, 128, 64, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    prompt: tuple[int, ...]
    answer: int  # number of tokens


@dataclass(frozen=True, slots=True)
class Replayed:
    """What happened in one replay."""

    tokens_queried: int
    tokens_reused: int
    pages_cached: int  # at the end
    evictions: int
    allocated_run: float  # mean number of consecutive pages in allocations of several pages
    reused_run: float  # the same in the pages of reused prefixes
    contexts: list[tuple[int, ...]]  # the tokens of each request whose rows were computed

    @property
    def hit_rate(self) -> float:
        return self.tokens_reused / self.tokens_queried


def read_trace(lines: Iterable[str], requests: int, scale: int = SCALE) -> list[TracedRequest]:
    """Returns the first requests of a trace with all lengths divided by `scale`. Each hash id becomes a block of
    tokens."""
    block, traced = BLOCK_TOKENS // scale, []
    for line in islice(lines, requests):
        entry = json.loads(line)
        tokens = [block_id * block + token for block_id in entry["hash_ids"] for token in range(block)]
        length = max(1, min(entry["input_length"] // scale, len(tokens)))
        traced.append(TracedRequest(tuple(tokens[:length]), max(1, entry["output_length"] // scale)))
    return traced


class Runs:
    """The mean length of runs of consecutive pages."""

    def __init__(self) -> None:
        self._pages = self._runs = 0

    def add(self, pages: Sequence[int]) -> None:
        runs: list[tuple[int, int]] = []
        extend_runs(runs, pages)
        self._pages += len(pages)
        self._runs += len(runs)

    @property
    def mean(self) -> float:
        return self._pages / max(1, self._runs)


class MeasuredCache(PrefixCache):
    """Measures in how long runs pages are allocated and reused. Evictions free at least `batch` pages."""

    def __init__(self, capacity: int, batch: int) -> None:
        super().__init__(capacity)
        self._batch = batch
        self.allocated, self.reused = Runs(), Runs()

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        if self._free < count <= self.free:
            self.evict(max(count - self._free, self._batch))
        pages = super().allocate(count, after)
        if pages is not None and count > 1:
            self.allocated.add(pages)
        return pages

    def find(self, hashes: Sequence[bytes]) -> list[CachedPage]:
        found = super().find(hashes)
        self.reused.add([cached.page for cached in found])
        return found


def replay(requests: Sequence[TracedRequest], seats: int, host_pages: int, evicted_share: int) -> Replayed:
    """Runs all requests through a scheduler, at most `seats` at once, with a cache of `host_pages` pages."""
    longest = max(len(request.prompt) + request.answer for request in requests)
    host = MeasuredCache(host_pages, batch=host_pages // evicted_share)
    device = PageAllocator(seats * (longest // PAGE_ROWS + 2))
    ledger = Ledger(Geometry(PAGE_ROWS, layers=1, layer_page_bytes=64 * PAGE_ROWS), device, host)
    scheduler = Scheduler(ledger, seats, STEP_TOKENS, hasher=PageHasher("trace", PAGE_ROWS))
    to_add, fresh_tokens, contexts = deque(enumerate(requests)), count(1 << 40), {}
    while to_add or not scheduler.idle:
        while to_add and scheduler.open_requests < seats:
            number, traced = to_add.popleft()
            spec = PromptSpec(traced.prompt, SamplingParams(seed=0))
            request = Request(str(number), spec, len(traced.prompt) + traced.answer)
            scheduler.add(request)
            contexts[number] = request.tokens
        plan = scheduler.plan()
        assert plan is not None, "a request cannot be admitted"
        scheduler.commit(_execute(plan, fresh_tokens))
    scheduler.audit()
    counters = scheduler.counters
    return Replayed(
        tokens_queried=counters.tokens_queried,
        tokens_reused=counters.tokens_reused,
        pages_cached=host.cached,
        evictions=host.evictions,
        allocated_run=host.allocated.mean,
        reused_run=host.reused.mean,
        contexts=[tuple(contexts[number][:-1]) for number in range(len(requests))],
    )


def _execute(plan: Plan, fresh_tokens: Iterable[int]) -> StepResult:
    return StepResult(plan.number, list(islice(fresh_tokens, len(plan.sampled))))


def oracle_hits(
    requests: Sequence[TracedRequest], contexts: Sequence[tuple[int, ...]], pages: int | None = None
) -> int:
    """Returns how many prompt tokens requests find that are processed one after another.

    A cache keeps all full pages of earlier contexts, or the `pages` most recently used ones. Of one context, the last
    pages are dropped first. The last token of a prompt is not looked up.
    """
    numbers: dict[
        tuple[int, tuple[int, ...]], int
    ] = {}  # (number of the page before, tokens of the page) -> its number
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request, context in zip(requests, contexts, strict=True):
        chain, parent = [], -1
        for first in range(0, len(context) - PAGE_ROWS + 1, PAGE_ROWS):
            parent = numbers.setdefault((parent, context[first : first + PAGE_ROWS]), len(numbers))
            chain.append(parent)
        for page in chain[: (len(request.prompt) - 1) // PAGE_ROWS]:
            if page not in cached:
                break
            hits += PAGE_ROWS
        for page in reversed(chain):
            cached[page] = None
            cached.move_to_end(page)
        while pages is not None and len(cached) > pages:
            cached.popitem(last=False)
    return hits


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, help="the trace, one JSON object per line")
    parser.add_argument("--requests", type=int, default=1000, help="replay this many requests from the beginning")
    parser.add_argument("--seats", type=int, nargs="+", default=[1, 8], help="numbers of requests that run at once")
    options = parser.parse_args()
    with options.trace.open() as lines:
        requests = read_trace(lines, options.requests)
    unlimited = sum((len(request.prompt) + request.answer) // PAGE_ROWS + 2 for request in requests)
    rows, notes = [], []
    for seats in options.seats:
        whole = replay(requests, seats, unlimited, EVICTED_SHARE)
        optimum = oracle_hits(requests, whole.contexts)
        pages = int(whole.pages_cached * BOUNDED_SHARE)
        limit = oracle_hits(requests, whole.contexts, pages)
        rows.append(_row(seats, unlimited, None, whole, optimum))
        bounded = [(share, replay(requests, seats, pages, share)) for share in EVICTED_SHARES]
        rows += [_row(seats, pages, share, replayed, limit) for share, replayed in bounded]
        chosen = dict(bounded)[EVICTED_SHARE].tokens_reused
        notes.append(
            f"{seats} seats: {whole.tokens_reused / optimum:.4f} of the optimum (bar: 1),"
            f" {chosen / limit:.4f} of an LRU of {pages} pages (bar: 0.9)"
        )
    title = f"Hit rate of the prefix cache, first {len(requests)} requests of {options.trace.name}, lengths / {SCALE}"
    report(title, rows, options.json, "; ".join(notes))


def _row(seats: int, pages: int, share: int | None, replayed: Replayed, oracle: int) -> dict[str, object]:
    return {
        "seats": seats,
        "host pages": pages,
        "evicted at once": "-" if share is None else max(1, pages // share),
        "hit rate": replayed.hit_rate,
        "of the oracle": replayed.tokens_reused / oracle,
        "evictions": replayed.evictions,
        "pages per run, allocated": replayed.allocated_run,
        "pages per run, reused": replayed.reused_run,
    }


if __name__ == "__main__":
    main()
