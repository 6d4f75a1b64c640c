"""Estimates which workers have the beginning of a prompt in their prefix caches.

The router has no tokenizer and does not parse bodies. It hashes the bytes of a body from the prompt's field on, up to a
series of fixed lengths. Two requests whose prompts begin alike have the same first hashes, whatever follows. A wrong
estimate can make the choice of a worker worse, but no answer wrong.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from hotset.serve.page_marks import PageMark

BYTES_PER_TOKEN = 4  # a rough estimate from the size of a body
MIN_STEP_BYTES = 512
MAX_HASHED_BYTES = 1 << 30
DIGEST_BYTES = 16
MAX_PREFIXES = 1 << 17  # takes about 50 MB; a prompt of 128k tokens has 145 prefixes
MAX_HOLDERS = 8  # workers of each role that are remembered for one prefix
SHARED_ENDS = 32  # a prefix that is the longest one of this many prompts belongs to many sessions
CACHE_KEY_TOKENS = 1024  # a worker that served the same prompt_cache_key counts as having this many tokens
PROMPT_FIELDS = {
    "/v1/chat/completions": b'"messages"',
    "/v1/completions": b'"prompt"',
    "/v1/responses": b'"input"',
    "/v1/messages": b'"messages"',
}
# The field that names the session. In /v1/messages it is metadata.user_id, which contains user and session in requests
# of Claude Code.
SESSION_FIELDS = {"/v1/messages": b'"user_id"'}
STRING_VALUE = re.compile(rb'\s*:\s*"((?:[^"\\]|\\.){1,1024})"', re.DOTALL)


def _lengths() -> Iterator[int]:
    """Yields the lengths in bytes up to which prompts are hashed. The steps grow, so that long prompts have few."""
    length = MIN_STEP_BYTES
    while length <= MAX_HASHED_BYTES:
        yield length
        length += max(MIN_STEP_BYTES, length // 32)


HASHED_LENGTHS = tuple(_lengths())


@dataclass(frozen=True, slots=True)
class PromptPrefixes:
    """The hashes of the beginnings of one prompt. Hash number n covers the first HASHED_LENGTHS[n] bytes."""

    hashes: tuple[bytes, ...] = ()
    prompt_bytes: int = 0  # size of the whole prompt, including the fields after it
    cache_key: bytes | None = None  # the hash of the client's prompt_cache_key

    @property
    def tokens(self) -> int:
        """The estimated number of prompt tokens."""
        return self.prompt_bytes // BYTES_PER_TOKEN

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The hashes of the beginnings, shortest first, followed by the hash of the prompt_cache_key, if any."""
        return self.hashes if self.cache_key is None else (*self.hashes, self.cache_key)

    @classmethod
    def of(cls, path: str, body: bytes) -> "PromptPrefixes":
        """Hashes a body that was sent to `path`. Returns no hashes if it is short or has no prompt."""
        salt = _string_field(body, b'"cache_salt"') or b""
        key = _string_field(body, SESSION_FIELDS.get(path, b'"prompt_cache_key"'))
        cache_key = None if key is None else _hash(b"key", salt, key).digest()[:DIGEST_BYTES]
        # JSON escapes quotes inside strings. A match is therefore a field's name or a whole string.
        start = body.find(PROMPT_FIELDS[path]) if path in PROMPT_FIELDS else -1
        if start < 0:
            return cls(cache_key=cache_key)
        prompt, hashing, hashes, hashed = memoryview(body)[start:], _hash(b"prompt", salt), [], 0
        for length in HASHED_LENGTHS:
            if length > len(prompt):
                break
            hashing.update(prompt[hashed:length])
            hashes.append(hashing.copy().digest()[:DIGEST_BYTES])
            hashed = length
        return cls(tuple(hashes), len(prompt), cache_key)


class CacheHolder(Protocol):
    """A worker with a prefix cache."""

    @property
    def role(self) -> str:
        """The role of the worker, prefill or decode."""
        ...

    @property
    def cache_id(self) -> int:
        """A number that no other cache has had. A worker that restarts gets another number."""
        ...

    def has_block(self, block_hash: int) -> bool | None:
        """Returns whether a page, as KV events name it, is in the cache, or None if its KV events are not received."""
        ...


@dataclass(slots=True)
class _Prefix:
    """The beginning of a prompt, or a prompt_cache_key."""

    # Cache ids of the workers of each role to which it was sent, newest first.
    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    next_hash: bytes | None = None  # hash of the next longer prefix, in the first prompt that was longer
    branches: bool = False  # whether prompts differ in their next longer prefix
    ends: int = 0  # number of prompts, sent to decode workers, whose longest prefix this is
    block_hash: int | None = None  # hash, in KV events, of a page near the end of the prefix
    block_end: int = 0  # estimated bytes of the prompt up to the end of that page

    def holders(self, role: str) -> tuple[int, ...]:
        return self.prefill if role == "prefill" else self.decode

    def add_holder(self, worker: CacheHolder) -> None:
        others = (holder for holder in self.holders(worker.role) if holder != worker.cache_id)
        holders = (worker.cache_id, *others)[:MAX_HOLDERS]
        if worker.role == "prefill":
            self.prefill = holders
        else:
            self.decode = holders


class _KnownPage(NamedTuple):
    """A page near the end of a prefix."""

    number: int  # number of the prefix
    block_hash: int
    end: int  # estimated bytes of the prompt up to the end of the page


class PrefixIndex:
    """Remembers which prefixes were sent to which workers. Above a limit, it forgets the least recently used prefixes.

    If KV events tell which pages a worker has, and the page of a prefix is known, the events decide. Otherwise a worker
    is assumed to have the prompts that it has answered. It always counts as having the prompts of its requests in
    flight, whose pages are being computed or in use.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[bytes, _Prefix] = OrderedDict()  # the least recently used first
        self._in_flight: dict[bytes, dict[int, int]] = {}  # the number of requests with a prefix, by cache id

    def __len__(self) -> int:
        return len(self._prefixes)

    def cached_tokens(self, prompt: PromptPrefixes, workers: Sequence[CacheHolder]) -> list[int]:
        """Returns an estimate of the tokens at the beginning of `prompt` that each worker has in its cache.

        All `workers` have the same role. The time is proportional to the number of prefixes plus the number of workers.
        """
        known = [self._prefixes.get(key) for key in prompt.hashes]
        role = workers[0].role if workers else ""
        sent = _longest((number, prefix.holders(role)) for number, prefix in enumerate(known) if prefix)
        in_flight = _longest((number, self._in_flight.get(key, ())) for number, key in enumerate(prompt.hashes))
        pages = [
            _KnownPage(number, prefix.block_hash, prefix.block_end)
            for number, prefix in enumerate(known)
            if prefix is not None and prefix.block_hash is not None
        ]
        cached = []
        for worker in workers:
            length = _proved_or_sent(worker, pages, sent.get(worker.cache_id, -1))
            if worker.cache_id in in_flight:
                length = max(length, HASHED_LENGTHS[in_flight[worker.cache_id]])
            cached.append(length // BYTES_PER_TOKEN)
        for index in self._served_key(prompt.cache_key, workers):
            cached[index] = max(cached[index], CACHE_KEY_TOKENS)
        return cached

    def continues_session(self, prompt: PromptPrefixes) -> bool:
        """Returns True if `prompt` seems to continue a known session.

        It seems so if its prompt_cache_key is known, or if its longest known beginning does not look like a system
        prompt that several sessions share.
        """
        if prompt.cache_key is not None and prompt.cache_key in self._prefixes:
            return True
        known = (self._prefixes[key] for key in reversed(prompt.hashes) if key in self._prefixes)
        longest = next(known, None)
        return longest is not None and not longest.branches and longest.ends < SHARED_ENDS

    @contextmanager
    def in_flight(self, prompt: PromptPrefixes, worker: CacheHolder) -> Iterator[None]:
        """Counts `prompt` as cached at `worker` until the block ends."""
        cache_id = worker.cache_id  # read once, because it changes if the worker restarts meanwhile
        for key in prompt.keys:
            requests = self._in_flight.setdefault(key, {})
            requests[cache_id] = requests.get(cache_id, 0) + 1
        try:
            yield
        finally:
            for key in prompt.keys:
                requests = self._in_flight[key]
                requests[cache_id] -= 1
                if not requests[cache_id]:
                    del requests[cache_id]
                if not requests:
                    del self._in_flight[key]

    def record_sent(self, prompt: PromptPrefixes, worker: CacheHolder) -> None:
        """Records that `worker` has answered `prompt`, and therefore has its pages in its cache."""
        # Uses the shortest prefix last, so that it is forgotten last: longer prefixes are useless without it.
        for key in reversed(prompt.keys):
            self._used(key).add_holder(worker)
        for key, next_hash in pairwise(prompt.hashes):
            if (prefix := self._prefixes.get(key)) is not None:
                prefix.next_hash = prefix.next_hash or next_hash
                prefix.branches |= prefix.next_hash != next_hash
        if prompt.hashes and worker.role == "decode" and (last := self._prefixes.get(prompt.hashes[-1])) is not None:
            last.ends += 1

    def record_pages(self, prompt: PromptPrefixes, marks: Sequence[PageMark]) -> None:
        """Records the hashes of pages of `prompt`. Bytes and tokens are assumed to be proportional."""
        for number in reversed(range(len(prompt.hashes))):
            share = HASHED_LENGTHS[number] / prompt.prompt_bytes
            inside = bisect_right(marks, share, key=lambda mark: mark.share_of_prompt)
            if inside:
                mark, prefix = marks[inside - 1], self._used(prompt.hashes[number])
                prefix.block_hash, prefix.block_end = mark.block_hash, int(mark.share_of_prompt * prompt.prompt_bytes)

    def _served_key(self, key: bytes | None, workers: Sequence[CacheHolder]) -> list[int]:
        """Returns the indices of the workers that serve a prompt_cache_key now. If none does, returns the index of the
        worker that served it last."""
        positions = {worker.cache_id: index for index, worker in enumerate(workers)}
        now = [positions[cache_id] for cache_id in self._in_flight.get(key or b"", ()) if cache_id in positions]
        if now or (served := self._prefixes.get(key or b"")) is None:
            return now
        last = (cache_id for cache_id in served.holders(workers[0].role) if cache_id in positions) if workers else ()
        return [positions[cache_id] for cache_id in last][:1]

    def _used(self, key: bytes) -> _Prefix:
        """Returns a prefix, and marks it as the most recently used."""
        prefix = self._prefixes.setdefault(key, _Prefix())
        self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)
        return prefix


def _longest(holders_by_number: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    """Returns the highest number of each cache id. The numbers are in ascending order."""
    return {cache_id: number for number, holders in holders_by_number for cache_id in holders}


def _proved_or_sent(worker: CacheHolder, pages: Sequence[_KnownPage], sent: int) -> int:
    """Returns how many bytes of a prompt `worker` has, if prefix number `sent` is the longest that was sent to it.

    If KV events list a page, the worker has the prompt up to the end of that page. The bytes after it, up to the first
    page that the worker does not have, count as cached if they were sent to the worker. A worker that has a page has
    all pages before it, so a binary search finds the last one.
    """
    proved_bytes = 0
    if pages and worker.has_block(pages[0].block_hash) is not None:
        held = bisect_left(pages, True, key=lambda page: not worker.has_block(page.block_hash))
        proved_bytes = pages[held - 1].end if held else 0
        sent = min(sent, pages[held].number - 1) if held < len(pages) else sent
    return max(proved_bytes, HASHED_LENGTHS[sent] if sent >= 0 else 0)


def _string_field(body: bytes, name: bytes) -> bytes | None:
    """Returns the raw value of the first field `name` of a JSON body if it is a string of 1 to 1024 characters."""
    start = body.find(name)
    found = STRING_VALUE.match(body, start + len(name)) if start >= 0 else None
    return None if found is None else found[1]


def _hash(*parts: bytes) -> "hashlib._Hash":
    hashing = hashlib.sha256()
    for part in parts:
        hashing.update(b"%d %b " % (len(part), part))
    return hashing
