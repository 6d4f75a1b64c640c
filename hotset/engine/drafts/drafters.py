"""Speculative decoding: which tokens are drafted for a request, and how many of them a plan verifies."""

from collections.abc import Sequence
from typing import Protocol

NGRAM = 2  # tokens that must be equal before a match counts
MAX_COMPARED = 16  # a match is not followed further back than this many tokens
MAX_MATCHES = 8  # earlier occurrences that are compared, the newest first
MAX_INDEXED = 4096  # tokens that are indexed in one call, so that a long prompt does not delay a plan


class Drafter(Protocol):
    """Guesses the next tokens of requests. Guesses may be wrong: they change the speed, but no token."""

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns at most `count` tokens that may follow `tokens`, the prompt and the answer so far. Between two calls
        for one request, its tokens only grow."""

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Receives the tokens that a step drafted to follow `tokens`, the prompt and the answer so far."""

    def forget(self, request_id: str) -> None:
        """Drops all state of a request. Unknown ids are ignored."""


class MtpDrafter:
    """Drafts what the MTP layer computed at the end of the step that sampled the newest token."""

    def __init__(self) -> None:
        self._received: dict[str, tuple[int, Sequence[int]]] = {}  # number of tokens, drafts of the next ones

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        length, drafts = self._received.get(request_id, (0, ()))
        return drafts[:count] if length == len(tokens) else ()

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        self._received[request_id] = (len(tokens), drafts)

    def forget(self, request_id: str) -> None:
        self._received.pop(request_id, None)


class LookupDrafter:
    """Prompt look-up: drafts the tokens that followed the newest tokens where they occurred before.

    It compares the last `MAX_MATCHES` earlier occurrences of the newest `NGRAM` tokens, and continues the one with the
    most equal tokens before it. Among several, the newest wins.
    """

    def __init__(self) -> None:
        self._indexes: dict[str, _NgramIndex] = {}

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _NgramIndex()
        index.extend(tokens)
        end = max(index.matches(tokens), key=lambda match: _common_suffix(tokens, match), default=None)
        return () if end is None else _continued(tokens, end, count)

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Does nothing, because steps draft nothing."""

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class _NgramIndex:
    """The ends of all n-grams of one context. The end of an n-gram is the position of the token after it."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> its newest end among those indexed
        self._previous: list[int] = []  # the end of the same n-gram before the one that ends at NGRAM + i, or 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the next n-grams that are followed by a token, at most MAX_INDEXED."""
        first = NGRAM + len(self._previous)
        for end in range(first, min(len(tokens), first + MAX_INDEXED)):
            ngram = tuple(tokens[end - NGRAM : end])
            self._previous.append(self._newest.get(ngram, 0))
            self._newest[ngram] = end

    def matches(self, tokens: Sequence[int]) -> list[int]:
        """Returns ends of the n-gram at the end of `tokens`, the newest first."""
        found: list[int] = []
        end = self._newest.get(tuple(tokens[-NGRAM:]), 0)
        while end and len(found) < MAX_MATCHES:
            found.append(end)
            end = self._previous[end - NGRAM]
        return found


def _continued(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Returns `count` tokens from position `end` on. If there are fewer, the text is continued as if it repeated."""
    drafts: list[int] = []
    for position in range(end, end + count):
        drafts.append(tokens[position] if position < len(tokens) else drafts[position - len(tokens)])
    return drafts


def _common_suffix(tokens: Sequence[int], end: int) -> int:
    """Returns how many tokens before position `end` equal those at the end of `tokens`, at most MAX_COMPARED."""
    limit = min(end, MAX_COMPARED)
    return next((n for n in range(limit) if tokens[end - 1 - n] != tokens[-1 - n]), limit)
