"""A request as the scheduler sees it: tokens, limits, what it holds, and the phase it is in."""

from enum import Enum
from typing import Literal

from hotset.base.config import LandingChoice, TiersChoice
from hotset.base.errors import IllegalTransition
from hotset.base.sampling import PromptSpec
from hotset.tiers.residence import Holding

FinishReason = Literal["stop", "length", "abort", "lost", "no_room"]


class Phase(Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a seat and pages; some of its known tokens have no row yet
    DECODE = "decode"  # every known token but the newest has its row
    PARKED = "parked"  # its rows are on the host, or have landed; it waits for a seat and device pages
    LANDING = "landing"  # a prefill worker computes it and writes its rows into pages that it holds
    HANDOVER = "handover"  # its prompt was computed for a decode worker; its rows are on the host and being sent
    ENDING = "ending"  # its end is decided; plans in flight still use its pages
    FINISHED = "finished"  # everything was given back


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.LANDING, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PARKED, Phase.WAITING, Phase.HANDOVER, Phase.ENDING}),
    Phase.DECODE: frozenset({Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.PARKED: frozenset({Phase.PREFILL, Phase.DECODE, Phase.WAITING, Phase.FINISHED}),
    Phase.LANDING: frozenset({Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.HANDOVER: frozenset({Phase.FINISHED}),
    Phase.ENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Request:
    """One sequence to continue. Only the scheduler changes it."""

    __slots__ = (
        "arrival",
        "attempt",
        "for_peer",
        "holding",
        "in_flight",
        "landing",
        "max_length",
        "parks",
        "phase",
        "planned",
        "prefill_at",
        "promised",
        "prompt",
        "request_id",
        "seat",
        "tiers",
        "tokens",
        "told",
    )

    def __init__(
        self,
        request_id: str,
        prompt: PromptSpec,
        max_length: int,
        tiers: TiersChoice = "auto",
        prefill_at: str | None = None,
        landing: LandingChoice = "auto",
        for_peer: bool = False,
    ) -> None:
        """`max_length` bounds prompt and answer together. `prefill_at` is the control address of the worker that
        computes the prompt; its KV then lands where `landing` says. `for_peer` marks a prompt that is computed for a
        decode worker, which needs only its KV and its first token."""
        assert 0 < len(prompt) < max_length, f"a prompt of {len(prompt)} tokens with room for {max_length}"
        self.request_id = request_id
        self.prompt = prompt
        self.max_length = max_length
        self.tiers = tiers
        self.prefill_at = prefill_at
        self.landing = landing
        self.attempt = 1  # of having it prefilled elsewhere
        self.for_peer = for_peer
        self.told = 0  # rows [0, told) of a prompt computed for a peer were announced as written
        self.tokens = list(prompt.token_ids)  # prompt and committed answer
        self.phase = Phase.WAITING
        self.arrival = 0  # the scheduler numbers requests as they come
        self.seat: int | None = None
        self.holding = Holding()
        self.parks = 0
        self.planned = 0  # rows [0, planned) are computed or will be by plans in flight
        self.promised = 0  # tokens that plans in flight will sample
        self.in_flight = 0  # plans in flight that this request is part of

    def move(self, to: Phase) -> None:
        if to not in NEXT[self.phase]:
            raise IllegalTransition(self.phase, to)
        self.phase = to

    @property
    def running(self) -> bool:
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE

    @property
    def prefilled(self) -> bool:
        """Every known token but the newest has its row."""
        return self.planned >= len(self.tokens) - 1 and len(self.tokens) > len(self.prompt)
