"""Which workers have the beginning of a prompt in their prefix caches, as far as the router knows.

The router has no tokenizer and does not parse bodies. It hashes the bytes of a body from the prompt's field on, up to a
series of fixed lengths. Two requests whose prompts begin alike have the same first hashes, whatever follows. A mistake
can only make the choice of a worker worse, never an answer wrong.
"""

import hashlib
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotset.serve.page_marks import PageMark

BYTES_PER_TOKEN = 4  # a rough estimate from the size of a body
MIN_STEP_BYTES = 512
MAX_HASHED_BYTES = 1 << 30
DIGEST_BYTES = 16
MAX_PREFIXES = 1 << 17  # about 50 MB; a prompt of 128k tokens has 145 of them
MAX_HOLDERS = 8  # workers that are remembered for one prefix
SHARED_SENDS = 8  # a prefix that was sent as often, to prefill and decode workers together, is one of many sessions
CACHE_KEY_TOKENS = 1024  # the worth of a worker that served the same prompt_cache_key
PROMPT_FIELDS = {"/v1/chat/completions": b'"messages"', "/v1/completions": b'"prompt"'}
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
    """The hashes of the beginnings of one prompt. Hash number n is that of the first HASHED_LENGTHS[n] bytes."""

    hashes: tuple[bytes, ...] = ()
    prompt_bytes: int = 0  # of the whole prompt, including the fields after it
    cache_key: bytes | None = None  # the hash of the client's prompt_cache_key

    @classmethod
    def of(cls, path: str, body: bytes) -> "PromptPrefixes":
        """Hashes a body that was sent to `path`. Returns no hashes if it is short or has no prompt."""
        salt = _string_field(body, b'"cache_salt"') or b""
        key = _string_field(body, b'"prompt_cache_key"')
        cache_key = None if key is None else _hash(b"key", salt, key).digest()[:DIGEST_BYTES]
        # Inside of strings, JSON escapes quotes. What is found here is therefore a name or a whole string.
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
    def cache_id(self) -> int:
        """A number that no other cache had. A worker that restarts gets another number."""
        ...

    def has_block(self, block_hash: int) -> bool | None:
        """Returns whether a page, as KV events name it, is in the cache, or None if its KV events are not received."""
        ...


@dataclass(slots=True)
class _Prefix:
    """The beginning of a prompt."""

    holders: tuple[int, ...] = ()  # cache ids of the workers to which it was sent, newest first
    sent: int = 0  # how many times it was sent to a worker
    block_hash: int | None = None  # of a page near its end, as KV events name it
    block_end: int = 0  # the bytes of the prompt up to the end of that page, estimated


class PrefixIndex:
    """Remembers which prefixes were sent to which workers. Beyond a limit, it forgets the least recently used ones.

    If KV events tell which pages a worker has, and the page of a prefix is known, the events decide. Otherwise a worker
    is assumed to have what was sent to it.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[bytes, _Prefix] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._prefixes)

    def cached_tokens(self, prompt: PromptPrefixes, workers: Sequence[CacheHolder]) -> list[int]:
        """Returns an estimate of the tokens at the beginning of `prompt` that each worker has in its cache."""
        cached = [0] * len(workers)
        unknown = list(enumerate(workers))
        for number in reversed(range(len(prompt.hashes))):
            if not unknown:
                break
            if (prefix := self._prefixes.get(prompt.hashes[number])) is None:
                continue
            for index, worker in [pair for pair in unknown if _has(pair[1], prefix)]:
                # KV events prove what is before the end of the page. The rest is there if it was sent there.
                was_sent = worker.cache_id in prefix.holders
                cached[index] = (HASHED_LENGTHS[number] if was_sent else prefix.block_end) // BYTES_PER_TOKEN
                unknown.remove((index, worker))
        if prompt.cache_key is not None and (key := self._prefixes.get(prompt.cache_key)) is not None:
            positions = {worker.cache_id: position for position, worker in enumerate(workers)}
            newest = next((positions[holder] for holder in key.holders if holder in positions), None)
            if newest is not None:
                cached[newest] = max(cached[newest], CACHE_KEY_TOKENS)
        return cached

    def belongs_to_one_session(self, prompt: PromptPrefixes) -> bool:
        """Returns True if the longest known beginning of `prompt` was sent only a few times, as that of a session that
        goes on. A system prompt that many sessions share is sent more often."""
        known = (self._prefixes[key] for key in reversed(prompt.hashes) if key in self._prefixes)
        longest = next(known, None)
        return longest is not None and longest.sent < SHARED_SENDS

    def record_sent(self, prompt: PromptPrefixes, worker: CacheHolder) -> None:
        """Records that `prompt` was sent to `worker`, which will have its pages in its cache."""
        keys = (*prompt.hashes, *(() if prompt.cache_key is None else (prompt.cache_key,)))
        # The longest prefixes are forgotten first. They are useless without the shorter ones, but not vice versa.
        for key in reversed(keys):
            prefix = self._used(key)
            others = (holder for holder in prefix.holders if holder != worker.cache_id)
            prefix.holders = (worker.cache_id, *others)[:MAX_HOLDERS]
            prefix.sent += 1

    def record_pages(self, prompt: PromptPrefixes, marks: Sequence[PageMark]) -> None:
        """Records the hashes of pages of `prompt`. Bytes and tokens are assumed to be proportional."""
        for number in reversed(range(len(prompt.hashes))):
            share = HASHED_LENGTHS[number] / prompt.prompt_bytes
            inside = bisect_right(marks, share, key=lambda mark: mark.share_of_prompt)
            if inside:
                mark, prefix = marks[inside - 1], self._used(prompt.hashes[number])
                prefix.block_hash, prefix.block_end = mark.block_hash, int(mark.share_of_prompt * prompt.prompt_bytes)

    def _used(self, key: bytes) -> _Prefix:
        """Returns a prefix, which becomes the one that was used last."""
        prefix = self._prefixes.setdefault(key, _Prefix())
        self._prefixes.move_to_end(key)
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)
        return prefix


def _has(worker: CacheHolder, prefix: _Prefix) -> bool:
    has_block = None if prefix.block_hash is None else worker.has_block(prefix.block_hash)
    return worker.cache_id in prefix.holders if has_block is None else has_block


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
