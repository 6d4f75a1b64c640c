"""The prefix cache finds what plain-Python oracles find, in a generated trace like those of published conversations."""

import json
from random import Random

import pytest
from prefix_trace import BOUNDED_SHARE, TracedRequest, oracle_hits, read_trace, replay

from hotset.tiers.prefix_cache import EVICTED_SHARE


def trace(seed: int, requests: int) -> list[TracedRequest]:
    """Returns turns of many conversations, most of which begin with one of three system prompts."""
    random, lines, next_id = Random(seed), [], 3
    conversations: list[list[int]] = []
    for _ in range(requests):
        if not conversations or random.random() < 0.3:
            conversations.append([random.randrange(3)])
        # Recent conversations are more likely to go on.
        blocks = conversations[-1 - min(int(random.expovariate(0.2)), len(conversations) - 1)]
        new_blocks = random.randrange(1, 6)
        blocks += range(next_id, next_id + new_blocks)
        next_id += new_blocks
        length = 512 * len(blocks) - random.randrange(512)
        lines.append(json.dumps({"input_length": length, "output_length": 100, "hash_ids": blocks}))
    return read_trace(lines, requests)


@pytest.mark.parametrize("seats", [1, 4])
def test_the_hit_rate_is_the_optimum_without_a_limit_and_that_of_an_lru_cache_with_one(seats: int) -> None:
    requests = trace(seed=seats, requests=100)
    unlimited = sum(len(request.prompt) + request.answer for request in requests)
    whole = replay(requests, seats, host_pages=unlimited, evicted_share=EVICTED_SHARE)
    optimum = oracle_hits(requests, whole.contexts)
    assert whole.tokens_queried == sum(len(request.prompt) for request in requests)
    assert 0.3 < whole.hit_rate == optimum / whole.tokens_queried
    pages = int(whole.pages_cached * BOUNDED_SHARE)
    bounded = replay(requests, seats, pages, EVICTED_SHARE)
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
