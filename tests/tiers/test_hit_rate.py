"""The prefix cache finds what plain-Python oracles find, in generated traces like those of published conversations."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

import pytest

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Plan, StepResult
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache

PAGE_ROWS = 8
STEP_TOKENS = 4096
BLOCK_TOKENS = 64  # of a turn of a conversation


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
    contexts: list[tuple[int, ...]]  # the tokens of each request whose rows were computed


def trace(seed: int, requests: int) -> list[TracedRequest]:
    """Returns turns of many conversations, most of which begin with one of three system prompts."""
    random, traced, next_id = Random(seed), [], 3
    conversations: list[list[int]] = []
    for _ in range(requests):
        if not conversations or random.random() < 0.3:
            conversations.append([random.randrange(3)])
        # Recent conversations are more likely to go on.
        blocks = conversations[-1 - min(int(random.expovariate(0.2)), len(conversations) - 1)]
        new_blocks = random.randrange(1, 6)
        blocks += range(next_id, next_id + new_blocks)
        next_id += new_blocks
        tokens = [block * BLOCK_TOKENS + token for block in blocks for token in range(BLOCK_TOKENS)]
        traced.append(TracedRequest(tuple(tokens[: len(tokens) - random.randrange(BLOCK_TOKENS)]), 12))
    return traced


def replay(requests: Sequence[TracedRequest], seats: int, host_pages: int) -> Replayed:
    """Runs all requests through a scheduler, at most `seats` at once, with a cache of `host_pages` pages."""
    longest = max(len(request.prompt) + request.answer for request in requests)
    host = PrefixCache(host_pages)
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
        contexts=[tuple(contexts[number][:-1]) for number in range(len(requests))],
    )


def _execute(plan: Plan, fresh_tokens: Iterable[int]) -> StepResult:
    return StepResult(plan.number, list(islice(fresh_tokens, len(plan.sampled))))


def oracle_hits(
    requests: Sequence[TracedRequest], contexts: Sequence[tuple[int, ...]], pages: int | None = None
) -> int:
    """Returns how many prompt tokens are found if requests are processed one after another.

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


@pytest.mark.parametrize("seats", [1, 4])
def test_the_hit_rate_is_the_optimum_without_a_limit_and_that_of_an_lru_cache_with_one(seats: int) -> None:
    requests = trace(seed=seats, requests=100)
    unlimited = sum(len(request.prompt) + request.answer for request in requests)
    whole = replay(requests, seats, host_pages=unlimited)
    optimum = oracle_hits(requests, whole.contexts)
    assert whole.tokens_queried == sum(len(request.prompt) for request in requests)
    assert whole.tokens_reused / whole.tokens_queried > 0.3 and whole.tokens_reused == optimum
    pages = whole.pages_cached // 4
    bounded = replay(requests, seats, pages)
    lru = oracle_hits(requests, whole.contexts, pages)
    assert bounded.evictions > 0 and lru < optimum, "the limit must matter"
    assert bounded.tokens_reused >= 0.9 * lru


def test_the_oracle_counts_whole_pages_after_known_pages_and_never_the_last_token() -> None:
    context = tuple(range(40))
    turns = [context[:24], context[:24], (*context[:16], 99, *context[17:40]), context[:33]]
    requests = [TracedRequest(turn, 1) for turn in turns]
    assert oracle_hits(requests, turns) == 0 + 16 + 16 + 24
    assert oracle_hits(requests, turns, pages=2) == 0 + 16 + 16 + 16, "the pages of the beginning are kept"
    assert oracle_hits(requests, turns, pages=0) == 0
