"""A collector of traces, and checks of what arrives there."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from waiting import WAIT_SECONDS

Span = dict[str, Any]


class Collector:
    """An HTTP server that decodes what arrives. It answers with `statuses`, in order, and then with 200."""

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

    def wait_for(self, roots: int, trace: str | None = None) -> list[Span]:
        """Waits until the spans of `roots` requests have arrived, and returns all spans. `trace` selects one trace."""

        def selected() -> list[Span]:
            return [span for span in self.spans() if trace in (None, span["traceId"])]

        with self.arrived:
            assert self.arrived.wait_for(
                lambda: sum(span["name"] == "request" for span in selected()) >= roots, WAIT_SECONDS
            )
        return selected()


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


def check_spans(spans: list[Span]) -> dict[str, list[Span]]:
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
