"""The output of an engine: deltas of answers as they arrive, finished requests, and statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotset.handoff.agent import HandoffStats
from hotset.schedule.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own log-probability of one token, and its rank (1 is the most likely token)."""

    logprob: float
    rank: int


TokenLogprobs = Mapping[int, Logprob]  # token id -> Logprob; includes the sampled token


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one choice since its previous delta."""

    index: int  # which of the `n` choices
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id from `stop_token_ids`, that ended the choice
    error: str = ""  # the cause, if finish_reason is 'lost' or 'no_room'


@dataclass(slots=True)
class CompletionOutput:
    """The collected deltas of one choice. The choice is finished when `finish_reason` is set."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """One finished request with its `n` choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The current state of an engine, and totals since its start."""

    running: int = 0
    waiting: int = 0
    # Known tokens, not yet scheduled, of waiting, parked and prefilling requests. A waiting request whose prompt a
    # prefill worker computes does not count.
    tokens_to_prefill: int = 0
    resident: int = 0  # running requests that are resident
    tiered: int = 0  # running requests that are tiered
    parked: int = 0
    device_pages_held: int = 0
    device_pages_total: int = 0
    host_pages_held: int = 0
    host_pages_total: int = 0
    steps: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    landed: int = 0  # prompts whose KV arrived from a prefill worker
    lost: int = 0  # landings that failed, including those that were retried, but not those that were cancelled
    retries: int = 0  # further attempts after a landing had failed
    handed_off: int = 0  # prompts computed for decode workers
    quarantined_pages: int = 0
    lacks_room: bool = False  # pages in quarantine leave too few for a request of max_model_len
    handoff: HandoffStats | None = None
    rows_mirrored: int = 0
    bytes_swapped: int = 0
    slot_lookups: Mapping[int, int] = field(default_factory=dict)  # layer that runs the indexer -> selected positions
    slot_misses: Mapping[int, int] = field(default_factory=dict)  # same layer -> positions that were in no slot
    requests_finished: Mapping[str, int] = field(default_factory=dict)  # finish reason -> count
