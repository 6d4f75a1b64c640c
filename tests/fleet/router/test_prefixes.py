"""The router recognises prompts that begin alike, and knows which workers have their beginnings in their caches."""

import json
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from types import FrameType
from typing import Any, TypeVar

import pytest
from cache_model import HASHER, LETTERS, PAGE_ROWS, PATH, LocalView, words
from hypothesis import given
from hypothesis import strategies as st

from hotset.fleet.kv_events.subscriber import KnownBlocks
from hotset.fleet.router.fleet import Role, RoutedWorker
from hotset.fleet.router.prefixes import (
    BYTES_PER_TOKEN,
    CACHE_KEY_TOKENS,
    HASHED_LENGTHS,
    MAX_HOLDERS,
    SHARED_ENDS,
    PrefixIndex,
    PromptPrefixes,
)
from hotset.serve.page_marks import MAX_MARKS, PageMark, page_marks_header, parse_page_marks
from hotset.tiers.prefix_cache import event_hash

T = TypeVar("T")
TEXT = words(random.Random(7), 40_000)


def body_of(text: str, **fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": text, **fields}).encode()


def prompt_of(text: str, **fields: object) -> PromptPrefixes:
    return PromptPrefixes.of("/v1/completions", body_of(text, **fields))


def common(one: PromptPrefixes, other: PromptPrefixes) -> int:
    """Returns how many hashes of two prompts are the same. They must be the first ones."""
    equal = [a == b for a, b in zip(one.hashes, other.hashes, strict=False)]
    assert equal == sorted(equal, reverse=True), "a prefix is equal only if all shorter ones are"
    return sum(equal)


def worker_of(url: str, cache_id: int, role: Role = "decode") -> RoutedWorker:
    return RoutedWorker(url, role, cache_id=cache_id)


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_prompts_have_equal_hashes_as_far_as_they_are_alike(shared: int, own: int) -> None:
    one = prompt_of(TEXT[:shared] + "1" * own, max_tokens=1)
    other = prompt_of(TEXT[:shared] + "2" * own, max_tokens=2)
    head = len(b'"prompt": "')
    expected = sum(length <= shared + head for length in HASHED_LENGTHS)
    # Without own text, the quote and the name of the next field are alike, too.
    assert common(one, other) == expected or (own == 0 and common(one, other) - expected <= 1)
    assert len(one.hashes) == sum(length <= one.prompt_bytes for length in HASHED_LENGTHS)


def test_a_conversation_that_continues_keeps_its_hashes() -> None:
    messages = [{"role": "system", "content": TEXT[:3000]}, {"role": "user", "content": TEXT[3000:5000]}]
    later = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": TEXT[5000:9000]}]
    for fields in ({}, {"max_tokens": 7}):
        first = PromptPrefixes.of(PATH, json.dumps({**fields, "messages": messages, "stream": True}).encode())
        second = PromptPrefixes.of(PATH, json.dumps({"model": "m", "messages": later}).encode())
        assert common(first, second) == sum(length <= 5000 for length in HASHED_LENGTHS)


def test_the_session_of_an_agent_is_known_by_its_prompt_and_by_its_name() -> None:
    messages = [{"role": "user", "content": TEXT[:5000]}]
    for path, field, session in (
        ("/v1/responses", "input", {"prompt_cache_key": "s1"}),
        ("/v1/messages", "messages", {"metadata": {"user_id": "s1"}}),
    ):
        first, second = (
            PromptPrefixes.of(path, json.dumps({"model": "m", field: prompt, "tools": [], **session}).encode())
            for prompt in (messages, [*messages, {"role": "assistant", "content": "yes"}])
        )
        assert common(first, second) == sum(length <= 5000 for length in HASHED_LENGTHS)
        assert first.cache_key == second.cache_key is not None


def test_a_salt_separates_prompts_and_keys_wherever_it_is_in_the_body() -> None:
    plain, one, other = (prompt_of(TEXT, **fields) for fields in ({}, {"cache_salt": "1"}, {"cache_salt": "2"}))
    first = PromptPrefixes.of("/v1/completions", json.dumps({"cache_salt": "1", "prompt": TEXT}).encode())
    assert common(plain, one) == common(one, other) == 0
    assert common(first, one) == sum(length <= len(TEXT) for length in HASHED_LENGTHS)
    keys = [prompt_of("", prompt_cache_key="k", **fields).cache_key for fields in ({}, {"cache_salt": "1"})]
    assert keys[0] != keys[1] and None not in keys
    assert prompt_of("", prompt_cache_key="k", cache_salt=None).cache_key == keys[0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff" * 5000,
        b'{"messages": "cache_salt": "prompt_cache_key"}',
        b'"prompt"' * 9000,
        b'{"prompt_cache_key": ' + b"[" * 5000,
        b'{"cache_salt": "' + b"\\" * 100_000,
        b'{"prompt_cache_key": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_any_body_is_hashed_without_an_error(body: bytes) -> None:
    for path in (PATH, "/v1/completions", "/elsewhere"):
        prompt = PromptPrefixes.of(path, body)
        assert prompt.cache_key is None
        assert len(prompt.hashes) == len(set(prompt.hashes)) <= len(HASHED_LENGTHS)


def test_long_prompts_have_few_hashes_at_most_a_32nd_apart() -> None:
    assert sum(length <= 8 << 20 for length in HASHED_LENGTHS) < 256
    assert all(longer - shorter <= max(512, shorter / 32) for shorter, longer in pairwise(HASHED_LENGTHS))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30_000)), max_size=12), st.integers(0, 40_000))
def test_a_worker_has_what_was_sent_to_it(sent: list[tuple[int, int]], length: int) -> None:
    index = PrefixIndex()
    workers = [worker_of(f"http://{number}", number) for number in range(4)]
    for number, end in sent:
        index.record_sent(prompt_of(TEXT[:end] + "#" * 2000), workers[number])
    prompt = prompt_of(TEXT[:length])
    head = len(b'"prompt": "')
    for number, cached in enumerate(index.cached_tokens(prompt, workers)):
        longest = max((end for to, end in sent if to == number), default=0)
        alike = min(longest, length) + head if longest else 0
        expected = max((block for block in HASHED_LENGTHS if block <= min(alike, prompt.prompt_bytes)), default=0)
        assert cached == expected // BYTES_PER_TOKEN


def test_a_restarted_worker_has_no_cached_prefixes() -> None:
    index, prompt = PrefixIndex(), prompt_of(TEXT, prompt_cache_key="k")
    worker = worker_of("http://w", 1)
    index.record_sent(prompt, worker)
    assert index.cached_tokens(prompt, [worker]) > [9000]
    worker.cache_id = 2
    assert index.cached_tokens(prompt, [worker]) == [0]


def test_the_index_is_bounded_and_forgets_the_longest_prefixes_of_old_prompts_first() -> None:
    index = PrefixIndex(max_prefixes=100)
    old, new = prompt_of(TEXT), prompt_of(TEXT[::-1])
    worker = worker_of("http://w", 1)
    index.record_sent(old, worker)
    for number in range(100 - len(old.hashes) + 5):
        index.record_sent(prompt_of("", prompt_cache_key=str(number)), worker)
    assert len(index) == 100
    assert index.cached_tokens(old, [worker]) == [HASHED_LENGTHS[len(old.hashes) - 6] // BYTES_PER_TOKEN]
    index.record_sent(new, worker)
    assert len(index) == 100
    prefill = [worker_of("http://p", 10 + number, "prefill") for number in range(MAX_HOLDERS)]
    decode = [worker_of("http://d", 50 + number) for number in range(3 * MAX_HOLDERS)]
    for worker in (*prefill, *decode):
        index.record_sent(new, worker)
    assert all(len(prefix.decode) <= MAX_HOLDERS for prefix in index._prefixes.values())
    assert 0 not in index.cached_tokens(new, prefill), "decode workers take no place of a prefill worker"


def test_a_cache_key_prefers_the_worker_that_served_it_last_if_no_prefix_is_known() -> None:
    index, workers = PrefixIndex(), [worker_of("http://1", 1), worker_of("http://2", 2)]
    index.record_sent(prompt_of("short", prompt_cache_key="k"), workers[0])
    index.record_sent(prompt_of("short", prompt_cache_key="k"), workers[1])
    index.record_sent(prompt_of("short", prompt_cache_key="k"), worker_of("http://prefill", 3, "prefill"))
    assert index.cached_tokens(prompt_of(TEXT, prompt_cache_key="k"), workers) == [0, CACHE_KEY_TOKENS]
    assert index.cached_tokens(prompt_of(TEXT, prompt_cache_key="other"), workers) == [0, 0]


@given(st.integers(0, 10_000))
def test_marks_are_hashes_of_the_pages_of_a_prompt(tokens: int) -> None:
    prompt = list(range(tokens))
    hashes: list[bytes] = []
    HASHER.extend(hashes, prompt, "salt")
    marks = parse_page_marks(page_marks_header(prompt, "salt", HASHER))
    known = {event_hash(page_hash): number for number, page_hash in enumerate(hashes, 1)}
    numbers = [known[mark.block_hash] for mark in marks]
    assert numbers == sorted(set(numbers)) and len(numbers) == min(len(hashes), MAX_MARKS)
    assert numbers[-1:] == [len(hashes)][: len(hashes)]
    shares = [number * PAGE_ROWS / tokens for number in numbers]
    assert [mark.share_of_prompt for mark in marks] == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize("header", ["", "x", "0.5:1", "2.000000:" + "0" * 16, ",,,", "0.500000:" + "g" * 16])
def test_a_header_without_marks_is_ignored(header: str) -> None:
    assert parse_page_marks(header) == []
    assert len(parse_page_marks(",".join(["0.500000:" + "a" * 16] * 1000))) == MAX_MARKS


def test_a_turn_shorter_than_a_page_keeps_its_session_on_its_worker() -> None:
    """The last page that KV events prove is one of the system prompt, which both workers have."""
    index, prompt = PrefixIndex(), prompt_of(TEXT[:1900])
    home, other = worker_of("http://1", 1), worker_of("http://2", 2)
    for worker in (home, other):
        view = LocalView(KnownBlocks())
        view.blocks.store([4], "CPU_TIER1")
        worker.kv_events = view  # type: ignore[assignment]
    index.record_sent(prompt, home)
    index.record_sent(prompt_of(TEXT[:1250]), other)
    index.record_pages(prompt, [PageMark(4 / 6, 4), PageMark(1.0, 6)])
    at_home, elsewhere = index.cached_tokens(prompt_of(TEXT[:2600]), [home, other])
    assert at_home == 1536 // BYTES_PER_TOKEN > elsewhere == int(prompt.prompt_bytes * 4 / 6) // BYTES_PER_TOKEN


def test_kv_events_decide_what_a_worker_has_and_without_them_what_was_sent() -> None:
    index, prompt = PrefixIndex(), prompt_of(TEXT)
    sent, other = worker_of("http://1", 1), worker_of("http://2", 2)
    views = [LocalView(KnownBlocks()), LocalView(KnownBlocks())]
    sent.kv_events, other.kv_events = views  # type: ignore[assignment]
    index.record_sent(prompt, sent)
    index.record_pages(prompt, [PageMark(0.25, 1), PageMark(0.5, 2), PageMark(0.75, 3)])
    views[1].blocks.store([1, 2], "CPU_TIER1")
    evicted, half = index.cached_tokens(prompt, [sent, other])
    smallest_with_a_mark = next(length for length in HASHED_LENGTHS if length >= prompt.prompt_bytes / 4)
    assert evicted == max(length for length in HASHED_LENGTHS if length < smallest_with_a_mark) // BYTES_PER_TOKEN, (
        "the events say that the page at a quarter of the prompt is gone; no page before it is known"
    )
    assert half == int(0.5 * prompt.prompt_bytes) // BYTES_PER_TOKEN, "what follows the page was not sent there"
    index.record_sent(prompt, other)
    before_the_next_mark = max(length for length in HASHED_LENGTHS if length < 0.75 * prompt.prompt_bytes)
    assert index.cached_tokens(prompt, [other]) == [before_the_next_mark // BYTES_PER_TOKEN]
    views[0].synced = False
    assert index.cached_tokens(prompt, [sent])[0] == HASHED_LENGTHS[len(prompt.hashes) - 1] // BYTES_PER_TOKEN


def test_a_worker_has_the_prompts_of_requests_in_flight_and_later_only_those_that_it_has_answered() -> None:
    index, prompt = PrefixIndex(), prompt_of(TEXT, prompt_cache_key="k")
    worker, view = worker_of("http://1", 1), LocalView(KnownBlocks())
    index.record_pages(prompt, [PageMark(0.25, 1), PageMark(0.5, 2), PageMark(0.75, 3)])
    for kv_events in (None, view):
        worker.kv_events = kv_events  # type: ignore[assignment]
        with index.in_flight(prompt, worker), index.in_flight(prompt_of(TEXT[:9000]), worker):
            assert index.cached_tokens(prompt, [worker]) == [HASHED_LENGTHS[len(prompt.hashes) - 1] // BYTES_PER_TOKEN]
            worker.cache_id += 1
            assert index.cached_tokens(prompt, [worker]) == [0], "a worker that has restarted still has them"
            worker.cache_id -= 1
        assert index.cached_tokens(prompt, [worker]) == [0]
        assert not index._in_flight


def test_prompts_that_differ_after_a_common_beginning_are_of_different_sessions() -> None:
    index, worker = PrefixIndex(), worker_of("http://1", 1)
    system, sessions = TEXT[:6000], [TEXT[10_000 * number :][:3000] for number in (1, 2, 3)]
    assert not index.continues_session(prompt_of(system + sessions[0]))
    index.record_sent(prompt_of(system + sessions[0]), worker)
    index.record_sent(prompt_of(system + sessions[1]), worker)
    assert not index.continues_session(prompt_of(system + sessions[2]))
    assert index.continues_session(prompt_of(system + sessions[0] + "more"))
    for turn in range(1, 100):  # the turns are shorter than a step
        prompt = prompt_of(system + sessions[0] + TEXT[20_000:][: 50 * turn])
        assert index.continues_session(prompt), turn
        index.record_sent(prompt, worker)
    for number in range(SHARED_ENDS):
        index.record_sent(prompt_of(TEXT[5000:][:6100] + str(number)), worker)
    another_question = prompt_of(TEXT[5000:][:6100] + "another")
    assert not index.continues_session(another_question), "short questions about one long text count as a session"


def executed_lines(call: Callable[[], T]) -> tuple[T, int]:
    """Returns the result of a call, and how many lines of Python it executed, which unlike time do not vary."""
    executed = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal executed
        executed += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return call(), executed
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("events", [True, False], ids=["with KV events", "without KV events"])
def test_the_caches_of_64_workers_are_searched_in_less_than_15000_lines(events: bool) -> None:
    """It takes 9,909 with KV events and 6,611 without. A search of all prefixes for each worker would take 25,000."""
    index, prompt = PrefixIndex(), prompt_of(LETTERS * 4)
    assert len(prompt.hashes) == 144
    workers = [worker_of(f"http://{number}", number) for number in range(64)]
    shares = [number / MAX_MARKS for number in range(1, MAX_MARKS + 1)]
    index.record_pages(prompt, [PageMark(share, number) for number, share in enumerate(shares)])
    for number, worker in enumerate(workers):
        index.record_sent(prompt_of((LETTERS * 4)[: 8000 * number]), worker)
        if events:
            view = LocalView(KnownBlocks())
            view.blocks.store(range(number), "CPU_TIER1")
            worker.kv_events = view  # type: ignore[assignment]
    with ExitStack() as requests:
        for worker in workers[:32]:
            requests.enter_context(index.in_flight(prompt_of(LETTERS), worker))
        cached, lines = executed_lines(lambda: index.cached_tokens(prompt, workers))
    assert cached[63] > cached[58] > cached[20] > 0
    assert lines < 15_000
