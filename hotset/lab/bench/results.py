"""The results of a measurement: one record per request, and the statistics over them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from hotset.lab.bench.answer import Failure
from hotset.lab.bench.config import Load
from hotset.lab.bench.drafts import DraftFigures

# Above these limits, the load generator itself distorts the latencies.
MAX_DELAY_SECONDS = 0.02
MAX_CPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are in seconds since the beginning of the measurement."""

    scheduled: float | None  # when an open loop should have sent it; None in a closed loop
    sent: float
    ended: float
    chunk_times: Sequence[float]  # when each piece of text arrived
    asked_output_tokens: int
    input_tokens: int | None  # counted by the server; None if it reported no count
    output_tokens: int
    failure: Failure | None = None
    cached_tokens: int | None = None  # input tokens from the server's prefix cache; None if it did not report them

    @property
    def ttft(self) -> float | None:
        """The time to the first token."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """The mean time per output token after the first one."""
        if self.output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """The time from sending the request to the end of its answer."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """The times between consecutive pieces of text."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def lag(self) -> float:
        """How much later than scheduled the generator sent the request."""
        return 0.0 if self.scheduled is None else self.sent - self.scheduled

    def meets(self, objectives: dict[str, float]) -> bool:
        """Returns whether the request succeeded within all limits. A latency that was not measured meets any limit."""
        measured = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        within = ((measured[name] or 0.0) <= limit for name, limit in objectives.items())
        return self.failure is None and all(within)


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """How well the load generator itself kept up."""

    cpu_share: float  # of one core
    delay_p99: float  # by how much its event loop was late, in seconds
    delay_max: float
    lag_p99: float  # by how much requests of an open loop were sent late, in seconds
    lag_max: float

    @property
    def warning(self) -> str | None:
        """Says that the generator was the bottleneck, or returns None."""
        if self.cpu_share > MAX_CPU_SHARE:
            return (
                f"the generator was the bottleneck: it used {self.cpu_share:.0%} of a core. Latencies are too high; "
                "lower the load, or run several generators"
            )
        late = max(self.delay_p99, self.lag_p99)
        if late > MAX_DELAY_SECONDS:
            return (
                f"the generator was late by {late * 1e3:.0f} ms (p99) although it used only {self.cpu_share:.0%} of a "
                "core. Latencies are too high by up to this time; run it where other processes leave a core free"
            )
        return None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All that was measured with one load."""

    load: Load
    began: float  # the time of day, in seconds since 1970; all other times are relative to it
    seconds: float  # from the beginning to the end of the last request
    records: Sequence[RequestRecord]
    unfinished: int  # requests that an interrupt cancelled; they have no record
    generator: GeneratorHealth
    drafts: DraftFigures | None = None  # None if nothing was drafted, or if the server does not report drafts

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.failure is None]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a latency, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution | None":
        """Returns None if there are no values. Values that are None do not count."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        shares = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 95, 99)}
        return cls(count=len(ordered), mean=math.fsum(ordered) / len(ordered), max=ordered[-1], **shares)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of values in ascending order, interpolated linearly between the two nearest values."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Requests that failed in the same way."""

    status: int | None
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met all limits of --slo."""

    share: float  # of all requests, failed ones included
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one measurement. Latencies are in milliseconds."""

    seconds: float
    completed: int
    failed: int
    unfinished: int
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    input_tokens: Distribution | None
    output_tokens: Distribution | None
    cached_share: float | None  # of the input tokens; None if the server did not report cached tokens
    shorter_answers: int  # completed requests whose answer is shorter than asked for
    latencies_ms: dict[str, Distribution | None]
    goodput: Goodput | None
    errors: tuple[ErrorCount, ...]  # most frequent first
    generator: GeneratorHealth
    drafts: DraftFigures | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarize(result: LoadResult, objectives: dict[str, float]) -> Summary:
    """Computes the figures. Latencies and token rates include only completed requests."""
    completed = result.completed
    seconds = max(result.seconds, 1e-9)
    failures = Counter(record.failure for record in result.records if record.failure is not None)
    goodput = None
    if objectives and result.records:
        good = sum(record.meets(objectives) for record in result.records)
        goodput = Goodput(good / len(result.records), good / seconds)
    return Summary(
        seconds=result.seconds,
        completed=len(completed),
        failed=failures.total(),
        unfinished=result.unfinished,
        requests_per_second=len(completed) / seconds,
        input_tokens_per_second=sum(record.input_tokens or 0 for record in completed) / seconds,
        output_tokens_per_second=sum(record.output_tokens for record in completed) / seconds,
        input_tokens=Distribution.of(record.input_tokens for record in completed),
        output_tokens=Distribution.of(record.output_tokens for record in completed),
        cached_share=_cached_share(completed),
        shorter_answers=sum(record.output_tokens < record.asked_output_tokens for record in completed),
        latencies_ms=_latencies_ms(completed),
        goodput=goodput,
        errors=tuple(ErrorCount(failure.status, failure.message, count) for failure, count in failures.most_common()),
        generator=result.generator,
        drafts=result.drafts,
    )


def _cached_share(completed: Sequence[RequestRecord]) -> float | None:
    """Returns the share of the input tokens that came from the server's prefix cache."""
    reported = [record for record in completed if record.cached_tokens is not None]
    total = sum(record.input_tokens or 0 for record in reported)
    return sum(record.cached_tokens or 0 for record in reported) / total if total else None


def _latencies_ms(completed: Sequence[RequestRecord]) -> dict[str, Distribution | None]:
    def distribution(value: Callable[[RequestRecord], float | None], lag: bool = False) -> Distribution | None:
        values = ((value(record), record.lag if lag else 0.0) for record in completed)
        return Distribution.of(None if seconds is None else (seconds + late) * 1e3 for seconds, late in values)

    latencies = {
        "ttft": distribution(lambda record: record.ttft),
        "itl": Distribution.of(gap * 1e3 for record in completed for gap in record.gaps),
        "tpot": distribution(lambda record: record.tpot),
        "e2e": distribution(lambda record: record.e2e),
    }
    if any(record.scheduled is not None for record in completed):
        latencies["ttft_scheduled"] = distribution(lambda record: record.ttft, lag=True)
        latencies["e2e_scheduled"] = distribution(lambda record: record.e2e, lag=True)
    return latencies
