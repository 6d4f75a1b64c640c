"""Routes requests: chooses workers, retries failed attempts with others, and relays the response unchanged."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.base.errors import DeadlineExceeded, EngineStopped, HotsetError, NoWorkers, WorkerLost
from hotset.fleet.router.config import RouterConfig
from hotset.fleet.router.fleet import NO_PROMPT, ChosenWorker, Fleet
from hotset.fleet.router.metrics import RouterMetrics
from hotset.fleet.router.prefixes import PromptPrefixes
from hotset.fleet.router.upstream import (
    FailedAttempt,
    FullResponse,
    RawHeaders,
    StreamedResponse,
    UpstreamRequest,
    attempt,
    read_request,
)
from hotset.serve.errors import error_body
from hotset.serve.http_server import unless_disconnected
from hotset.serve.messages_api.errors import error_event as messages_error_event
from hotset.serve.messages_api.errors import is_messages_path
from hotset.serve.page_marks import PAGE_MARKS_HEADER, parse_page_marks
from hotset.serve.prefill_header import prefill_headers

logger = logging.getLogger("hotset.router")

MAX_ATTEMPTS = 3
BACKOFF_SECONDS = 0.2  # delay before a failed worker is tried again, multiplied by the number of failed attempts
THREAD_BYTES = 1 << 17  # longer bodies are hashed in a thread
EVENT_END = b"\n\n"
MAX_BUFFERED_BYTES = 1 << 20  # limit for an incomplete event; a longer event is sent in pieces


class Relay:
    """Answers requests by sending them to workers. The caller owns fleet and session."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._config = config
        self._metrics = metrics
        self._timeouts: set[asyncio.Timeout] = set()
        self._responses: set[aiohttp.ClientResponse] = set()
        self._stopping = False

    async def generate(self, request: Request) -> Response:
        """Answers a completion request with one prefill and one decode worker.

        Raises errors that occur before the first byte of the response; a later error ends the stream with an error
        event. When the client disconnects, the connection to the worker is closed at once.
        """
        try:
            response = await self._respond(request, with_prefill=True)
        except BaseException as error:
            self._count(_outcome_of(error))
            raise
        if not isinstance(response, RelayedStream):
            self._count(
                "completed" if response.status_code < 400 else "rejected" if response.status_code < 500 else "failed"
            )
        return response

    async def forward(self, request: Request) -> Response:
        """Answers a request that needs no prefill (models, tokenize, detokenize) with one decode worker."""
        return await self._respond(request, with_prefill=False)

    def abort_all(self) -> None:
        """Ends every request in flight with an error, or an error event in a stream. Nothing is retried afterwards."""
        self._stopping = True
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())
        for response in list(self._responses):
            response.close()

    async def _respond(self, request: Request, *, with_prefill: bool) -> Response:
        upstream_request = await read_request(request)
        return await unless_disconnected(request.receive, self._within_timeout(upstream_request, with_prefill))

    async def _within_timeout(self, request: UpstreamRequest, with_prefill: bool) -> Response:
        try:
            async with asyncio.timeout(self._config.response_timeout_seconds) as timeout:
                self._timeouts.add(timeout)
                try:
                    return await self._answer(request, with_prefill)
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if self._stopping:
                raise EngineStopped("the router is shutting down") from None
            seconds = self._config.response_timeout_seconds
            message = f"the response did not begin within {seconds:g} s (--response-timeout-seconds)"
            raise DeadlineExceeded(message) from None

    async def _answer(self, request: UpstreamRequest, with_prefill: bool) -> Response:
        """Makes up to MAX_ATTEMPTS attempts until one succeeds, and returns its response.

        If all attempts fail, returns the error response of the last one, or raises WorkerLost if it got no response.
        Workers that failed are avoided if others are alive. Raises NoWorkers if a role has no live worker, and
        EngineStopped if an attempt fails while the router shuts down.
        """
        failed: set[str] = set()
        last_response: FullResponse | None = None
        prompt = await _prefixes_of(request) if with_prefill else NO_PROMPT
        for number in range(1, MAX_ATTEMPTS + 1):
            prefill = self._fleet.choose("prefill", failed, prompt) if with_prefill else None
            decode = self._fleet.choose("decode", failed, prompt)
            if failed & {decode.worker.url, "" if prefill is None else prefill.worker.url}:
                await asyncio.sleep(BACKOFF_SECONDS * (number - 1))
            outcome = await self._try(request, prompt, decode, prefill)
            if isinstance(outcome, Response):
                return outcome
            culprit = (prefill if outcome.reason == "prefill_lost" and prefill is not None else decode).worker
            logger.warning("%s: attempt %d failed at %s: %s", request.request_id, number, culprit.url, outcome.error)
            if self._stopping:
                raise EngineStopped("the router is shutting down")
            failed.add(culprit.url)
            last_response = outcome.response
            await self._fleet.report_failure(culprit)
            if number < MAX_ATTEMPTS:
                self._metrics.retries.labels(outcome.reason).inc()
        if last_response is None:
            raise WorkerLost(f"all {MAX_ATTEMPTS} attempts failed, the last one without a response; retry later")
        names = {name.lower() for name, _ in last_response.headers}
        return _full_response(last_response, () if b"retry-after" in names else ((b"retry-after", b"1"),))

    async def _try(
        self, request: UpstreamRequest, prompt: PromptPrefixes, decode: ChosenWorker, prefill: ChosenWorker | None
    ) -> Response | FailedAttempt:
        """Makes one attempt. It counts as load of `decode` until the last byte, and of `prefill` until the first byte.

        The load of the prefill worker leaves out tokens that are in its own cache or in the decode worker's cache.
        """
        began = first_byte_at = time.monotonic()
        with ExitStack() as cleanup:
            cleanup.enter_context(decode.worker.in_flight(request.tokens, decode.cached_tokens))
            cleanup.enter_context(self._fleet.prefixes.in_flight(prompt, decode.worker))
            for choice in (decode, prefill) if prefill is not None else ():
                self._metrics.count_choice(choice, request.tokens)

            def track(response: aiohttp.ClientResponse) -> None:
                nonlocal first_byte_at
                first_byte_at = time.monotonic()
                marks = parse_page_marks(response.headers.get(PAGE_MARKS_HEADER, ""))
                self._fleet.prefixes.record_pages(prompt, marks)
                self._responses.add(response)
                cleanup.callback(self._responses.discard, response)

            with ExitStack() as until_first_byte:
                if prefill is not None:
                    cached_tokens = max(prefill.cached_tokens, decode.cached_tokens)
                    until_first_byte.enter_context(prefill.worker.in_flight(request.tokens, cached_tokens))
                    until_first_byte.enter_context(self._fleet.prefixes.in_flight(prompt, prefill.worker))
                outcome = await attempt(
                    self._session, request, decode.worker.url, self._headers(prompt, decode, prefill), track
                )
            if isinstance(outcome, FailedAttempt):
                return outcome
            # Workers that failed or rejected the request have computed nothing.
            if isinstance(outcome, StreamedResponse) or outcome.status < 400:
                for choice in (decode, prefill) if prefill is not None else ():
                    self._fleet.prefixes.record_sent(prompt, choice.worker)
            self._metrics.first_byte_seconds.observe(first_byte_at - began)
            if isinstance(outcome, FullResponse):
                self._metrics.upstream_seconds.observe(time.monotonic() - began)
                return _full_response(outcome)
            stream, stream_cleanup = outcome, cleanup.pop_all()

        def on_end(outcome: str) -> None:
            stream.response.close()
            stream_cleanup.close()
            self._metrics.upstream_seconds.observe(time.monotonic() - began)
            self._count(outcome)

        return RelayedStream(
            stream,
            idle_timeout_seconds=self._config.idle_timeout_seconds,
            interruption=self._interruption,
            on_end=on_end,
        )

    def _headers(
        self, prompt: PromptPrefixes, decode: ChosenWorker, prefill: ChosenWorker | None
    ) -> list[tuple[str, str]]:
        """Returns the router's own headers for a decode worker: the address of `prefill`, signed with the handoff
        secret, and a request for the hashes of pages if they can be looked up in KV events."""
        headers = [] if prefill is None else prefill_headers(prefill.worker.control, self._config.handoff_secret)
        if prompt.hashes and decode.worker.kv_events is not None:
            headers.append((PAGE_MARKS_HEADER, "1"))
        return headers

    def _interruption(self) -> HotsetError:
        """Returns the error that ends a stream whose worker disconnected or was silent for too long."""
        if self._stopping:
            return EngineStopped("the router is shutting down")
        return WorkerLost("the worker was lost in the middle of the response")

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()


class RelayedStream(Response):
    """Relays the server-sent events of a worker unchanged. Calls `on_end` exactly once, with the outcome.

    Sends complete events, so that an error event after a worker's death does not follow half an event. Only an event
    longer than MAX_BUFFERED_BYTES is sent in pieces.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: StreamedResponse,
        *,
        idle_timeout_seconds: float,
        interruption: Callable[[], HotsetError],
        on_end: Callable[[str], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = _headers(stream.headers)
        self._stream = stream
        self._idle_timeout_seconds = idle_timeout_seconds
        self._interruption = interruption
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "disconnected"
        try:
            outcome = await unless_disconnected(receive, self._send_all(send, scope["path"]))
        finally:
            self._on_end(outcome)

    async def _send_all(self, send: Send, path: str) -> str:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pending, piece = b"", self._stream.first
        while piece:
            events, end, pending = (pending + piece).rpartition(EVENT_END)
            if len(pending) > MAX_BUFFERED_BYTES:
                events, end, pending = events + end + pending, b"", b""
            if events:
                await send({"type": "http.response.body", "body": events + end, "more_body": True})
            try:
                async with asyncio.timeout(self._idle_timeout_seconds):
                    piece = await self._stream.response.content.readany()
            except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                event = _error_event(self._interruption(), path)
                await send({"type": "http.response.body", "body": event, "more_body": False})
                return "interrupted"
        await send({"type": "http.response.body", "body": pending, "more_body": False})
        return "completed"


def _error_event(error: HotsetError, path: str) -> bytes:
    """Returns the event with which a stream ends early, in the shape of the API to which the path belongs."""
    if is_messages_path(path):
        return messages_error_event(error)
    return f"data: {error_body(error).model_dump_json()}".encode() + EVENT_END


def _full_response(full: FullResponse, extra_headers: RawHeaders = ()) -> Response:
    response = Response(full.body, full.status)
    length = (b"content-length", str(len(full.body)).encode())
    response.raw_headers = _headers([*full.headers, *extra_headers, length])
    return response


def _headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Returns headers in ASGI form."""
    return [(name.lower(), value) for name, value in headers]


async def _prefixes_of(request: UpstreamRequest) -> PromptPrefixes:
    """Hashes the beginnings of a prompt. Uses a thread if this takes more than about a millisecond."""
    path = request.target.partition("?")[0].rstrip("/")
    if len(request.body) < THREAD_BYTES:
        return PromptPrefixes.of(path, request.body)
    return await asyncio.to_thread(PromptPrefixes.of, path, request.body)


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, NoWorkers):
        return "no_workers"
    return "disconnected" if isinstance(error, ClientDisconnect | asyncio.CancelledError) else "failed"
