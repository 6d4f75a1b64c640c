"""A drafter whose drafts are right with a given probability, so that drafts are rejected at every position."""

from collections.abc import Callable, Sequence
from random import Random


class ImposedDrafter:
    """`next_token(request_id, tokens)` returns the right token after `tokens`, which are the context so far."""

    def __init__(
        self, next_token: Callable[[str, Sequence[int]], int], vocab: int, random: Random, accuracy: float = 0.7
    ) -> None:
        self._next_token, self._vocab, self._random, self._accuracy = next_token, vocab, random, accuracy
        self.open: set[str] = set()

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        self.open.add(request_id)
        drafts: list[int] = []
        for _ in range(self._random.choice([count, count, self._random.randint(0, count)])):
            token = self._next_token(request_id, [*tokens, *drafts])
            is_right = self._random.random() < self._accuracy
            drafts.append(token if is_right else self._random.randrange(self._vocab))
        return drafts

    def forget(self, request_id: str) -> None:
        self.open.discard(request_id)
