"""The runner executes plans. It owns the model, the KV memory and the tokens of every seat, and makes no decisions."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hotset.base.sampling import Alternatives
from hotset.engine.constraints import Constraints, SampledRun, SeatMasks
from hotset.engine.decode_graphs import DecodeGraphs, RunnerModel, SampledLogits, StepGraph
from hotset.engine.drafts.mtp import DraftedTokens, MtpModel
from hotset.engine.drafts.segments import SampledSegments
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.drafts.worker import WorkerDrafts, planned_drafts
from hotset.grammar.following import StructureProcesses
from hotset.kernels.device_copies import list_to_device, to_host_async
from hotset.memory.resident import ResidentView
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.logprobs import LogprobTensors, prompt_logprobs
from hotset.models.sampler import BatchDrafts, Sampler, SamplerOutput
from hotset.schedule.plan import AssignSeat, LogprobColumns, Plan, PromptRange, StepResult
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

    def __init__(
        self,
        number: int,
        sampled: SamplerOutput | None = None,
        prompts: "PromptLogprobsCopy | None" = None,
        failures: Mapping[int, str] | None = None,
        unsampled: frozenset[int] = frozenset(),
    ) -> None:
        self.number = number
        self._sampled = sampled
        self._prompts = prompts
        self._failures = failures or {}
        self._unsampled = unsampled
        self.drafts: DraftedTokens | None = None
        if sampled is not None:
            self._token_ids, self._wait_for_token_ids = to_host_async(sampled.token_ids)

    @property
    def sampled_ids(self) -> Tensor | None:
        """[tokens] int64, on the device: the sampled tokens. None if the step sampled nothing."""
        return None if self._sampled is None else self._sampled.token_ids

    def token_id(self, index: int) -> int:
        """Returns a sampled token. Waits until it is known, but not for later steps."""
        self._wait_for_token_ids()
        return int(self._token_ids[index])

    def result(self) -> StepResult:
        """Returns the result of this step. Waits for its sampled tokens, if any, but not for later steps. If
        log-probabilities of sampled tokens were requested, their copy waits for everything submitted so far."""
        prompt_columns = () if self._prompts is None else self._prompts.columns()
        if self._sampled is None:
            return StepResult(self.number, (), prompt_logprobs=prompt_columns)
        self._wait_for_token_ids()
        token_ids = self._token_ids.tolist()
        alternatives: dict[int, Alternatives] = {}
        if self._sampled.logprobs is not None:
            on_host = self._sampled.logprobs.to_host()
            by_index = ((index, on_host.of(index)) for index in range(len(token_ids)))
            alternatives = {index: of_token for index, of_token in by_index if of_token is not None}
        return StepResult(
            self.number,
            token_ids,
            alternatives,
            prompt_columns,
            self._failures,
            accepted={} if self.drafts is None else self.drafts.accepted(),
            next_drafts={} if self.drafts is None else self.drafts.next_drafts(),
            unsampled=self._unsampled,
        )


class PromptLogprobsCopy:
    """A copy to the host of the log-probabilities of a plan's prompt ranges."""

    def __init__(self, ranges: Sequence[PromptRange], computed: LogprobTensors) -> None:
        self._ranges = ranges
        tensors = (
            computed.logprobs.double(),
            computed.ranks.int(),
            computed.top_ids.int(),
            computed.top_logprobs.double(),
        )
        self._copies = [to_host_async(tensor) for tensor in tensors]

    def columns(self) -> list[LogprobColumns]:
        """Waits for the copy, and returns the columns of each range."""
        for _, wait in self._copies:
            wait()
        lengths = [len(prompt_range) for prompt_range in self._ranges]
        parts = zip(self._ranges, *(tensor.split(lengths) for tensor, _ in self._copies), strict=True)
        return [
            LogprobColumns(
                logprobs=_to_array("d", logprobs),
                ranks=_to_array("i", ranks),
                top_ids=_to_array("i", top_ids[:, : prompt_range.alternatives]),
                top_logprobs=_to_array("d", top_logprobs[:, : prompt_range.alternatives]),
            )
            for prompt_range, logprobs, ranks, top_ids, top_logprobs in parts
        ]


def _to_array(typecode: str, tensor: Tensor) -> "array[Any]":
    return array(typecode, tensor.contiguous().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The other workers on which the steps of a worker depend. The default is a worker that has none."""

    collectives: Collectives = SINGLE_RANK  # connect the ranks that compute the same tokens
    barrier: Callable[[], None] = lambda: None  # waits for the other workers that write to the same host store
    before_capture: Callable[[int], None] = lambda size: None  # is called before a step of `size` tokens is captured
    wait_for_steps: bool = False  # other replicas or pipeline stages wait for the steps of this worker


NO_NEIGHBOURS = Neighbours()
NO_DRAFTS = DraftSettings()


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
        neighbours: Neighbours = NO_NEIGHBOURS,
        structures: StructureProcesses | None = None,
        drafts: DraftSettings = NO_DRAFTS,
    ) -> None:
        """`context` is the maximum context length. If `graphs`, decode steps can be replayed as CUDA graphs.

        Of several ranks, rank 0 samples, and the others receive its tokens. `structures` follows the answers that have
        a structure; it is None in a worker that does not sample. `drafts` says whether and how the MTP layer drafts,
        and how many tokens decoding requests have in a step.
        """
        self._model = model
        self.memory = memory
        self._device = model.device
        self._tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=self._device)
        self._neighbours, self._collectives = neighbours, neighbours.collectives
        self._vocab, self._draft_settings = vocab, drafts
        self._sampler = Sampler(seats, vocab, self._device)
        self._constraints = Constraints(structures, self._device)
        self._drafts: WorkerDrafts | None = None
        if drafts.by_mtp:
            assert isinstance(model, MtpModel), "the model cannot draft"
            draw = self._sampler.draft if drafts.drawn else None
            self._drafts = WorkerDrafts(model, memory, self._tokens, drafts.max_drafts, self._collectives, draw)
        self._graphs: DecodeGraphs | None = None
        if graphs:
            seat_drafts = None if self._drafts is None else self._drafts.seat_drafts
            self._graphs = DecodeGraphs(
                model, memory, self._tokens, self.max_decoded, neighbours.before_capture, seat_drafts=seat_drafts
            )
            if self._drafts is not None:
                self._drafts.use_graphs(self._graphs, seats)

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps can be replayed as CUDA graphs."""
        return self._graphs is not None

    @property
    def seats(self) -> int:
        return self._tokens.shape[0]

    @property
    def max_decoded(self) -> int:
        """The most tokens of decoding requests in a step, drafts included."""
        return max(self.seats, self._draft_settings.max_verified)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles kernels and captures graphs before the first request. `progress(done, total)` counts graphs."""
        self.memory.warm_up()
        self._constraints.warm_up()
        if self._graphs is not None:
            self._graphs.capture_all(progress)
        if self._drafts is not None:
            self._drafts.capture_all(progress)

    def close(self) -> None:
        """Ends the processes that follow answers, and releases the KV memory. Idempotent."""
        self._constraints.close()
        self.memory.close()

    @torch.inference_mode()
    def write_sampled(self, tokens: Sequence[SampledToken]) -> None:
        """Stores tokens that the last pipeline stage sampled, with one upload. No two may have the same seat and
        position."""
        self._write_tokens([(token.seat, token.position, token.token_id) for token in tokens])

    def _write_tokens(self, columns: Sequence[tuple[int, int, int]]) -> None:
        """Stores tokens, given as (seat, position, token id)."""
        if columns:
            seats, positions, token_ids = list_to_device(columns, torch.int64, self._device).unbind(1)
            self._tokens[seats, positions] = token_ids.to(torch.int32)

    @torch.inference_mode()
    def submit(self, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        """Executes a plan. On a GPU it may return before the step has finished; on a CPU it computes the step.

        If `graph` is not None, it is replayed to compute the step.
        """
        flushed = False
        for command in plan.commands:
            if isinstance(command, AssignSeat):
                self._assign_seat(command)
                continue
            if isinstance(command, Load) and flushed:
                self._neighbours.barrier()  # another worker may have flushed the pages to load, earlier in this plan
                flushed = False
            flushed |= isinstance(command, Flush)
            self.memory.execute(command)
        if not plan.seats:
            return SubmittedStep(plan.number)
        self._write_tokens(planned_drafts(plan))
        mtp = self._drafts if plan.draft_limits else None
        segments = None if mtp is None else mtp.segments_of(plan)
        runs = self._constraints.runs(plan)
        if self._device.type == "cpu":
            self._constraints.request(runs)  # the newest tokens are known: masks are computed beside the forward pass
        sampled_logits = self._forward(plan, segments) if graph is None else self._replay(graph, plan)
        if mtp is None or sampled_logits is None:
            self.memory.mirror_filled_pages(plan.seats, plan.starts, plan.counts)
        if sampled_logits is None:
            return SubmittedStep(plan.number)
        step = self._sampled_step(plan, sampled_logits, segments, runs)
        if mtp is not None:
            view = partial(self._view, plan, segments)
            step.drafts = mtp.after_step(plan, graph, sampled_logits.hidden, view, segments, step.sampled_ids)
        return step

    def _sampled_step(
        self, plan: Plan, sampled_logits: SampledLogits, segments: SampledSegments | None, runs: Sequence[SampledRun]
    ) -> SubmittedStep:
        """Samples from the logits of a step, and stores the tokens."""
        computed = sampled_logits.prompt_logprobs
        prompts = None if computed is None else PromptLogprobsCopy(plan.prompt_ranges, computed)
        if not plan.sampled:
            return SubmittedStep(plan.number, prompts=prompts)
        all_decode = len(plan.sampled) == len(plan.seats) and not plan.drafts
        seats = plan.seats if all_decode else [plan.seats[index] for index in plan.sampled]
        next_positions, followed = sampled_logits.positions + 1, plan.followed
        if self._device.type != "cpu":
            self._constraints.request(runs)  # waits for the step before, while the device computes this one
        alone = not self._neighbours.wait_for_steps and len(runs) == len(plan.seats)
        allowed = self._constraints.masks(runs, alone=alone)
        sampled = self._sample(sampled_logits.logits, seats, next_positions, allowed, followed, segments)
        self._tokens[sampled_logits.seat_of, next_positions] = sampled.token_ids.to(torch.int32)
        unsampled = frozenset(run.segment for run in allowed.late)
        step = SubmittedStep(plan.number, sampled, prompts, allowed.failures, unsampled)
        self._constraints.record(runs, allowed.late, step.token_id)
        return step

    @torch.inference_mode()
    def replay_idle(self, graph: StepGraph) -> None:
        """Takes part in a step in which only other replicas have tokens, by replaying a graph with padding only."""
        self._required_graphs(graph).run(graph, None)

    def _required_graphs(self, graph: StepGraph) -> DecodeGraphs:
        if self._graphs is None:
            raise RuntimeError(f"{graph} was chosen for a worker that captures no graphs")
        return self._graphs

    def _replay(self, graph: StepGraph, plan: Plan) -> SampledLogits | None:
        """Computes a step by replaying a graph. Returns None if a later pipeline stage computes the logits."""
        if self._drafts is not None:
            self._drafts.before_replay(graph)
        computed = self._required_graphs(graph).run(graph, plan)
        last_tokens = None if computed is None else self._sampled_tokens(plan)
        if computed is None or last_tokens is None:
            return computed
        logits, positions, seat_of = computed.logits, computed.positions, computed.seat_of
        return SampledLogits(logits[last_tokens], positions[last_tokens], seat_of[last_tokens], hidden=computed.hidden)

    def _sample(
        self,
        logits: Tensor,
        seats: Sequence[int],
        positions: Tensor,
        allowed: SeatMasks,
        followed: Sequence[int],
        drafts: BatchDrafts | None,
    ) -> SamplerOutput:
        """Samples on rank 0, and returns its tokens on every rank, so that ranks cannot diverge."""
        if self._collectives.rank > 0:
            token_ids = torch.empty(len(seats), dtype=torch.int64, device=self._device)
            return SamplerOutput(self._collectives.broadcast(token_ids), None)
        late = [index for run in allowed.late for index in run.indices]
        sampled = self._sampler.sample(logits, seats, positions, allowed.masks, followed, drafts, uncounted=late)
        return replace(sampled, token_ids=self._collectives.broadcast(sampled.token_ids))

    def _view(self, plan: Plan, segments: SampledSegments | None) -> ResidentView:
        """Returns the view of a step without a graph. Waits for the device if only it knows where segments begin."""
        if segments is None or not plan.unverified:
            return self.memory.view(plan.seats, plan.starts, plan.counts)
        return self.memory.view(plan.seats, segments.starts(), plan.counts, stamps=plan.starts)

    def _forward(self, plan: Plan, segments: SampledSegments | None) -> SampledLogits | None:
        """Computes a step without a graph. Returns None if a later pipeline stage computes the logits."""
        if segments is not None:
            segments.write_drafts(self._tokens)
        view = self._view(plan, segments)
        positions, seat_of = view.segments.positions, view.seat_of
        token_ids = self._tokens[seat_of, positions]
        forward = self._model.forward_once if plan.layers_once else self._model.forward
        hidden = forward(token_ids, view)
        if hidden is None:
            return None
        prompts = self._prompt_logprobs(plan, hidden, positions, seat_of) if plan.prompt_ranges else None
        last_tokens = self._sampled_tokens(plan)
        logits = self._model.logits(hidden, last_tokens)
        if last_tokens is not None:
            positions, seat_of = positions[last_tokens], seat_of[last_tokens]
        return SampledLogits(logits, positions, seat_of, prompts, hidden)

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor, positions: Tensor, seat_of: Tensor) -> LogprobTensors:
        """Computes the log-probabilities of the plan's prompt ranges. The tensors cover all tokens of the step."""
        ends = list(accumulate(plan.counts))
        on_host: list[int] = []
        for prompt_range in plan.prompt_ranges:
            segment = prompt_range.segment
            first_token = ends[segment] - plan.counts[segment]  # index of the segment's first token in the step
            first = first_token + prompt_range.first - 1 - plan.starts[segment]
            on_host += range(first, first + len(prompt_range))
        indices = list_to_device(on_host, torch.int64, self._device)
        token_ids = self._tokens[seat_of[indices], positions[indices] + 1].long()
        return prompt_logprobs(
            lambda some: self._model.logits(hidden, some),
            indices,
            token_ids,
            alternatives=max(prompt_range.alternatives for prompt_range in plan.prompt_ranges),
            vocab=self._vocab,
        )

    def _assign_seat(self, command: AssignSeat) -> None:
        seat, prompt = command.seat, command.prompt
        tokens = (*prompt.token_ids, *command.answer)
        self.memory.clear_seat(seat)
        self._tokens[seat, : len(tokens)] = list_to_device(tokens, torch.int32, self._device)
        if self._collectives.rank == 0 or self._draft_settings.drawn:  # every rank draws the same drafts
            self._sampler.admit(seat, prompt.params, tokens, len(prompt), prompt.stop_ids)
        if self._collectives.rank == 0:
            self._constraints.assign(command)

    def _sampled_tokens(self, plan: Plan) -> Tensor | None:
        indices = plan.sampled_tokens
        return None if indices is None else list_to_device(indices, torch.int64, self._device)
