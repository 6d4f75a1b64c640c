"""Calls of the op `experts`, with plain weights or weights in fp8."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    gate_up: Any  # a tensor or an Fp8Weight
    down: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.x, self.expert_ids, self.weights, self.gate_up, self.down

    def first(self, tokens: int) -> "Case":
        return replace(self, x=self.x[:tokens], expert_ids=self.expert_ids[:tokens], weights=self.weights[:tokens])


def draw_tokens(tokens: int, k: int, gate_up: Any, down: Any) -> Case:
    """Draws random float32 tokens with k distinct experts each."""
    (count, _, hidden), device = gate_up.shape, down.device
    x, expert_ids = torch.randn(tokens, hidden, device=device), torch.rand(tokens, count, device=device)
    return Case(x, expert_ids.argsort(dim=1)[:, :k], torch.rand(tokens, k, device=device), gate_up, down)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Returns the error in the Frobenius norm, or NaN if any value is NaN."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())
