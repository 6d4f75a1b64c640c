"""The scheduler's record of a request: tokens, limits, pages and phase."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from hotset.base.errors import IllegalTransition, InternalError
from hotset.base.request_options import DEFAULT_OPTIONS, RequestOptions
from hotset.base.sampling import PromptSpec
from hotset.schedule.handoffs import HandoffId
from hotset.tiers.residence import Holding

NEVER = 1 << 62  # more rows than any request has

FinishReason = Literal["stop", "length", "abort", "lost", "no_room", "structure"]


class Phase(Enum):
    WAITING = "waiting"  # holds no seat and no pages
    PREFILL = "prefill"  # holds a seat and pages; its prompt is being computed (after a recompute, its answer too)
    DECODE = "decode"  # holds a seat and pages; every token but the newest has its row
    PARKED = "parked"  # has rows on the host, or rows that landed; it waits for a seat and further device pages
    LANDING = "landing"  # a prefill worker computes its prompt and writes the KV into pages reserved for it
    HANDOFF = "handoff"  # its prompt was computed for a decode worker; its rows stay on the host until they are sent
    ENDING = "ending"  # it has ended, but a plan in flight or a landing still uses its pages
    FINISHED = "finished"  # its seat and pages have been released


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # DECODE if a request that lost its pages finds all rows but the newest in the prefix cache
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.DECODE, Phase.LANDING, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PARKED, Phase.WAITING, Phase.HANDOFF, Phase.ENDING}),
    Phase.DECODE: frozenset({Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.PARKED: frozenset({Phase.PREFILL, Phase.DECODE, Phase.WAITING, Phase.FINISHED}),
    Phase.LANDING: frozenset({Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.HANDOFF: frozenset({Phase.FINISHED}),
    Phase.ENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True)
class PlanNumbers:
    """The plans of a scheduler that are in flight have the numbers [oldest, next)."""

    oldest: int = 0
    next: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence that the model continues. Only the scheduler changes a request."""

    request_id: str
    prompt: PromptSpec
    max_length: int  # of prompt and answer together, in tokens
    options: RequestOptions = DEFAULT_OPTIONS
    # The handoff of a prompt that is computed for a decode worker. This worker needs only the KV of the prompt and the
    # first token of the answer
    for_peer: HandoffId | None = None
    stays_on_device: bool = False  # the KV is sent from the device if the prompt is resident there
    prefill_at: str | None = field(init=False)  # becomes None once this engine is to compute the prompt itself
    tokens: list[int] = field(init=False)  # the prompt and the committed part of the answer
    attempt: int = 1  # number of the current attempt to have a prefill worker compute the prompt
    num_announced: int = 0  # announcements to the peer cover rows [0, num_announced)
    phase: Phase = Phase.WAITING
    arrival: int = 0  # the scheduler numbers requests in order of arrival
    seat: int | None = None
    holding: Holding = field(default_factory=Holding)
    page_hashes: list[bytes] = field(default_factory=list)  # of full pages of `tokens`; extended when needed
    # Tokens whose rows were in the prefix cache when the request was first admitted; None before that
    num_cached: int | None = None
    # The request that will publish page number `waits_for_page` of this request's prefix, as of the last check
    waits_for: "Request | None" = None
    waits_for_page: int = 0
    publish_at: int = NEVER  # once this many rows are computed, another full page can enter the prefix cache
    parks: int = 0
    # The parts of `num_scheduled`, `num_unsampled` and `in_flight` that do not follow from plan numbers
    settled_scheduled: int = 0
    settled_unsampled: int = 0
    settled_in_flight: int = 0
    steady_since: int = NEVER  # number of the first plan that schedules it together with all steady requests
    plan_numbers: PlanNumbers = field(default_factory=PlanNumbers)  # shared with its scheduler
    drafts_in_flight: int = 0  # drafts that plans in flight verify
    # Tokens sampled by plans before this number are discarded, because the mask of an earlier token was late
    void_before: int = 0
    num_drafted: int = 0  # the newest plan drafts at most this many tokens, which the worker keeps for the next plan
    # Number of prompt tokens, from the second on, whose log-probabilities are known or computed by plans in flight
    num_prompt_logprobs: int = 0
    finish_reason: FinishReason | None = None  # None until it has ended

    def __post_init__(self) -> None:
        if not 0 < len(self.prompt) < self.max_length:
            raise InternalError(f"the prompt must have 1 to {self.max_length - 1} tokens, but has {len(self.prompt)}")
        self.prefill_at, self.tokens = self.options.prefill_at, list(self.prompt.token_ids)
        self.holding.story.record("phase", self.phase.value)

    @property
    def num_scheduled(self) -> int:
        """Tokens [0, num_scheduled) have been computed, or plans in flight compute them."""
        if self.steady_since == NEVER:
            return self.settled_scheduled
        return self.settled_scheduled + self.plan_numbers.next - self.steady_since

    @num_scheduled.setter
    def num_scheduled(self, tokens: int) -> None:
        if self.steady_since != NEVER:
            raise InternalError(f"{self.request_id} is steady, so its counts follow from plan numbers")
        self.settled_scheduled = tokens

    @property
    def num_unsampled(self) -> int:
        """The number of tokens that plans in flight will sample."""
        return self.settled_unsampled + self._steady_in_flight

    @property
    def in_flight(self) -> int:
        """The number of plans in flight that this request is part of."""
        return self.settled_in_flight + self._steady_in_flight

    @property
    def _steady_in_flight(self) -> int:
        """The number of plans in flight in which the request is steady."""
        if self.steady_since == NEVER:
            return 0
        return self.plan_numbers.next - max(self.plan_numbers.oldest, self.steady_since)

    def settle(self) -> None:
        """Makes a steady request an ordinary one: stores its counts, which no longer follow from plan numbers."""
        in_flight = self._steady_in_flight
        self.settled_scheduled = self.num_scheduled
        self.settled_unsampled += in_flight
        self.settled_in_flight += in_flight
        self.steady_since = NEVER

    def move(self, to: Phase) -> None:
        if to not in PHASE_TRANSITIONS[self.phase]:
            raise IllegalTransition(self.phase, to)
        self.phase = to
        self.holding.story.record("phase", to.value)

    @property
    def needs_prompt_logits(self) -> bool:
        """True if the logits of the whole prompt are needed, so that the whole prompt must be computed here."""
        return self.prompt.params.prompt_logprobs is not None and not self.for_peer

    @property
    def prompt_only(self) -> bool:
        """True if the request ends when its prompt is computed. The token that is sampled then is dropped."""
        return self.prompt.params.max_tokens == 0

    @property
    def running(self) -> bool:
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE

    @property
    def prefilled(self) -> bool:
        """True if the first token was sampled and every token but the newest is scheduled."""
        return self.num_scheduled >= len(self.tokens) - 1 and len(self.tokens) > len(self.prompt)
