"""Constrains the answers of seats to their structures: which tokens may be sampled next.

The mask of a token depends on the token before it, which may still be computed when the next step is submitted. A step
is therefore submitted in two parts: the forward pass, which takes the token from device memory, and sampling. In
between, `masks` waits for the newest tokens of constrained seats, while the device computes the forward pass. The next
forward pass needs the tokens of all seats, so the other seats of the step lose nothing; steps without constrained seats
do not wait.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hotset.base.errors import RequestError
from hotset.base.sampling import PromptSpec
from hotset.base.structure import Structure
from hotset.grammar.compiler import GrammarCompiler
from hotset.grammar.matcher import Matcher, StructureFailed
from hotset.kernels.device_copies import list_to_device, to_device
from hotset.models.sampler import TokenMasks


class TokenSource(Protocol):
    """A submitted step, of which the sampled tokens can be read."""

    def token_id(self, index: int) -> int:
        """Returns a sampled token. Waits until it is known, but not for later steps."""


@dataclass(slots=True)
class _Seat:
    structure: Structure
    matcher: Future[Matcher]
    newest: tuple[TokenSource, int] | None = None  # the sampled token that the matcher has not accepted yet
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SeatMasks:
    """The masks of the constrained seats of a step, and why some of its answers cannot be continued."""

    masks: TokenMasks | None = None
    failures: Mapping[int, str] = field(default_factory=dict)  # by index among the sampled seats


UNCONSTRAINED = SeatMasks()


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

    def masks(self, seats: Sequence[int]) -> SeatMasks:
        """Returns the masks for the next tokens of these seats. Waits for the newest tokens of constrained seats."""
        constrained = [(index, self._seats[seat]) for index, seat in enumerate(seats) if seat in self._seats]
        if not constrained:
            return UNCONSTRAINED
        failures: dict[int, str] = {}
        matchers: list[tuple[int, Matcher]] = []
        for index, seat in constrained:
            matcher = self._advanced(seat)
            if matcher is None:
                failures[index] = seat.failure or ""
            else:
                matchers.append((index, matcher))
        if not matchers:
            return SeatMasks(None, failures)
        bits = matchers[0][1].masks.empty(len(matchers))
        for row, (index, matcher) in enumerate(matchers):
            try:
                matcher.fill(bits, row)
            except StructureFailed as error:
                bits[row] = -1
                failures[index] = self._fail(self._seats[seats[index]], str(error))
        requests = list_to_device([index for index, _ in matchers], torch.int64, self._device)
        return SeatMasks(TokenMasks(requests, to_device(torch.from_numpy(bits), self._device)), failures)

    def record(self, seats: Sequence[int], step: TokenSource) -> None:
        """Records that `step` samples the next token of `seats[i]` as its i-th token."""
        for index, seat_number in enumerate(seats) if self._seats else ():
            if (seat := self._seats.get(seat_number)) is not None:
                seat.newest = (step, index)

    def _advanced(self, seat: _Seat) -> Matcher | None:
        """Returns the matcher of a seat after its newest token. Returns None if the answer cannot be continued."""
        if seat.failure is not None:
            return None
        try:
            matcher = seat.matcher.result()
            if seat.newest is not None:
                step, index = seat.newest
                matcher.accept(step.token_id(index))
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
