"""Scripted servers are measured: the load that arrives, the times that are recorded, and every kind of failure."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from scripted_server import BOS, FIRST_ID, MODEL, Body, ScriptedServer, Stream, all_tokens, count_prompt

from hotset.base.errors import ConfigError, HotsetError, RequestError, StartupError
from hotset.lab.bench.answer import Failure
from hotset.lab.bench.benchmark import Benchmark, BenchReport
from hotset.lab.bench.config import BenchConfig
from hotset.lab.bench.results import LoadResult
from hotset.lab.bench.runner import Tally
from hotset.lab.bench.target import Target
from hotset.lab.bench.words import WORDS
from hotset.lab.bench.workload import PlannedRequest

DEADLINE_SECONDS = 60
Value = TypeVar("Value")


def settings(**values: Any) -> BenchConfig:
    lengths = {} if "trace" in values else {"input_tokens": "20", "output_tokens": "4"}
    return BenchConfig(**{"warmup": 0, "seed": 1, **lengths, **values})


def run(scenario: Coroutine[Any, Any, Value]) -> Value:
    async def limited() -> Value:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await scenario

    return asyncio.run(limited())


async def benchmark(server: ScriptedServer, config: BenchConfig, stop: asyncio.Event | None = None) -> BenchReport:
    async with Benchmark(server.url, config, stop or asyncio.Event()) as opened:
        return await opened.run()


def measure(server: ScriptedServer, **values: Any) -> LoadResult:
    """Runs a benchmark of one load."""

    async def scenario() -> BenchReport:
        async with server:
            return await benchmark(server, settings(**values))

    [result] = run(scenario()).results
    return result


class Barrier:
    """Holds answers until `parties` requests have arrived. Then does the same for the next `parties` requests."""

    def __init__(self, parties: int) -> None:
        self._barrier = asyncio.Barrier(parties)

    async def __call__(self, stream: Stream) -> None:
        await self._barrier.wait()
        await all_tokens(stream)


def test_a_closed_loop_keeps_exactly_the_requested_number_of_requests_running() -> None:
    server = ScriptedServer(Barrier(3))
    result = measure(server, concurrency="3", num_requests=12)
    assert len(result.completed) == 12 and server.most_running == 3
    assert all(record.scheduled is None and record.lag == 0.0 for record in result.records)


def test_an_open_loop_sends_requests_while_earlier_ones_wait_for_their_answers() -> None:
    """The server answers no request before all have arrived. A client that waited for answers would never end."""
    server = ScriptedServer(Barrier(20))
    result = measure(server, rate="400", burstiness=float("inf"), num_requests=20)
    ordered = sorted(result.completed, key=lambda record: record.scheduled or 0.0)
    assert [record.scheduled for record in ordered] == pytest.approx([n / 400 for n in range(20)])
    assert all(record.lag >= 0.0 for record in ordered) and server.most_running == 20
    assert result.generator.lag_max == max(record.lag for record in ordered)


def test_all_requests_at_once_and_a_trace_are_open_loops_too(tmp_path: Path) -> None:
    assert len(measure(ScriptedServer(Barrier(16)), rate="inf", num_requests=16).completed) == 16
    line = {"input_length": 30, "output_length": 4}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({**line, "timestamp": 40 * n}) + "\n" for n in range(8)))
    result = measure(ScriptedServer(Barrier(8)), trace=str(path), trace_speed=2.0)
    assert sorted(record.scheduled or 0.0 for record in result.completed) == pytest.approx([n / 50 for n in range(8)])


def test_a_duration_ends_the_load_and_running_requests_are_finished() -> None:
    async def hold(stream: Stream) -> None:
        await asyncio.sleep(0.1)
        await all_tokens(stream)

    result = measure(ScriptedServer(hold), concurrency="2", duration=0.35)
    # Each worker starts requests until the time is over, and the last requests end later.
    assert result.seconds >= 0.35 and result.unfinished == 0 and len(result.completed) == len(result.records)
    result = measure(ScriptedServer(), rate="128", burstiness=float("inf"), duration=10 / 128)
    assert len(result.completed) == 10


def test_times_are_those_of_the_network_reads_in_which_the_chunks_arrive() -> None:
    """The script sets the clock before it sends each chunk. Then it waits until the client has read the clock."""
    now = 0.0
    reads = 0
    was_read = asyncio.Condition()

    def clock() -> float:
        nonlocal reads
        reads += 1
        tasks.add(asyncio.ensure_future(wake()))
        return now

    tasks: set[asyncio.Future[None]] = set()

    async def wake() -> None:
        async with was_read:
            was_read.notify_all()

    async def script(stream: Stream) -> None:
        nonlocal now
        for number, chunk_time in enumerate((2.0, 2.5, 7.0), 1):
            now = chunk_time
            await stream.text("x")
            async with was_read:
                await was_read.wait_for(lambda number=number: reads >= number)
        await stream.finish(completion_tokens=9)

    async def scenario() -> None:
        async with ScriptedServer(script) as server, Target(server.url, settings()) as target:
            await target.probe()
            answer = await target.send(target.payload(PlannedRequest([1, 2, 3], 9)), clock)
        assert answer.failure is None
        assert (answer.chunk_times, answer.input_tokens, answer.output_tokens) == ([2.0, 2.5, 7.0], 3, 9)

    run(scenario())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("tokenize", [True, False])
def test_prompts_have_exactly_the_requested_length_as_ids_and_as_text(endpoint: str, tokenize: bool) -> None:
    server = ScriptedServer(tokenize=tokenize)
    result = measure(server, endpoint=endpoint, num_requests=4, input_tokens="33")
    assert [record.input_tokens for record in result.completed] == [33] * 4
    if endpoint == "completions" and tokenize:
        ids = {token for body in server.bodies for token in body["prompt"]}
        assert ids <= set(range(FIRST_ID, FIRST_ID + len(WORDS))) and BOS not in ids
    elif endpoint == "completions":
        assert all(set(body["prompt"].split()) <= set(WORDS) for body in server.bodies)
    else:
        assert all([message["role"] for message in body["messages"]] == ["user"] for body in server.bodies)


def test_texts_are_made_longer_or_shorter_as_the_server_counts_them() -> None:
    server = ScriptedServer(tokens_of=lambda body: 2 * count_prompt(body) + 5)
    result = measure(server, prompt_format="text", num_requests=2, input_tokens="45")
    assert [record.input_tokens for record in result.completed] == [45, 45]
    assert [count_prompt(body) for body in server.bodies] == [20, 20]


def test_fields_that_fix_the_length_of_answers_are_sent_only_to_servers_that_accept_them() -> None:
    for refused in ((), ("ignore_eos",), ("min_tokens", "ignore_eos")):
        server = ScriptedServer(refused_fields=refused)
        assert len(measure(server, num_requests=1, extra_body='{"top_p": 0.5}').completed) == 1
        [body] = server.bodies
        assert body["model"] == MODEL and body["top_p"] == 0.5 and body["stream"] and body["temperature"] == 0.0
        exact = {"ignore_eos": True, "min_tokens": 4}
        assert {field: body.get(field) for field in exact} == (dict.fromkeys(exact) if refused else exact)


def test_a_server_without_usage_is_measured_by_its_chunks() -> None:
    result = measure(ScriptedServer(tokens_of=None), num_requests=2)
    assert [(record.input_tokens, record.output_tokens) for record in result.completed] == [(None, 4)] * 2


def test_failures_are_recorded_by_status_and_message_and_the_others_continue() -> None:
    async def script(stream: Stream) -> None:
        match stream.index:
            case 0:
                await stream.refuse(429, "the queue is full")
            case 1:
                await stream.text("a")
                await stream.event({"error": {"message": "the engine stopped"}})
            case 2:
                await stream.text("a")  # the stream ends here
            case 3:
                assert stream._request.transport is not None
                stream._request.transport.abort()
            case 4:
                pass  # JSON instead of a stream
            case 5:
                await asyncio.sleep(DEADLINE_SECONDS)
            case _:
                await all_tokens(stream)

    result = measure(ScriptedServer(script), concurrency="1", num_requests=8, request_timeout=2.0)
    failures = [record.failure for record in result.records]
    assert failures[:3] == [
        Failure(429, "the queue is full"),
        Failure(200, "the engine stopped"),
        Failure(200, "the stream ended early, after 1 chunks with text"),
    ]
    assert failures[3] is not None and failures[3].status is None
    assert failures[4] == Failure(200, 'the server did not stream its answer: {"choices": []}')
    assert failures[5:] == [Failure(None, "no complete answer within 2 s"), None, None]


def test_stopping_cancels_running_requests_and_keeps_what_was_measured() -> None:
    async def scenario() -> None:
        stop = asyncio.Event()
        disconnected = asyncio.Event()

        async def script(stream: Stream) -> None:
            if stream.index < 3:
                await all_tokens(stream)
                return
            if stream.index == 4:
                stop.set()
            try:
                await asyncio.sleep(DEADLINE_SECONDS)
            finally:
                disconnected.set()

        async with ScriptedServer(script) as server:
            report = await benchmark(server, settings(concurrency="2,5", num_requests=50), stop)
        await disconnected.wait()
        [result] = report.results  # the second load is not measured
        assert report.interrupted and len(result.completed) == 3 and result.unfinished == 2
        assert report.to_json()["loads"][0]["unfinished"] == 2

    run(scenario())


def test_warm_up_requests_are_not_counted_and_a_failed_warm_up_ends_the_benchmark() -> None:
    server = ScriptedServer()
    assert len(measure(server, warmup=3, num_requests=2).records) == 2 and len(server.bodies) == 5
    with pytest.raises(RequestError, match="all 2 requests of the warm-up failed with 500: broken"):
        measure(ScriptedServer(lambda stream: stream.refuse(500, "broken")), warmup=2)


def test_loads_of_a_sweep_are_measured_in_order_with_prompts_of_their_own() -> None:
    updates: list[Tally] = []

    async def scenario() -> tuple[BenchReport, list[Body]]:
        async with ScriptedServer() as server:
            config = settings(concurrency="1,2,4", num_requests=8, warmup=1, api_key="secret")
            async with Benchmark(server.url, config, asyncio.Event(), updates.append) as opened:
                return await opened.run(), server.bodies

    report, bodies = run(scenario())
    assert [result.load.concurrency for result in report.results] == [1, 2, 4]
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies) == 25
    assert [tally.load.concurrency for tally in updates if tally.completed == 8][-1] == 4
    shown = json.dumps(report.to_json())
    assert "secret" not in shown and len(report.to_json()["loads"][2]["requests"]) == 8
    assert report.to_json()["settings"]["seed"] == 1 and report.to_json()["server"]["model"] == MODEL


@pytest.mark.parametrize(
    ("options", "values", "error", "message"),
    [
        ({"api_key": "k"}, {}, RequestError, "answered 401: the API key is wrong; give the key with --api-key-file"),
        ({"max_model_len": 23}, {}, ConfigError, "the longest request has 24 tokens with its answer, and the context"),
        ({"tokenize": False}, {"prompt_format": "ids"}, ConfigError, "has no /tokenize"),
        ({"refused_fields": ("model",)}, {}, RequestError, "/v1/completions answered 400: unknown field model"),
        ({"tokens_of": lambda body: 7}, {}, StartupError, "counts 7 tokens for 32 words, and 7 for 96"),
    ],
)
def test_a_server_that_cannot_be_measured_is_an_error_before_any_load(
    options: dict[str, Any], values: dict[str, Any], error: type[HotsetError], message: str
) -> None:
    server = ScriptedServer(**options)
    with pytest.raises(error) as raised:
        measure(server, **values)
    assert message in str(raised.value) and server.bodies == []


def test_the_api_key_is_sent() -> None:
    assert len(measure(ScriptedServer(api_key="k"), num_requests=1, api_key="k").completed) == 1
