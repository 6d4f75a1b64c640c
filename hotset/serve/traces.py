"""OpenTelemetry traces of requests: each request that ends becomes one trace, sent to a collector as OTLP/HTTP JSON.

The spans come from the story of the request, which the engine reports when the request has ended (`base/story.py`). So
nothing is measured twice, and nothing waits: traces are queued, and a task sends them in batches. If the collector is
down or slow, at most MAX_QUEUED requests are kept, and older ones are dropped.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from hotset import __version__
from hotset.base.story import Lane, StoryEvent
from hotset.schedule.snapshots import RequestSnapshot

logger = logging.getLogger("hotset.serve")

MAX_QUEUED = 2048  # requests whose traces have not been sent
MAX_BATCH = 128  # requests in one message
MAX_PARENTS = 8192  # requests in progress whose clients sent a traceparent
SEND_SECONDS = 5.0  # time limit of one message
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)  # pauses after failures in a row
CLOSE_SECONDS = 2.0  # time for the last message when the server stops
LOG_SECONDS = 60.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})  # by the specification of OTLP
TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
PHASE_NAMES = {"waiting": "queue", "prefill": "prefill", "decode": "decode", "parked": "parked"}
PHASE_NAMES |= {"landing": "handoff", "handoff": "handoff"}
SPAN_KIND_INTERNAL, SPAN_KIND_SERVER = 1, 2
STATUS_ERROR = 2
FAILED_REASONS = frozenset({"lost", "no_room", "structure"})

Json = dict[str, Any]


class Traces:
    """Sends the traces of one server. All methods must be called on the event loop."""

    def __init__(self, url: str, model: str, role: str) -> None:
        """`url` is the address of a collector, without `/v1/traces`. `model` and `role` describe this server."""
        self._url = f"{url.rstrip('/')}/v1/traces"
        self._role = role
        described = {"service.name": "hotset", "service.version": __version__, "gen_ai.request.model": model}
        self._resource = {"attributes": _attributes({**described, "hotset.role": role})}
        self._queue: deque[RequestSnapshot] = deque(maxlen=MAX_QUEUED)
        self._parents: OrderedDict[str, tuple[str, str]] = OrderedDict()  # request id -> trace id and span id
        self._wake = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._logged_at = float("-inf")
        self.dropped = 0  # requests whose traces were not sent

    def on_request(self, request_id: str, traceparent: str | None) -> None:
        """Makes the trace of a request part of its client's trace, if the client has sent one (W3C trace context)."""
        found = None if traceparent is None else TRACEPARENT.fullmatch(traceparent.strip().lower())
        if found is not None:
            self._parents[request_id] = found[1], found[2]
            if len(self._parents) > MAX_PARENTS:
                self._parents.popitem(last=False)

    def record(self, snapshots: Sequence[RequestSnapshot]) -> None:
        """Queues the traces of the requests that have ended. Never waits."""
        for snapshot in snapshots:
            if snapshot.phase == "finished" and snapshot.story:
                self.dropped += len(self._queue) == MAX_QUEUED
                self._queue.append(snapshot)
        if self._queue:
            self._wake.set()
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_for_ever())

    async def close(self) -> None:
        """Sends what is queued, if that takes no longer than CLOSE_SECONDS, and stops."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS), aiohttp.ClientSession() as session:
                while self._queue:
                    await self._send_batch(session)

    async def _send_for_ever(self) -> None:
        failures = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SEND_SECONDS)) as session:
            while True:
                await self._wake.wait()
                try:
                    await self._send_batch(session)
                    failures = 0
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    self._log_failure(str(error) or type(error).__name__)
                    await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                    failures += 1
                if not self._queue:
                    self._wake.clear()

    async def _send_batch(self, session: aiohttp.ClientSession) -> None:
        batch = [self._queue[index] for index in range(min(len(self._queue), MAX_BATCH))]
        spans = [span for snapshot in batch for span in self._spans(snapshot)]
        scope = {"name": "hotset", "version": __version__}
        body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}
        async with session.post(self._url, json=body) as answer:
            if answer.status in RETRIED_STATUSES:
                answer.raise_for_status()
            if not answer.ok:  # sending it again would not help
                self.dropped += len(batch)
                self._log_failure(f"status {answer.status}")
        for snapshot in batch:
            if self._queue and self._queue[0] is snapshot:  # otherwise newer ones have displaced it
                self._queue.popleft()
            self._parents.pop(_root_id(snapshot.request_id), None)

    def _spans(self, snapshot: RequestSnapshot) -> Iterator[Json]:
        parent = self._parents.get(_root_id(snapshot.request_id))
        trace_id, parent_id = parent or (_hash(_name_at_decode_worker(snapshot.request_id), 32), "")
        story = snapshot.story or ()
        begin, end = story[0].seconds, story[-1].seconds
        span_id = _hash(f"{self._role} {snapshot.request_id}", 16)
        root = _span(trace_id, span_id, parent_id, "request", begin, end, SPAN_KIND_SERVER)
        root["attributes"] = _attributes(
            {
                "hotset.request_id": snapshot.request_id,
                "hotset.finish_reason": snapshot.finish_reason or "",
                "hotset.tiers": snapshot.tiers,
                "hotset.parks": snapshot.parks,
                "gen_ai.usage.input_tokens": snapshot.prompt_tokens,
                "gen_ai.usage.output_tokens": snapshot.answer_tokens,
                "hotset.cached_tokens": snapshot.cached_tokens,
            }
        )
        if snapshot.finish_reason in FAILED_REASONS:
            root["status"] = {"code": STATUS_ERROR, "message": snapshot.finish_reason}
        yield root
        lanes: tuple[Lane, ...] = ("phase", "residence")
        for lane in lanes:
            for number, (name, start, stop) in enumerate(_stages(story, lane)):
                child_id = _hash(f"{span_id} {lane} {number}", 16)
                yield _span(trace_id, child_id, span_id, name, start, stop, SPAN_KIND_INTERNAL)

    def _log_failure(self, problem: str) -> None:
        if time.monotonic() >= self._logged_at + LOG_SECONDS:
            self._logged_at = time.monotonic()
            logger.warning("cannot send traces to %s: %s; %d requests wait, %d were dropped", self._url, problem,
                           len(self._queue), self.dropped)  # fmt: skip


def _stages(story: Sequence[StoryEvent], lane: Lane) -> Iterator[tuple[str, float, float]]:
    """Yields the name, the begin and the end of each phase, or of each stay in a residence."""
    events = [event for event in story if event.lane == lane]
    ends = [event.seconds for event in events[1:]]
    for event, end in zip(events, ends, strict=False):  # the last event is the end of the request
        if lane == "residence" and event.state != "absent":
            yield f"tier {event.state}", event.seconds, end
        elif lane == "phase" and event.state in PHASE_NAMES:
            yield PHASE_NAMES[event.state], event.seconds, end


def _span(trace_id: str, span_id: str, parent_id: str, name: str, begin: float, end: float, kind: int) -> Json:
    times = {"startTimeUnixNano": str(int(begin * 1e9)), "endTimeUnixNano": str(int(end * 1e9))}
    ids = {"traceId": trace_id, "spanId": span_id, "parentSpanId": parent_id}
    return {**ids, "name": name, "kind": kind, **times}


def _attributes(values: Json) -> list[Json]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}}
        for key, value in values.items()
    ]


def _name_at_decode_worker(request_id: str) -> str:
    """Returns the id that a request has at its decode worker, so that both workers use the same trace. At a prefill
    worker its name is `PEER ID ATTEMPT #NUMBER` (see `PrefillEndpoint`)."""
    words = request_id.split(" ")
    return words[1] if len(words) == 4 else request_id


def _root_id(request_id: str) -> str:
    """Returns the id of the HTTP request, without the numbers of prompt and choice that end the id of a choice."""
    return request_id.rpartition("-")[0]


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
