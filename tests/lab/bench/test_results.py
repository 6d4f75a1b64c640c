"""Statistics: percentiles equal numpy's, and each latency has its definition."""

from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.lab.bench.answer import Failure
from hotset.lab.bench.config import Load
from hotset.lab.bench.results import (
    Distribution,
    ErrorCount,
    GeneratorHealth,
    Goodput,
    LoadResult,
    RequestRecord,
    percentile,
    summarize,
)

EXAMPLES = examples(25)
HEALTHY = GeneratorHealth(cpu_share=0.1, delay_p99=0.001, delay_max=0.002, lag_p99=0.0, lag_max=0.0)


def record(
    sent: float,
    chunk_times: list[float],
    ended: float,
    output_tokens: int,
    *,
    scheduled: float | None = None,
    failure: Failure | None = None,
) -> RequestRecord:
    return RequestRecord(scheduled, sent, ended, chunk_times, 4, 100, output_tokens, failure)


def result(*records: RequestRecord, seconds: float = 10.0) -> LoadResult:
    return LoadResult(Load(concurrency=1), 0.0, seconds, records, 0, HEALTHY)


@EXAMPLES
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    expected = np.percentile(np.array(values), percent)
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@EXAMPLES
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_distribution_has_the_statistics_of_numpy_and_ignores_missing_values(values: list[float]) -> None:
    found = Distribution.of([None, *values, None])
    assert found is not None
    expected = [np.mean(values), *np.percentile(values, [50, 90, 95, 99]), np.max(values)]
    assert [found.mean, found.p50, found.p90, found.p95, found.p99, found.max] == pytest.approx(expected)
    assert found.count == len(values)


def test_latencies_have_their_definitions() -> None:
    """One chunk may carry several tokens: gaps are between chunks, the time per token is between tokens."""
    one = record(1.0, [3.0, 3.5, 5.0], 6.0, output_tokens=5, scheduled=0.25)
    assert (one.ttft, one.gaps, one.tpot, one.e2e, one.lag) == (2.0, [0.5, 1.5], 0.5, 5.0, 0.75)
    found = summarize(result(one), {}).latencies_ms
    means = {name: distribution and distribution.mean for name, distribution in found.items()}
    assert means == {
        "ttft": 2000.0,
        "itl": 1000.0,
        "tpot": 500.0,
        "e2e": 5000.0,
        "ttft_scheduled": 2750.0,
        "e2e_scheduled": 5750.0,
    }


def test_an_answer_of_one_token_or_none_has_no_time_per_token() -> None:
    one, none = record(0.0, [2.0], 3.0, output_tokens=1), record(0.0, [], 3.0, output_tokens=0)
    assert (one.ttft, one.tpot, one.gaps, none.ttft, none.tpot) == (2.0, None, [], None, None)
    found = summarize(result(one, none), {}).latencies_ms
    assert found["tpot"] is None and found["itl"] is None and found["e2e"] is not None
    assert "ttft_scheduled" not in found  # a closed loop has no schedule


def test_rates_count_completed_requests_only_and_errors_are_counted_by_status_and_message() -> None:
    full, down = Failure(429, "full"), Failure(None, "connection refused")
    good = [record(0.0, [1.0, 2.0], 2.0, output_tokens=tokens) for tokens in (4, 3)]
    bad = [record(0.0, [], 0.1, output_tokens=0, failure=failure) for failure in (full, down, full)]
    found = summarize(result(*good, *bad, seconds=10.0), {})
    assert (found.completed, found.failed, found.shorter_answers) == (2, 3, 1)
    assert (found.requests_per_second, found.input_tokens_per_second) == (0.2, 20.0)
    assert found.output_tokens_per_second == 0.7
    assert found.errors == (ErrorCount(429, "full", 2), ErrorCount(None, "connection refused", 1))


def test_the_cached_share_is_that_of_the_tokens_of_completed_requests_that_report_it() -> None:
    done = record(0.0, [1.0], 1.0, output_tokens=1)
    failed = record(0.0, [], 1.0, output_tokens=0, failure=Failure(500, "x"))
    measured = result(
        replace(done, cached_tokens=64), replace(done, cached_tokens=0), done, replace(failed, cached_tokens=64)
    )
    assert summarize(measured, {}).cached_share == 0.32
    assert summarize(result(done), {}).cached_share is None
    assert summarize(result(), {}).cached_share is None


def test_goodput_counts_requests_within_all_limits_and_failed_requests_as_missed() -> None:
    quick = record(0.0, [0.1, 0.2], 0.2, output_tokens=2)
    slow_start = record(0.0, [5.0, 5.1], 5.1, output_tokens=2)
    slow_tokens = record(0.0, [0.1, 9.0], 9.0, output_tokens=2)
    failed = record(0.0, [], 0.1, output_tokens=0, failure=Failure(500, "x"))
    measured = result(quick, slow_start, slow_tokens, failed, seconds=2.0)
    assert summarize(measured, {"ttft": 0.5, "tpot": 1.0}).goodput == Goodput(0.25, 0.5)
    assert summarize(measured, {"ttft": 0.5}).goodput == Goodput(0.5, 1.0)
    assert summarize(measured, {"e2e": 5.1}).goodput == Goodput(0.5, 1.0)
    assert summarize(measured, {}).goodput is None


@pytest.mark.parametrize(
    ("health", "warning"),
    [
        ((0.5, 0.001, 0.1, 0.0, 0.0), None),
        ((0.97, 0.001, 0.1, 0.0, 0.0), "the generator was the bottleneck: it used 97% of a core"),
        ((0.2, 0.035, 0.1, 0.0, 0.0), "the generator was late by 35 ms (p99) although it used only 20% of a core"),
        ((0.2, 0.001, 0.1, 0.08, 0.1), "the generator was late by 80 ms (p99)"),
    ],
)
def test_the_report_warns_of_a_generator_that_was_late_or_short_of_cpu_time(
    health: tuple[float, ...], warning: str | None
) -> None:
    found = GeneratorHealth(*health).warning
    assert found is None if warning is None else found is not None and warning in found
