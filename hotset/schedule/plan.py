"""Plans and results: the values that the scheduler exchanges with the runner."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hotset.base.errors import InternalError
from hotset.base.sampling import Alternatives, PromptSpec
from hotset.schedule.handoffs import Announcement
from hotset.schedule.request import FinishReason, Request
from hotset.tiers.commands import Command, Demote, Load, Promote
from hotset.tiers.residence import Residence

NO_DRAFT = -1  # EMPTY in tensors
DRAFTED = -2  # a draft that only the worker knows: its MTP layer drafted it after the previous step of the seat
READS_HOST = (Load, Demote, Promote)  # commands that read host pages


@dataclass(frozen=True, slots=True)
class PromptRange:
    """Requests the log-probabilities of prompt tokens [first, last) of one request.

    They follow from the logits of tokens [first - 1, last - 1), which segment `segment` of the same plan computes.
    """

    segment: int
    first: int
    last: int
    alternatives: int  # number of likeliest tokens to report for each of the prompt tokens

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """The log-probabilities of consecutive prompt tokens, in columns: a prompt can have millions of them."""

    logprobs: "array[float]"  # of each token
    ranks: "array[int]"
    top_ids: "array[int]"  # the likeliest tokens at each position, likeliest first: the same number for each token
    top_logprobs: "array[float]"

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True, slots=True)
class AssignSeat:
    """Gives a request a seat, its fixed index in the worker's tensors. The seat's previous state is cleared."""

    seat: int
    prompt: PromptSpec
    answer: tuple[int, ...]  # the answer so far; empty for a new request
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes one step. Plans are executed in the order of their numbers; several can be in flight.

    Columns have one entry per segment: `seats[i]` computes tokens [starts[i], starts[i] + counts[i]) of its context.
    The last token of segment `sampled[j]` yields the j-th token of the result. If a segment has drafts, they are its
    last tokens. Each of them, and the token before them, yields a token, so the segment is in `sampled` several times.
    Other token ids are not in the plan. The worker has the prompt from `AssignSeat` and the answer from its own
    sampling, so the next plan can be made while this one runs. If plans in flight verify drafts of a request, only the
    worker knows where its next segment begins: after the last token that was kept (`unverified`).
    """

    number: int
    commands: Sequence[AssignSeat | Command]  # executed in order, before the step
    seats: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    sampled: Sequence[int]
    prompt_ranges: Sequence[PromptRange] = ()
    announcements: Sequence[Announcement] = ()  # about prompts computed for peers
    reads_host: bool = False  # whether the plan reads host pages that other workers may have written in earlier plans
    residences: frozenset[Residence] = frozenset()  # of the segments' requests, once the commands have been executed
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)  # segment -> token ids to verify
    # unverified[i] drafts of the request of segment i are in earlier plans whose results the scheduler does not know
    # yet. The segment begins at starts[i] plus the number of these that are accepted. Empty: there are none
    unverified: Sequence[int] = ()
    # The MTP layer writes rows of segment i only for positions before draft_limits[i]. If this is empty, the layer
    # computes nothing.
    draft_limits: Sequence[int] = ()
    num_drafts: int = 0  # the MTP layer drafts at most so many tokens of each request after the step
    layers_once: bool = False  # only one layer of each kind is computed, as start-up does to load kernels

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def sampled_tokens(self) -> Sequence[int] | None:
        """The indices of the step's tokens whose logits are sampled, or None if all of them are.

        These are the last token of each sampled segment, or the segment's drafts and the token before them.
        """
        if len(self.sampled) == self.num_tokens:
            return None
        ends = list(accumulate(self.counts))
        if not self.drafts:
            return [ends[segment] - 1 for segment in self.sampled]
        indices: list[int] = []
        for segment in dict.fromkeys(self.sampled):
            indices += range(ends[segment] - 1 - len(self.drafts.get(segment, ())), ends[segment])
        return indices

    @property
    def max_counts(self) -> Sequence[int]:
        """The number of tokens from `starts[i]` to the end of segment i, if all unverified drafts are accepted."""
        if not self.unverified:
            return self.counts
        return [count + drafts for count, drafts in zip(self.counts, self.unverified, strict=True)]

    @property
    def followed(self) -> Sequence[int]:
        """For each entry of `sampled`: the draft whose logits yield the token, or NO_DRAFT if there is none."""
        if not self.drafts:
            return (NO_DRAFT,) * len(self.sampled)
        segments = dict.fromkeys(self.sampled)
        return [token for segment in segments for token in (NO_DRAFT, *self.drafts.get(segment, ()))]

    def kept(self, result: "StepResult") -> Sequence[int]:
        """Returns the indices of the sampled tokens that continue their requests. Unsampled segments have none.

        A draft is accepted if it and all drafts before it equal the tokens that were sampled in their places. The first
        sampled token of a segment is kept, and so is the token that follows each accepted draft. If the worker itself
        has accepted drafts, the result has their number.
        """
        token_ids = result.token_ids
        if not self.drafts:
            if not result.unsampled:
                return range(len(token_ids))
            return [index for index, segment in enumerate(self.sampled) if segment not in result.unsampled]
        kept: list[int] = []
        first = 0  # index of the segment's first sampled token
        for segment in dict.fromkeys(self.sampled):
            drafts = self.drafts.get(segment, ())
            wrong = (place for place, draft in enumerate(drafts) if draft != token_ids[first + place])
            accepted = result.accepted[segment] if segment in result.accepted else next(wrong, len(drafts))
            if segment not in result.unsampled:
                kept += range(first, first + 1 + accepted)
            first += 1 + len(drafts)
        return kept


class PlanBuilder:
    """Collects the next plan. Commands can be added at any time, also between two calls of `Scheduler.plan`."""

    def __init__(self) -> None:
        self.number = 0
        self._clear()

    def _clear(self) -> None:
        self.commands: list[AssignSeat | Command] = []
        self.requests: list[Request] = []  # the request of each segment
        self.seats: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.sampled: list[int] = []
        self.drafts: dict[int, Sequence[int]] = {}
        self.unverified: list[int] = []
        self.draft_limits: list[int] = []
        self.num_drafts = 0  # see `Plan.num_drafts`
        self.prompt_ranges: list[PromptRange] = []

    def add_prompt_range(self, request: Request, count: int) -> None:
        """Adds the log-probabilities that follow from the newest `count` scheduled tokens of a request.

        The request will be the next segment. The logits of a token give the log-probability of the token after it. Each
        log-probability is requested once: if a request is recomputed, those of its first tokens are known already.
        """
        known, alternatives = request.num_prompt_logprobs, request.prompt.params.prompt_logprobs
        first = max(known, request.num_scheduled - count) + 1
        last = min(request.num_scheduled + 1, len(request.prompt))
        if first < last:
            if first != known + 1 or alternatives is None:
                raise InternalError(f"{request.request_id} has no logits of its prompt")
            self.prompt_ranges.append(PromptRange(len(self.requests), first, last, alternatives))
            request.num_prompt_logprobs = last - 1

    def build(self, announcements: Sequence[Announcement]) -> Plan:
        """Returns the collected plan and begins the next one."""
        residences = frozenset(request.holding.residence for request in self.requests)
        loads = any(isinstance(command, READS_HOST) for command in self.commands)
        plan = Plan(
            number=self.number,
            commands=self.commands,
            seats=self.seats,
            starts=self.starts,
            counts=self.counts,
            sampled=self.sampled,
            prompt_ranges=self.prompt_ranges,
            announcements=announcements,
            reads_host=loads or Residence.STREAMED in residences,
            residences=residences,
            drafts=self.drafts,
            unverified=self.unverified if any(self.unverified) else (),
            draft_limits=self.draft_limits,
            num_drafts=self.num_drafts,
        )
        self.number += 1
        self._clear()
        return plan


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that the execution of a plan has sampled, and log-probabilities of prompts."""

    number: int
    token_ids: Sequence[int]  # aligned with the plan's `sampled`
    alternatives: Mapping[int, Alternatives] = field(default_factory=dict)  # by index into `token_ids`, if requested
    prompt_logprobs: Sequence[LogprobColumns] = ()  # aligned with the plan's `prompt_ranges`
    # By index into `token_ids`: why an answer cannot be continued as its structure demands. Its token has no meaning.
    failures: Mapping[int, str] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)  # by segment: drafts that were right, if the worker knows
    # By segment: tokens that may follow its newest one, for later plans to verify
    next_drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # Segments for which no token was sampled, because the masks of their structures were late
    unsampled: frozenset[int] = frozenset()


@dataclass(slots=True)
class TokenOutputs:
    """New tokens and finished requests. `token_ids[i]` is the next token of request `request_ids[i]`."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    alternatives: dict[int, Alternatives] = field(default_factory=dict)  # by index into `token_ids`, if requested
    # Request id and the next log-probabilities of its prompt, from the second prompt token on. All of them come before
    # the first token of the answer.
    prompt_logprobs: list[tuple[str, LogprobColumns]] = field(default_factory=list)
    cached_tokens: dict[str, int] = field(default_factory=dict)  # by request id, once: tokens found in the prefix cache
    finished: dict[str, FinishReason] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # messages for requests that ended as 'lost' or 'no_room'

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.prompt_logprobs or self.cached_tokens or self.finished)

    def add(self, request_id: str, token_id: int, alternatives: Alternatives | None) -> None:
        if alternatives is not None:
            self.alternatives[len(self.token_ids)] = alternatives
        self.request_ids.append(request_id)
        self.token_ids.append(token_id)
