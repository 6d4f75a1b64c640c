"""A request as the scheduler sees it: tokens, limits, what it holds, and the phase it is in."""

from enum import Enum
from typing import Literal

from hotset.base.config import TiersChoice
from hotset.base.errors import IllegalTransition
from hotset.base.sampling import SamplingParams
from hotset.tiers.ledger import Holding

FinishReason = Literal["stop", "length", "abort"]


class Phase(Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a seat and pages; some of its known tokens have no row yet
    DECODE = "decode"  # every known token but the newest has its row
    PARKED = "parked"  # its rows are on the host; it waits for a seat and device pages
    ENDING = "ending"  # its end is decided; plans in flight still use its pages
    FINISHED = "finished"  # everything was given back


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.DECODE: frozenset({Phase.PARKED, Phase.WAITING, Phase.ENDING}),
    Phase.PARKED: frozenset({Phase.PREFILL, Phase.DECODE, Phase.WAITING, Phase.FINISHED}),
    Phase.ENDING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Request:
    """One sequence to continue. Only the scheduler changes it."""

    __slots__ = (
        "arrival",
        "holding",
        "in_flight",
        "max_length",
        "params",
        "parks",
        "phase",
        "planned",
        "promised",
        "prompt_length",
        "request_id",
        "seat",
        "stop_ids",
        "tiers",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        max_length: int,
        tiers: TiersChoice = "auto",
    ) -> None:
        """`stop_ids` end the request when sampled; `max_length` bounds prompt and answer together."""
        assert 0 < len(prompt) < max_length, f"a prompt of {len(prompt)} tokens with room for {max_length}"
        self.request_id = request_id
        self.params = params
        self.stop_ids = stop_ids
        self.max_length = max_length
        self.tiers = tiers
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)  # prompt and committed answer
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
        return self.planned >= len(self.tokens) - 1 and len(self.tokens) > self.prompt_length
