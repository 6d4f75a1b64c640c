"""A drafter whose drafts are right with a given probability, so that drafts are rejected at every position."""

from collections.abc import Callable, Sequence
from random import Random


class ImposedDrafter:
    """Knows the right tokens. `following(request_id, tokens)` returns the one after `tokens`, the context so far."""

    def __init__(
        self, following: Callable[[str, Sequence[int]], int], vocab: int, random: Random, right: float = 0.7
    ) -> None:
        self._following, self._vocab, self._random, self._right = following, vocab, random, right
        self.open: set[str] = set()

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        self.open.add(request_id)
        drafts: list[int] = []
        for _ in range(self._random.choice([count, count, self._random.randint(0, count)])):
            token = self._following(request_id, [*tokens, *drafts])
            is_right = self._random.random() < self._right
            drafts.append(token if is_right else self._random.randrange(self._vocab))
        return drafts

    def forget(self, request_id: str) -> None:
        self.open.discard(request_id)
