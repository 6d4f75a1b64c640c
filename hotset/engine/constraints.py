"""Constrains the answers of seats to their structures: which tokens may be sampled next.

The mask of a token depends on the token before it, which may still be computed when the next step is submitted. A step
is therefore submitted in two parts: the forward pass, which takes the token from device memory, and sampling. In
between, `masks` waits for the newest tokens of constrained seats, while the device computes the forward pass. The next
forward pass needs the tokens of all seats, so the other seats of the step lose nothing; steps without constrained seats
do not wait.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hotset.base.errors import RequestError
from hotset.base.sampling import PromptSpec
from hotset.base.structure import Structure
from hotset.grammar.compiler import GrammarCompiler
from hotset.grammar.matcher import Bits, Matcher, StructureFailed
from hotset.kernels.device_copies import list_to_device, to_device
from hotset.models.sampler import TokenMasks
from hotset.schedule.plan import NO_DRAFT


class TokenSource(Protocol):
    """A submitted step, of which the sampled tokens can be read."""

    def token_id(self, index: int) -> int:
        """Returns a sampled token. Waits until it is known, but not for later steps."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens that a step samples for one seat: the one with this index, and those that follow accepted drafts."""

    step: TokenSource
    index: int
    drafts: Sequence[int]

    def __iter__(self) -> Iterator[int]:
        """Yields the tokens that are kept. Waits until they are known."""
        for index, draft in enumerate((*self.drafts, NO_DRAFT), self.index):
            token = self.step.token_id(index)
            yield token
            if token != draft:
                return


@dataclass(slots=True)
class _Seat:
    structure: Structure
    matcher: Future[Matcher]
    newest: "_Sampled | None" = None  # the sampled tokens that the matcher has not accepted yet
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SeatMasks:
    """The masks of the constrained seats of a step, and why some of its answers cannot be continued."""

    masks: TokenMasks | None = None
    failures: Mapping[int, str] = field(default_factory=dict)  # by index among the sampled seats


UNCONSTRAINED = SeatMasks()


@dataclass(frozen=True, slots=True)
class _Run:
    """The sampled tokens of one seat: the one with this index, and one more for each of the drafts."""

    seat: int
    index: int
    drafts: Sequence[int]


def _runs(seats: Sequence[int], followed: Sequence[int]) -> Iterator[_Run]:
    firsts = [index for index, draft in enumerate(followed) if draft == NO_DRAFT]
    for first, last in zip(firsts, (*firsts[1:], len(followed)), strict=True):
        yield _Run(seats[first], first, followed[first + 1 : last])


class Constraints:
    """The structures of running requests, by seat. Only one thread may use it."""

    def __init__(self, compiler: GrammarCompiler | None, device: torch.device) -> None:
        """`compiler` is None in workers that do not sample."""
        self._compiler, self._device = compiler, device
        self._seats: dict[int, _Seat] = {}
        self._thread: ThreadPoolExecutor | None = None  # compiles while the prompt is computed

    def warm_up(self) -> None:
        """Prepares the compiler, so that the first structure does not delay a step."""
        if self._compiler is not None:
            self._compiler.warm_up()

    def assign(self, seat: int, prompt: PromptSpec, answer: Sequence[int]) -> None:
        """Gives a seat the structure of a request, if it has one, with the answer so far."""
        self._seats.pop(seat, None)
        structure, compiler = prompt.params.structure, self._compiler
        if structure is None or compiler is None:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotset-grammar")
        matcher = self._thread.submit(_matcher_after, compiler, structure, prompt.stop_ids, answer)
        self._seats[seat] = _Seat(structure, matcher)

    def masks(self, seats: Sequence[int], followed: Sequence[int]) -> SeatMasks:
        """Returns the masks for the next tokens of these seats. Waits for the newest tokens of constrained seats.

        `followed[i]` is the draft before token i, or NO_DRAFT if a final token is before it.
        """
        constrained = [run for run in _runs(seats, followed) if run.seat in self._seats] if self._seats else []
        if not constrained:
            return UNCONSTRAINED
        failures: dict[int, str] = {}
        matchers: list[tuple[_Run, Matcher]] = []
        for run in constrained:
            matcher = self._advanced(self._seats[run.seat])
            if matcher is None:
                failures[run.index] = self._seats[run.seat].failure or ""
            else:
                matchers.append((run, matcher))
        if not matchers:
            return SeatMasks(None, failures)
        indices = [run.index + number for run, _ in matchers for number in range(1 + len(run.drafts))]
        bits = matchers[0][1].masks.empty(len(indices))
        row = 0
        for run, matcher in matchers:
            of_run = bits[row : row + 1 + len(run.drafts)]
            failures |= self._fill(self._seats[run.seat], matcher, run, of_run)
            row += len(of_run)
        requests = list_to_device(indices, torch.int64, self._device)
        return SeatMasks(TokenMasks(requests, to_device(torch.from_numpy(bits), self._device)), failures)

    def record(self, seats: Sequence[int], followed: Sequence[int], step: TokenSource) -> None:
        """Records that `step` samples the next token of `seats[i]` as its i-th token."""
        for run in _runs(seats, followed) if self._seats else ():
            if (seat := self._seats.get(run.seat)) is not None:
                seat.newest = _Sampled(step, run.index, run.drafts)

    def _fill(self, seat: _Seat, matcher: Matcher, run: _Run, bits: Bits) -> dict[int, str]:
        """Writes the masks of a seat's next token and of those after its drafts. Leaves the matcher as it was.

        No mask is needed after a draft that does not fit: it is rejected, and so are all after it. Returns why the
        answer cannot be continued, by the index of the token.
        """
        failures: dict[int, str] = {}
        bits[:] = -1
        accepted = 0
        try:
            for number, draft in enumerate((*run.drafts, NO_DRAFT)):
                matcher.fill(bits, number)
                if draft == NO_DRAFT or not matcher.masks.allows(bits[number], draft):
                    break
                matcher.accept(draft)
                accepted += 1
        except StructureFailed as error:
            bits[accepted] = -1
            failures[run.index + accepted] = str(error)
            if accepted == 0:
                self._fail(seat, str(error))
                return failures
        try:
            matcher.rollback(accepted)
        except StructureFailed as error:
            self._fail(seat, str(error))  # the next step reports it
        return failures

    def _advanced(self, seat: _Seat) -> Matcher | None:
        """Returns the matcher of a seat after its newest token. Returns None if the answer cannot be continued."""
        if seat.failure is not None:
            return None
        try:
            matcher = seat.matcher.result()
            for token in seat.newest or ():
                matcher.accept(token)
            seat.newest = None
            return matcher
        except (RequestError, StructureFailed) as error:
            self._fail(seat, str(error))
            return None

    def _fail(self, seat: _Seat, reason: str) -> str:
        seat.failure = reason
        if self._compiler is not None:
            self._compiler.forget(seat.structure)
        return reason


def _matcher_after(
    compiler: GrammarCompiler, structure: Structure, stop_ids: frozenset[int], answer: Sequence[int]
) -> Matcher:
    matcher = compiler.matcher(structure, stop_ids)
    for token in answer:
        matcher.accept(token)
    return matcher
