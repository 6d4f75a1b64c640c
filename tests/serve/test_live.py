"""The data of the live page: samples and stories from reports, and streams that never wait for a reader."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from rich.console import Console
from tiers.whole_numbers import Bench
from waiting import in_event_loop

from hotset.base.errors import QueueFull
from hotset.base.story import MAX_EVENTS, Story, StoryEvent
from hotset.cli.top_screen import Watched, frame
from hotset.engine.outputs import EngineStats
from hotset.engine.process import StateReport
from hotset.schedule import snapshots
from hotset.schedule.snapshots import RequestSnapshot
from hotset.schedule.statistics import RankStats
from hotset.serve import feed as feed_module
from hotset.serve.feed import MAX_BEHIND, MAX_WATCHERS, Feed
from hotset.serve.live import ENDED, HISTORY, Live
from hotset.serve.metrics import Metrics

Json = dict[str, Any]


def make_live(metrics: Metrics | None = None) -> Live:
    return Live(lambda: {"kind": "server"}, lambda: None, metrics or Metrics())


def snapshot(request_id: str, phase: str = "decode", rows: int = 1, **fields: Any) -> RequestSnapshot:
    values: Json = {
        "residence": "resident",
        "tiers": "auto",
        "prompt_tokens": 4,
        "answer_tokens": rows - 4,
        "cached_tokens": 0,
        "device_pages": 1,
        "host_pages": 1,
        "parks": 0,
        "finish_reason": None,
        "story": None,
    }
    return RequestSnapshot(request_id=request_id, phase=phase, rows=rows, **values | fields)


def replayed(messages: Sequence[Json]) -> tuple[dict[str, Json], dict[str, Json], list[Json]]:
    """Returns the state of a page after these messages: open requests, ended requests and samples."""
    requests: dict[str, Json] = {}
    ended: dict[str, Json] = {}
    samples: list[Json] = []
    for message in messages:
        if "hello" in message:
            requests, ended, samples = {}, {}, list(message["history"])
        samples += [message["sample"]] if "sample" in message else []
        for request in message.get("requests", ()):
            requests[request["id"]] = {"story": requests.get(request["id"], {}).get("story")} | request
        for request in message.get("ended", ()):
            requests.pop(request["id"], None)
            ended[request["id"]] = request
    return requests, ended, samples


async def next_message(lines: AsyncIterator[bytes]) -> Json:
    message: Json = json.loads(await asyncio.wait_for(anext(lines), 20))
    return message


@in_event_loop
async def test_a_page_that_has_read_all_deltas_has_the_same_state_as_a_page_that_opens_now() -> None:
    bench, live = Bench(33, 120, tiers="auto", seats=3, step_tokens=9), make_live()
    async with aclosing(live.feed.watch()) as lines:
        messages = [await next_message(lines)]
        for number, (prompt, answer) in enumerate([(20, 60), (20, 50), (7, 30), (25, 20)]):
            bench.add(f"r{number}", prompt, answer)
        while not bench.engine.idle:
            bench.step()
            live.record(StateReport(bench.engine.stats(), bench.engine.take_snapshots()))
            messages.append(await next_message(lines))
            if len(messages) % 8 == 0:
                assert replayed(messages)[0] == replayed([json.loads(json.dumps(live._state()))])[0]
    followed, opened = replayed(messages), replayed([json.loads(json.dumps(live._state()))])
    assert followed == opened and len(followed[1]) == 4 and not followed[0]
    stories = [request["story"] for request in followed[1].values()]
    assert any("tiered" in [state for _, _, state in story] for story in stories), "this test saw no change of tier"
    for story in stories:
        assert story[0][1:] == ["phase", "waiting"] and story[-1][1:] == ["residence", "absent"]
        assert [event[0] for event in story] == sorted(event[0] for event in story)
    totals = followed[2][-1]["totals"]
    assert totals["tokens"] == sum(len(answer) for answer in bench.answers.values())
    samples, stats = followed[2], bench.engine.stats()
    assert sum(sample["lookups"] for sample in samples) == sum(stats.slot_lookups.values()) > 0
    assert sum(sample["misses"] for sample in samples) == sum(stats.slot_misses.values()) > 0


def test_rates_and_latencies_are_those_since_the_previous_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 100.5))
    metrics = Metrics()
    live = make_live(metrics)
    monkeypatch.setattr("hotset.serve.live.time.time", lambda: next(clock))
    first = EngineStats(tokens_generated=10, bytes_swapped=100, slot_lookups={3: 100, 7: 10}, slot_misses={3: 1, 7: 0})
    second = EngineStats(
        tokens_generated=60, bytes_swapped=1100, slot_lookups={3: 300, 7: 10}, slot_misses={3: 51, 7: 0}
    )
    live.record(StateReport(first, ()))
    for seconds in range(100):
        metrics.observe_first_token(seconds / 100)
    live.record(StateReport(second, ()))
    sample = live._history[-1]
    assert (sample["tokens"], sample["swap"], sample["miss"]) == (100.0, 2000, [250, None])
    assert sample["ttft"] == [0.49, 0.94] and sample["gap"] is None
    assert not metrics.newest_first_token_seconds, "a latency must not count twice"


@in_event_loop
async def test_ranks_of_a_data_parallel_engine_are_shown_by_the_stream_and_by_hotset_top() -> None:
    live, watched = make_live(), Watched("http://here")
    total = {"device_pages_total": 50, "host_pages_total": 700}
    stats = EngineStats(
        ranks=[
            RankStats(running=5, waiting=1, resident=3, tiered=2, device_pages_held=40, host_pages_held=60, **total),
            RankStats(running=4, resident=4, device_pages_held=31, host_pages_held=32, **total),
        ]
    )
    async with aclosing(live.feed.watch()) as lines:
        watched.apply(await next_message(lines))
        assert watched.ranks == []
        live.record(StateReport(stats, ()))
        watched.apply(await next_message(lines))
    late = Watched("http://here")
    late.apply(json.loads(json.dumps(live._state())))
    assert watched.ranks == late.ranks == [rank.of_rank for rank in stats.ranks]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(frame(watched, 40))
    lines_of_ranks = [line.split() for line in captured.get().splitlines()]
    assert ["0", "5", "1", "3", "2", "0", "40/50", "60/700"] in lines_of_ranks
    assert ["1", "4", "0", "4", "0", "0", "31/50", "32/700"] in lines_of_ranks


def test_history_requests_stories_and_snapshots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    live = make_live()
    for number in range(2 * HISTORY):
        ended = snapshot(f"e{number}", "finished", story=(StoryEvent(0.0, "phase", "waiting"),))
        live.record(StateReport(EngineStats(), [snapshot(f"r{number}"), ended]))
    state = live._state()
    assert (len(state["history"]), len(state["requests"]), len(state["ended"])) == (HISTORY, 1, ENDED)
    story = Story()
    for number in range(3 * MAX_EVENTS):
        story.record("phase", str(number))
    kept = [int(event.state) for event in story.events]
    assert len(kept) == MAX_EVENTS and story.num_events == 3 * MAX_EVENTS
    assert kept[: MAX_EVENTS // 2] == [*range(MAX_EVENTS // 2)] and kept[-1] == 3 * MAX_EVENTS - 1
    max_open, max_ended = 20, 10  # few, because the bench compares all rows after each step
    monkeypatch.setattr(snapshots, "MAX_OPEN", max_open)
    monkeypatch.setattr(snapshots, "MAX_ENDED", max_ended)
    bench = Bench(33, 120)
    for number in range(max_open + 5):
        bench.add(f"r{number}", 5, 3)
    bench.step()
    taken = bench.engine.take_snapshots()
    assert len(taken) == max_open and taken[0].phase != "waiting" == taken[-1].phase
    bench.finish()
    assert len(bench.engine.take_snapshots()) == max_ended


@in_event_loop
async def test_a_watcher_that_does_not_read_delays_nobody_and_gets_the_whole_state_later() -> None:
    feed = Feed(lambda: {"hello": {}}, dict)
    async with aclosing(feed.watch()) as slow:
        assert "hello" in await next_message(slow)
        waiting = asyncio.create_task(next_message(slow))  # it reads only when this task runs
        for number in range(10 * MAX_BEHIND):
            feed.publish({"number": number})
        assert "hello" in await waiting, "it must get what it has missed, and nothing twice"
        feed.publish({"number": "newest"})
        assert (await next_message(slow))["number"] == "newest"
    assert not feed.watched


@in_event_loop
async def test_streams_send_heartbeats_and_end_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "HEARTBEAT_SECONDS", 0.01)
    feed = Feed(lambda: {"hello": {}}, lambda: {"failure": "it has died"})
    async with aclosing(feed.watch()) as lines:
        await next_message(lines)
        assert (await next_message(lines))["failure"] == "it has died"
        feed.close()
        async with asyncio.timeout(20):
            assert len([line async for line in lines]) <= 1


@in_event_loop
async def test_a_new_stream_replaces_the_oldest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(lambda: {"hello": {}}, dict)
    streams = [feed.watch() for _ in range(MAX_WATCHERS)]
    for stream in streams:
        await next_message(stream)
    with pytest.raises(QueueFull, match=f"^{MAX_WATCHERS} pages are open"):
        feed.response()
    monkeypatch.setattr(feed_module, "MIN_WATCH_SECONDS", 0.0)
    assert feed.response().status_code == 200
    feed.publish({"number": 1})
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(streams[0]), 20)
    for stream in streams[1:]:
        assert (await next_message(stream))["number"] == 1
        await stream.aclose()
    assert not feed.watched
