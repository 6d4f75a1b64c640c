"""The output of an engine: deltas of answers as they arrive, finished requests, and statistics."""

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

from hotset.base.errors import InternalError
from hotset.base.sampling import Alternatives
from hotset.engine.ports import HandoffStats
from hotset.schedule.plan import LogprobColumns
from hotset.schedule.request import FinishReason
from hotset.schedule.statistics import RankStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own log-probability of one token, and its rank (1 is the most likely token)."""

    logprob: float
    rank: int


TokenLogprobs = Mapping[int, Logprob]  # token id -> Logprob; includes the sampled token
Entry = TypeVar("Entry", covariant=True)


class _LazyEntries(Sequence[Entry]):
    """Creates entries when they are read, because a prompt or an answer can have millions of log-probabilities."""

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        positions = range(len(self))[index]
        return self._entry(positions) if isinstance(positions, int) else [self._entry(each) for each in positions]

    @abstractmethod
    def _entry(self, position: int) -> Entry: ...


class AnswerLogprobs(_LazyEntries[TokenLogprobs]):
    """The log-probabilities of consecutive tokens of an answer, with one entry per token."""

    def __init__(self, entries: Iterable[Alternatives] = ()) -> None:
        self._ends = array("q")  # where each token's part of the columns ends
        self._ids, self._logprobs, self._ranks = array("i"), array("d"), array("i")
        for entry in entries:
            self._ids.extend(entry)
            for logprob, rank in entry.values():
                self._logprobs.append(logprob)
                self._ranks.append(rank)
            self._ends.append(len(self._ids))

    def extend(self, other: "AnswerLogprobs") -> None:
        self._ends.extend(len(self._ids) + end for end in other._ends)
        self._ids.extend(other._ids)
        self._logprobs.extend(other._logprobs)
        self._ranks.extend(other._ranks)

    def __len__(self) -> int:
        return len(self._ends)

    def _entry(self, position: int) -> TokenLogprobs:
        part = range(self._ends[position - 1] if position else 0, self._ends[position])
        return {self._ids[each]: Logprob(self._logprobs[each], self._ranks[each]) for each in part}


class PromptLogprobs(_LazyEntries[TokenLogprobs | None]):
    """The log-probabilities of a prompt, with one entry per token.

    The entry of the first token, which nothing predicts, is None. Any other entry has the token's own log-probability,
    followed by those of the likeliest tokens at its position.
    """

    def __init__(self, token_ids: Sequence[int], parts: Iterable[LogprobColumns]) -> None:
        """`parts` are the log-probabilities of all tokens except the first, in order."""
        self._token_ids = token_ids
        self._columns = LogprobColumns(array("d"), array("i"), array("i"), array("d"))
        for part in parts:
            self._columns.logprobs.extend(part.logprobs)
            self._columns.ranks.extend(part.ranks)
            self._columns.top_ids.extend(part.top_ids)
            self._columns.top_logprobs.extend(part.top_logprobs)
        if len(self._columns) != len(token_ids) - 1:
            raise InternalError(f"a prompt of {len(token_ids)} tokens has {len(self._columns)} log-probabilities")

    def __len__(self) -> int:
        return len(self._token_ids)

    def _entry(self, position: int) -> TokenLogprobs | None:
        if position == 0:
            return None
        columns, entry = self._columns, position - 1
        alternatives = len(columns.top_ids) // len(columns)
        own = Logprob(columns.logprobs[entry], columns.ranks[entry])
        logprobs = {self._token_ids[position]: own}
        first = entry * alternatives
        for rank in range(1, alternatives + 1):
            top = first + rank - 1
            logprobs.setdefault(columns.top_ids[top], Logprob(columns.top_logprobs[top], rank))
        return logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one choice since its previous delta."""

    index: int  # which of the `n` choices
    text: str
    token_ids: tuple[int, ...]
    logprobs: AnswerLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id from `stop_token_ids`, that ended the choice
    error: str = ""  # the cause, if finish_reason is 'lost', 'no_room' or 'structure'
    prompt_logprobs: PromptLogprobs | None = None  # in the first delta of a choice, if requested
    cached_tokens: int = 0  # tokens of the prompt whose rows were in the prefix cache; the same in all deltas


@dataclass(slots=True)
class CompletionOutput:
    """The collected deltas of one choice. The choice is finished when `finish_reason` is set."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: AnswerLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0

    def extend(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or AnswerLogprobs()
            self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.cached_tokens = delta.cached_tokens


@dataclass(slots=True)
class RequestOutput:
    """One finished request with its `n` choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: PromptLogprobs | None = None  # None unless requested
    num_cached_tokens: int = 0  # of the first choice; the other choices also reuse the prompt that it computed


@dataclass(slots=True)
class EngineStats(RankStats):
    """The current state of an engine, and totals since its start: the sums over its data parallel ranks."""

    lacks_room: bool = False  # pages in quarantine leave too few for a request of max_model_len
    handoff: HandoffStats | None = None  # of a prefill or decode worker
    ranks: Sequence[RankStats] = ()  # of each data parallel rank; empty if there is only one
