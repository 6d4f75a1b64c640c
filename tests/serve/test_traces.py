"""Traces of requests reach a collector as OTLP JSON, with every phase and tier. If the collector is down, nothing waits
for it, and the number of traces that are kept is bounded."""

import asyncio
from typing import Any

import pytest
from otlp_collector import check_spans, collector
from tiers.whole_numbers import Bench
from waiting import in_event_loop, until

from hotset.base.errors import ConfigError
from hotset.base.serve_config import ServeConfig
from hotset.serve import traces as traces_module
from hotset.serve.traces import MAX_QUEUED, Traces


def ended_snapshots() -> list[Any]:
    """Returns the last snapshots of requests that were tiered, parked and recomputed."""
    bench = Bench(18, 22, tiers="always", depth=1)
    for number, (prompt, answer) in enumerate([(20, 60), (20, 50), (7, 30)]):
        bench.add(f"cmpl-{number}-0/0", prompt, answer)
    bench.finish()
    return bench.engine.take_snapshots()


@in_event_loop
async def test_every_change_of_phase_and_tier_is_a_span_and_refused_or_failed_batches_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces_module, "RETRY_SECONDS", (0.01,))
    snapshots = ended_snapshots()
    with collector() as (url, collected):
        traces = Traces(url, "m", "both")
        collected.statuses += [503, 429]  # the collector wants these again
        traces.record(snapshots)
        spans = await asyncio.to_thread(collected.wait_for, 3)
        children = check_spans(spans)
        for snapshot, root in zip(snapshots, [span for span in spans if span["name"] == "request"], strict=True):
            names = [span["name"] for span in children[root["spanId"]]]
            changes = [event for event in snapshot.story if event.lane == "residence" and event.state != "absent"]
            assert [name for name in names if name.startswith("tier ")] == [f"tier {event.state}" for event in changes]
        assert any("tier tiered" in [span["name"] for span in of_root] for of_root in children.values())
        collected.statuses += [400]  # this one must not be sent again
        traces.record(snapshots[:1])
        traces.record(snapshots[1:2])
        await until(lambda: not traces._queue)
        assert traces.dropped >= 1
        await traces.close()


@in_event_loop
async def test_if_the_collector_is_down_few_traces_are_kept_and_one_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces_module, "RETRY_SECONDS", (0.01,))
    snapshots = ended_snapshots()
    traces = Traces("http://127.0.0.1:1", "m", "both")
    for _ in range(MAX_QUEUED):
        traces.record(snapshots)
    assert len(traces._queue) == MAX_QUEUED and traces.dropped == 2 * MAX_QUEUED
    await until(lambda: caplog.records)
    await asyncio.sleep(0.1)  # further attempts
    await traces.close()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "ftp://a", "http://a b"])
def test_an_address_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp takes the address of a collector"):
        ServeConfig(otlp=url)
