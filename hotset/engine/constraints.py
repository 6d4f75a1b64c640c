"""Constrains the answers of seats to their structures: which tokens may be sampled next.

The mask of a token depends on the token before it, which may still be computed when the next step is submitted. A step
is therefore submitted in two parts: the forward pass, which takes the token from device memory, and sampling. In
between, the newest tokens of constrained seats are sent to the processes that follow their answers
(`grammar/following.py`), and `masks` waits for the masks of these seats, while the device computes the forward pass.
Steps without constrained seats do not wait.

No structure delays a step by more than STEP_SECONDS. A mask that is not there by then is *late*: the step samples
nothing for this seat, and the scheduler schedules the same token again (`Scheduler.commit`). Plans in flight that
already contain the token after it are void for this seat.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hotset.grammar.following import FollowedAnswer, Masks, StructureProcesses
from hotset.kernels.device_copies import list_to_device, to_device
from hotset.models.sampler import TokenMasks
from hotset.schedule.plan import NO_DRAFT, AssignSeat, Plan

STEP_SECONDS = 0.010  # a step waits this long for masks if it also has requests without structures
LATE_SECONDS = 0.002  # a step waits this long for an answer that recently had a late mask
LATE_MASKS = 16  # an answer recently had a late mask until this many masks in a row were in time
ALONE_SECONDS = 0.1  # a step waits this long if all its requests wait for masks
MAX_KEPT = 8  # requests without a seat whose answers are still followed


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The tokens that a step samples for one seat: the token at `index`, and one more after each accepted draft."""

    token_id: Callable[[int], int]  # waits for a sampled token of the step, and returns it
    index: int
    drafts: Sequence[int]

    def __iter__(self) -> Iterator[int]:
        """Yields the tokens that are kept. Waits until they are known."""
        for index, draft in enumerate((*self.drafts, NO_DRAFT), self.index):
            token = self.token_id(index)
            yield token
            if token != draft:
                return


@dataclass(slots=True)
class _Constrained:
    """A request whose answer has a structure."""

    answer: FollowedAnswer
    position: int  # of the token after those that were sent to `answer`
    newest: _Sampled | None = None  # the sampled tokens that were not sent yet
    drafts: Sequence[int] | None = None  # the drafts of the last request for masks at `position`; None without one
    short_waits: int = 0  # steps wait only LATE_SECONDS for this many further masks
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SampledRun:
    """The tokens that a plan samples for one seat: the token at `index`, and one more for each draft."""

    segment: int
    seat: int
    index: int  # among the sampled tokens of the plan
    position: int  # of the first of these tokens in the context
    drafts: Sequence[int]

    @property
    def indices(self) -> range:
        return range(self.index, self.index + 1 + len(self.drafts))


@dataclass(frozen=True, slots=True)
class SeatMasks:
    """The masks of the constrained seats of a step, why some of its answers cannot be continued, and which segments
    sample nothing because their masks are late."""

    masks: TokenMasks | None = None
    failures: Mapping[int, str] = field(default_factory=dict)  # by index among the sampled tokens
    late: Sequence[SampledRun] = ()


UNCONSTRAINED = SeatMasks()


class Constraints:
    """The structures of running requests, by seat. Only one thread may use it."""

    def __init__(self, processes: StructureProcesses | None, device: torch.device) -> None:
        """Takes ownership of `processes`, which is None in workers that do not sample."""
        self._processes, self._device = processes, device
        self._seats: dict[int, _Constrained] = {}
        self._requests: OrderedDict[str, _Constrained] = OrderedDict()  # also those without a seat

    def warm_up(self) -> None:
        """Prepares the processes in the background, so that the first structure need not wait for them."""
        if self._processes is not None:
            self._processes.warm_up()

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def assign(self, command: AssignSeat) -> None:
        """Gives a seat the structure of a request, if it has one. If the answer of a request that was parked is still
        followed, it continues."""
        self._seats.pop(command.seat, None)
        structure = command.prompt.params.structure
        if structure is None or self._processes is None:
            return
        position = len(command.prompt) + len(command.answer)
        constrained = self._requests.pop(command.request_id, None)
        if constrained is not None:
            unsent = 0 if constrained.newest is None else len(list(constrained.newest))
            if constrained.failure is not None or constrained.position + unsent != position:
                constrained.answer.close()
                constrained = None
        if constrained is None:
            answer = self._processes.follow(structure, command.prompt.stop_ids, command.answer)
            constrained = _Constrained(answer, position)
            self._ask(constrained, (), ())
        self._seats[command.seat] = self._requests[command.request_id] = constrained
        if len(self._requests) > len(self._seats) + MAX_KEPT:
            self._forget_oldest()

    def runs(self, plan: Plan) -> list[SampledRun]:
        """Returns the runs of a plan that sample tokens with structures."""
        if not self._seats:
            return []
        runs, index = [], 0
        for segment in dict.fromkeys(plan.sampled):
            drafts, seat = tuple(plan.drafts.get(segment, ())), plan.seats[segment]
            if seat in self._seats:
                position = plan.starts[segment] + plan.counts[segment] - len(drafts)
                runs.append(SampledRun(segment, seat, index, position, drafts))
            index += 1 + len(drafts)
        return runs

    def request(self, runs: Sequence[SampledRun]) -> None:
        """Requests the masks of these runs. Waits for the newest tokens of their seats, but not for the masks."""
        for run in runs:
            constrained = self._seats[run.seat]
            tokens = list(constrained.newest or ())
            constrained.newest = None
            constrained.position += len(tokens)
            is_void = run.position != constrained.position
            if tokens or (not is_void and constrained.drafts != run.drafts):
                self._ask(constrained, tokens, () if is_void else run.drafts)

    def masks(self, runs: Sequence[SampledRun], *, alone: bool) -> SeatMasks:
        """Waits for the requested masks of these runs. `alone` is True if the step computes nothing else."""
        if not runs:
            return UNCONSTRAINED
        began = time.monotonic()
        failures: dict[int, str] = {}
        late: list[SampledRun] = []
        found: list[tuple[SampledRun, Masks]] = []
        for run in runs:
            constrained = self._seats[run.seat]
            if constrained.failure is not None:
                failures[run.index] = constrained.failure
            elif run.position != constrained.position:
                late.append(run)  # the mask of an earlier token was late, so the logits have no meaning
            elif (masks := constrained.answer.masks(began + _max_wait(constrained, alone) - time.monotonic())) is None:
                constrained.short_waits = LATE_MASKS
                late.append(run)
            else:
                constrained.short_waits = max(0, constrained.short_waits - 1)
                found.append((run, masks))
        bits = torch.full((sum(len(run.indices) for run, _ in found), self._words), -1, dtype=torch.int32)
        row = 0
        for run, masks in found:
            bits[row : row + len(masks.bits)] = torch.from_numpy(masks.bits)
            if masks.failure:
                failures[run.index + len(masks.bits)] = masks.failure
            if not len(masks.bits):
                self._seats[run.seat].failure = masks.failure
            row += len(run.indices)
        if not found:
            return SeatMasks(None, failures, late)
        requests = list_to_device([index for run, _ in found for index in run.indices], torch.int64, self._device)
        return SeatMasks(TokenMasks(requests, to_device(bits, self._device)), failures, late)

    def record(self, runs: Sequence[SampledRun], late: Sequence[SampledRun], token_id: Callable[[int], int]) -> None:
        """Records that a step samples the tokens of these runs, except the late ones. `token_id(index)` waits for the
        sampled token at `index`, but not for later steps."""
        for run in runs:
            if run not in late:
                constrained = self._seats[run.seat]
                constrained.newest, constrained.drafts = _Sampled(token_id, run.index, run.drafts), None

    @staticmethod
    def _ask(constrained: _Constrained, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        constrained.answer.request(tokens, drafts)
        constrained.drafts = drafts

    @property
    def _words(self) -> int:
        assert self._processes is not None, "a seat has a structure"
        return self._processes.words

    def _forget_oldest(self) -> None:
        """Stops following the request without a seat that lost its seat first."""
        seated = {id(constrained) for constrained in self._seats.values()}
        oldest = next(key for key, constrained in self._requests.items() if id(constrained) not in seated)
        self._requests.pop(oldest).answer.close()


def _max_wait(constrained: _Constrained, alone: bool) -> float:
    """Returns how many seconds a step waits at most for the masks of an answer."""
    if alone:
        return ALONE_SECONDS
    return LATE_SECONDS if constrained.short_waits else STEP_SECONDS
