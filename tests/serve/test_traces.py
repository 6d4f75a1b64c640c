"""Traces of requests reach a collector as OTLP JSON, with every phase and tier; a collector that is down holds nothing
up and bounds what is kept."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import plain_http
import pytest
from running_server import serving
from tiers.whole_numbers import Bench

from hotset.base.errors import ConfigError
from hotset.base.serve_config import ServeConfig
from hotset.serve import traces as traces_module
from hotset.serve.traces import MAX_QUEUED, Traces

WAIT_SECONDS = 60.0
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
Span = dict[str, Any]


class Collector:
    """An HTTP server that decodes what arrives. `statuses` are those of the next answers; then it answers with 200."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.arrived = threading.Condition()

    def spans(self) -> list[Span]:
        with self.arrived:
            return [
                span
                for body in self.bodies
                for resource in body["resourceSpans"]
                for scope in resource["scopeSpans"]
                for span in scope["spans"]
            ]

    def wait_for(self, roots: int) -> list[Span]:
        """Waits for the traces of so many requests."""
        with self.arrived:
            assert self.arrived.wait_for(
                lambda: sum(span["name"] == "request" for span in self.spans()) >= roots, WAIT_SECONDS
            )
        return self.spans()


@contextmanager
def collector() -> Iterator[tuple[str, Collector]]:
    collected = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/json")
            with collected.arrived:
                status = collected.statuses.pop(0) if collected.statuses else 200
                if status == 200:
                    collected.bodies.append(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"{}")
                collected.arrived.notify_all()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", collected
        finally:
            server.shutdown()


def check(spans: list[Span]) -> dict[str, list[Span]]:
    """Checks ids and times of spans, and returns the children of each request by the id of its root."""
    roots = {span["spanId"]: span for span in spans if span["name"] == "request"}
    children: dict[str, list[Span]] = {span_id: [] for span_id in roots}
    assert len({span["spanId"] for span in spans}) == len(spans)
    for span in spans:
        assert len(span["traceId"]) == 32 and len(span["spanId"]) == 16
        begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert begin <= end
        if span["name"] != "request":
            root = roots[span["parentSpanId"]]
            assert span["traceId"] == root["traceId"]
            assert int(root["startTimeUnixNano"]) <= begin and end <= int(root["endTimeUnixNano"])
            children[span["parentSpanId"]].append(span)
    return children


def attributes_of(span: Span) -> dict[str, str]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def test_a_request_over_http_becomes_a_trace_within_that_of_its_client(tiny_model: str, tmp_path: Path) -> None:
    with collector() as (url, collected):
        flags = ["--load-format", "dummy", "--device", "cpu", "--otlp", url]
        with serving(tmp_path, tiny_model, *flags) as server:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "n": 2}
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            post = f"{server.url}/v1/completions"
            assert plain_http.post(post, json=body, headers=headers, timeout=WAIT_SECONDS).status_code == 200
            spans = collected.wait_for(2)
        children = check(spans)
        roots = [span for span in spans if span["name"] == "request"]
        assert {(root["traceId"], root["parentSpanId"]) for root in roots} == {(TRACE_ID, PARENT_ID)}
        for root in roots:
            assert attributes_of(root)["gen_ai.usage.output_tokens"] == "4"
            assert attributes_of(root)["hotset.finish_reason"] == "length"
            names = [span["name"] for span in children[root["spanId"]]]
            assert names[:3] == ["queue", "prefill", "decode"] and "tier resident" in names
        resource = collected.bodies[0]["resourceSpans"][0]["resource"]
        assert attributes_of(resource)["service.name"] == "hotset"


def ended_snapshots() -> list[Any]:
    """Returns the last snapshots of requests that were tiered, parked and recomputed."""
    bench = Bench(18, 22, tiers="always", depth=1)
    for number, (prompt, answer) in enumerate([(20, 60), (20, 50), (7, 30)]):
        bench.add(f"cmpl-{number}-0/0", prompt, answer)
    bench.finish()
    return bench.engine.take_snapshots()


def test_every_change_of_phase_and_tier_is_a_span_and_refused_or_failed_batches_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces_module, "RETRY_SECONDS", (0.01,))
    snapshots = ended_snapshots()

    async def scenario(url: str, collected: Collector) -> None:
        traces = Traces(url, "m", "both")
        collected.statuses += [503, 429]  # the collector wants these again
        traces.record(snapshots)
        spans = await asyncio.to_thread(collected.wait_for, 3)
        children = check(spans)
        for snapshot, root in zip(snapshots, [span for span in spans if span["name"] == "request"], strict=True):
            names = [span["name"] for span in children[root["spanId"]]]
            changes = [event for event in snapshot.story if event.lane == "residence" and event.state != "absent"]
            assert [name for name in names if name.startswith("tier ")] == [f"tier {event.state}" for event in changes]
        assert any("tier tiered" in [span["name"] for span in of_root] for of_root in children.values())
        collected.statuses += [400]  # this one must not be sent again
        traces.record(snapshots[:1])
        traces.record(snapshots[1:2])
        async with asyncio.timeout(WAIT_SECONDS):
            while traces._queue:
                await asyncio.sleep(0.01)
        assert traces.dropped >= 1
        await traces.close()

    with collector() as (url, collected):
        asyncio.run(scenario(url, collected))


def test_a_collector_that_is_down_bounds_what_is_kept_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces_module, "RETRY_SECONDS", (0.01,))
    snapshots = ended_snapshots()

    async def scenario() -> None:
        traces = Traces("http://127.0.0.1:1", "m", "both")
        for _ in range(MAX_QUEUED):
            traces.record(snapshots)
        assert len(traces._queue) == MAX_QUEUED and traces.dropped == 2 * MAX_QUEUED
        async with asyncio.timeout(WAIT_SECONDS):
            while not caplog.records:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # further attempts
            await traces.close()
        assert len(caplog.records) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "ftp://a", "http://a b"])
def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp takes the address of a collector"):
        ServeConfig(otlp=url)
