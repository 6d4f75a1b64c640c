"""The runner carries out plans: it owns the model, its memory and every seat's tensors, and decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.sampler import Sampled, Sampler
from hotset.schedule.plan import Admission, Alternatives, Plan, StepResult
from hotset.tiers.coordinator import Coordinator


class Model(Protocol):
    """A model as the runner sees it."""

    device: torch.device

    @property
    def kv_shape(self) -> KvShape:
        """What one token costs in memory."""

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        """Logits of the query rows numbered in `wanted` (None: all), KV read and written through the view."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A plan that was submitted. On a GPU its work may still be under way."""

    number: int
    sampled: Sampled | None

    def result(self) -> StepResult:
        """Waits for the step and brings its tokens to the host."""
        if self.sampled is None:
            return StepResult(self.number, ())
        token_ids = self.sampled.token_ids.tolist()
        alternatives: dict[int, Alternatives] = {}
        if self.sampled.logprobs is not None:
            on_host = self.sampled.logprobs.to_host()
            found = ((at, on_host.row(at)) for at in range(len(token_ids)))
            alternatives = {at: row for at, row in found if row is not None}
        return StepResult(self.number, token_ids, alternatives)


class Runner:
    """Executes plans in the order they come. A seat's tokens live here, so a plan need not carry them."""

    def __init__(self, model: Model, memory: Coordinator, seats: int, context: int, vocab: int) -> None:
        """`context` is the longest that any request may grow."""
        self._model = model
        self._memory = memory
        self._device = model.device
        self._tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=self._device)
        self._sampler = Sampler(seats, vocab, self._device)

    @torch.inference_mode()
    def submit(self, plan: Plan) -> Ticket:
        """Starts the step (on a CPU: carries it out). Never waits for the device."""
        for command in plan.commands:
            if isinstance(command, Admission):
                self._admit(command)
            else:
                self._memory.execute(command)
        view = self._memory.view(plan.seats, plan.starts, plan.counts)
        positions = view.segments.positions
        token_ids = self._tokens[view.seat_of, positions]
        wanted = self._last_rows(plan)
        if wanted is not None:
            positions, seat_of = positions[wanted], view.seat_of[wanted]
        else:
            seat_of = view.seat_of
        logits = self._model.forward(token_ids, view, wanted)
        self._memory.written(plan.seats, plan.starts, plan.counts)
        if not plan.sampled:
            return Ticket(plan.number, None)
        seats = plan.seats if len(plan.sampled) == len(plan.seats) else [plan.seats[at] for at in plan.sampled]
        sampled = self._sampler.sample(logits, seats, positions + 1)
        self._tokens[seat_of, positions + 1] = sampled.token_ids.to(torch.int32)
        return Ticket(plan.number, sampled)

    def _admit(self, admission: Admission) -> None:
        seat, tokens = admission.seat, admission.token_ids
        self._memory.seat(seat)
        self._tokens[seat, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._sampler.admit(seat, admission.params, tokens, admission.prompt_length, admission.stop_ids)

    def _last_rows(self, plan: Plan) -> Tensor | None:
        """The batch rows that yield tokens: the last of each sampled segment. None: every row."""
        if len(plan.sampled) == len(plan.counts) == plan.rows:
            return None
        ends = _running_sum(plan.counts)
        return torch.tensor([ends[at] - 1 for at in plan.sampled], dtype=torch.int64).to(self._device)


def _running_sum(counts: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for count in counts:
        total += count
        sums.append(total)
    return sums
