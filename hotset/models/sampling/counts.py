"""How often each penalised request has seen each token, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.device_copies import list_to_device


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the penalised rows of a batch, each [m] float64."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class TokenCounts:
    """Rows of counts, [row][token], handed out one per penalised request. Grows as needed, never shrinks."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._answers = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []

    @property
    def held(self) -> int:
        return self._answers.shape[0] - len(self._free)

    def take(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> int:
        """A row that counts these tokens; the caller owns it until `give_back`."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._in_prompt[row].zero_()
        self._in_prompt[row].index_fill_(0, self._sent(prompt_ids), True)
        self._answers[row].zero_()
        answers = self._sent(answer_ids)
        self.add(torch.full_like(answers, row), answers)
        return row

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"count row {row} was given back twice"
        self._free.append(row)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts `token_ids` [m] as answer tokens, each in its own of `rows` [m]; a row may occur more than once."""
        cells = rows * self._answers.shape[1] + token_ids
        one = torch.ones_like(cells, dtype=torch.int32)
        self._answers.view(-1).scatter_add_(0, cells, one)

    def penalised(self, x: Tensor, rows: Tensor, penalties: Penalties) -> Tensor:
        """`x` [m, vocab] after the repetition, then the presence and frequency penalties; `x` itself is kept."""
        repetition, presence, frequency = (
            penalty.unsqueeze(-1).to(x.dtype)
            for penalty in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        answers = self._answers[rows]
        seen = self._in_prompt[rows] | (answers > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - presence * (answers > 0) - frequency * answers
        return x.clamp_(max=torch.finfo(x.dtype).max)  # a repetition penalty below 1 may overflow to inf

    def _sent(self, token_ids: Sequence[int]) -> Tensor:
        vocab = self._answers.shape[1]
        assert all(0 <= token < vocab for token in token_ids), f"a token id outside [0, {vocab})"
        return list_to_device(token_ids, torch.int64, self._answers.device)

    def _grow(self) -> None:
        before, more = self._answers.shape[0], max(1, self._answers.shape[0])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._in_prompt.shape[1])])
        self._answers = torch.cat([self._answers, self._answers.new_zeros(more, self._answers.shape[1])])
        self._free.extend(range(before, before + more))
