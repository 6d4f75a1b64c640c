"""The runner executes plans. It owns the model, the KV memory and the tokens of every seat, and makes no decisions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hotset.engine.decode_graphs import DecodeGraphs, RunnerModel, SampledLogits
from hotset.kernels.device_copies import list_to_device, to_host_async
from hotset.models.sampler import Sampler, SamplerOutput
from hotset.schedule.plan import Alternatives, AssignSeat, Plan, StepResult
from hotset.tiers.commands import Flush, Load
from hotset.tiers.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that the last pipeline stage sampled, with its seat and position."""

    seat: int
    position: int
    token_id: int


class SubmittedStep:
    """A plan that was submitted. On a GPU it may still be running."""

    def __init__(self, number: int, sampled: SamplerOutput | None) -> None:
        self.number = number
        self._sampled = sampled
        if sampled is not None:
            self._token_ids, self._wait_for_token_ids = to_host_async(sampled.token_ids)

    def result(self) -> StepResult:
        """Returns the result of this step. Waits for its sampled tokens, if any, but not for later steps, unless
        log-probabilities were requested: their copy waits for everything submitted so far."""
        if self._sampled is None:
            return StepResult(self.number, ())
        self._wait_for_token_ids()
        token_ids = self._token_ids.tolist()
        alternatives: dict[int, Alternatives] = {}
        if self._sampled.logprobs is not None:
            on_host = self._sampled.logprobs.to_host()
            by_index = ((index, on_host.of(index)) for index in range(len(token_ids)))
            alternatives = {index: of_token for index, of_token in by_index if of_token is not None}
        return StepResult(self.number, token_ids, alternatives)


class Runner:
    """Executes plans in the order of submission. It stores the sampled tokens of every seat, so the next plan can be
    submitted before the host knows their values."""

    def __init__(
        self,
        model: RunnerModel,
        memory: KvMemory,
        seats: int,
        context: int,
        vocab: int,
        *,
        graphs: bool = False,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        """`context` is the maximum context length. If `graphs`, decode steps are replayed as CUDA graphs.
        `barrier` waits for the other workers that write to the same host store."""
        self._model = model
        self._memory = memory
        self._device = model.device
        self._tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=self._device)
        self._barrier = barrier
        self._sampler = Sampler(seats, vocab, self._device)
        self._graphs = DecodeGraphs(model, memory, self._tokens) if graphs else None

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles kernels and captures graphs before the first request. `progress(done, total)` counts graphs."""
        self._memory.warm_up()
        if self._graphs is not None:
            self._graphs.capture_all(progress)

    def write_sampled(self, tokens: Iterable[SampledToken]) -> None:
        """Stores tokens that the last pipeline stage sampled."""
        for token in tokens:
            self._tokens[token.seat, token.position] = token.token_id

    @torch.inference_mode()
    def submit(self, plan: Plan) -> SubmittedStep:
        """Executes a plan. On a GPU it may return before the step has finished; on a CPU it computes the step."""
        flushed = False
        for command in plan.commands:
            if isinstance(command, AssignSeat):
                self._assign_seat(command)
                continue
            if isinstance(command, Load) and flushed:
                self._barrier()  # the pages to load may have been flushed by another worker, earlier in this plan
                flushed = False
            flushed |= isinstance(command, Flush)
            self._memory.execute(command)
        if not plan.seats:
            return SubmittedStep(plan.number, None)
        graphs = self._graphs
        sampled_logits = graphs.run(plan) if graphs is not None and graphs.can_run(plan) else self._forward(plan)
        self._memory.mirror_filled_pages(plan.seats, plan.starts, plan.counts)
        if sampled_logits is None or not plan.sampled:
            return SubmittedStep(plan.number, None)
        seats = plan.seats if len(plan.sampled) == len(plan.seats) else [plan.seats[index] for index in plan.sampled]
        next_positions = sampled_logits.positions + 1
        sampled = self._sampler.sample(sampled_logits.logits, seats, next_positions)
        self._tokens[sampled_logits.seat_of, next_positions] = sampled.token_ids.to(torch.int32)
        return SubmittedStep(plan.number, sampled)

    def _forward(self, plan: Plan) -> SampledLogits | None:
        """Computes a step without a graph. Returns None if a later pipeline stage computes the logits."""
        view = self._memory.view(plan.seats, plan.starts, plan.counts)
        positions, seat_of = view.segments.positions, view.seat_of
        token_ids = self._tokens[seat_of, positions]
        logit_indices = self._last_tokens(plan)
        logits = self._model.forward(token_ids, view, logit_indices)
        if logits is None:
            return None
        if logit_indices is not None:
            positions, seat_of = positions[logit_indices], seat_of[logit_indices]
        return SampledLogits(logits, positions, seat_of)

    def _assign_seat(self, command: AssignSeat) -> None:
        seat, prompt = command.seat, command.prompt
        tokens = (*prompt.token_ids, *command.answer)
        self._memory.clear_seat(seat)
        self._tokens[seat, : len(tokens)] = list_to_device(tokens, torch.int32, self._device)
        self._sampler.admit(seat, prompt.params, tokens, len(prompt), prompt.stop_ids)

    def _last_tokens(self, plan: Plan) -> Tensor | None:
        """Returns the index, among the step's tokens, of the last token of each sampled segment. Returns None if these
        are all tokens of the step."""
        if len(plan.sampled) == len(plan.counts) == plan.num_tokens:
            return None
        ends = list(accumulate(plan.counts))
        return list_to_device([ends[index] - 1 for index in plan.sampled], torch.int64, self._device)
