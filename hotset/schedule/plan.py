"""What passes between the scheduler, which decides, and the runner, which acts: numbered values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotset.base.sampling import PromptSpec
from hotset.schedule.request import FinishReason
from hotset.tiers.commands import Command

Alternatives = Mapping[int, tuple[float, int]]  # token id -> (log-probability, rank); the chosen token is among them


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a seat: its fixed place in the worker's tensors. What the seat held before is forgotten."""

    seat: int
    prompt: PromptSpec
    answer: tuple[int, ...]  # what it had generated when it last gave up its seat; empty the first time


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and index keys [first, last) of a prompt computed for a peer are in `pages` of the host store, which begin
    with its first, once the plan that this comes with has been carried out."""

    request_id: str
    first: int
    last: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The last of a prompt computed for a peer."""

    request_id: str
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages are held for a prompt that the worker `prefill_at` is to compute and write there."""

    request_id: str
    attempt: int
    prefill_at: str
    prompt: PromptSpec
    on_device: bool
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Nobody wants that prompt any more. Its pages are held until its end is reported."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Plans are carried out in the order of their numbers; several may be in flight.

    Columns, one entry per segment: `seats[i]` computes rows [starts[i], starts[i] + counts[i]) of its context. The last
    row of segment `sampled[j]` yields the j-th token of the result. Token ids are not in the plan: the worker has the
    prompt from the admission and the answer from its own sampling, so the next plan can be made while this one runs.
    """

    number: int
    commands: Sequence[Admission | Command]  # carried out in order, before the step
    seats: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    sampled: Sequence[int]
    sent: Sequence[Rows | FirstToken] = ()  # of prompts computed for peers
    reads_host: bool = False  # pages that earlier plans may have written: where writers differ, those come first

    @property
    def rows(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What carrying out a plan gave."""

    number: int
    token_ids: Sequence[int]  # aligned with the plan's `sampled`
    alternatives: Mapping[int, Alternatives] = field(default_factory=dict)  # by index into `token_ids`, where asked for


@dataclass(slots=True)
class Committed:
    """What a commit made known, as columns: token `token_ids[i]` of `request_ids[i]`."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    alternatives: dict[int, Alternatives] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)
    why_lost: dict[str, str] = field(default_factory=dict)  # for people; of 'lost' and 'no_room'

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.finished)
