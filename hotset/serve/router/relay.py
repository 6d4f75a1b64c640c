"""The road of a request through the router: choose workers, try, try others, and pass the answer on byte by byte."""

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
from hotset.serve.disconnect import unless_disconnected
from hotset.serve.errors import error_body
from hotset.serve.protocol import REQUEST_ID_HEADER
from hotset.serve.router.config import RouterConfig
from hotset.serve.router.fleet import Fleet, Worker
from hotset.serve.router.metrics import RouterMetrics
from hotset.serve.router.upstream import Asked, Lost, RawHeaders, Streaming, Whole, asked_of, attempt

logger = logging.getLogger("hotset.router")

ATTEMPTS = 3
PAUSE_SECONDS = 0.2  # before the same worker is asked again; grows with every attempt
EVENT_END = b"\n\n"
MOST_HELD_BYTES = 1 << 20  # of an event whose end has not come


class Relay:
    """Answers requests with the help of a fleet. Borrows fleet and session; whoever made them closes them."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._config = config
        self._metrics = metrics
        self._waits: set[asyncio.Timeout] = set()
        self._responses: set[aiohttp.ClientResponse] = set()
        self._stopping = False

    async def generate(self, request: Request) -> Response:
        """A prefill and a decode worker answer. Errors before the first byte are raised; a later one ends the stream.

        A client that leaves, at whatever moment, closes the connection to the worker at once.
        """
        try:
            response = await self._respond(request, with_prefill=True)
        except BaseException as error:
            self._count(_outcome_of(error))
            raise
        if not isinstance(response, PassedStream):
            self._count(
                "answered" if response.status_code < 400 else "refused" if response.status_code < 500 else "failed"
            )
        return response

    async def forward(self, request: Request) -> Response:
        """A decode worker answers what needs no prompt computed: models and tokens."""
        return await self._respond(request, with_prefill=False)

    def cut(self) -> None:
        """Ends what is under way: streams with an error event, the rest with an error. No attempt follows."""
        self._stopping = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        for response in list(self._responses):
            response.close()

    async def _respond(self, request: Request, *, with_prefill: bool) -> Response:
        asked = await asked_of(request)
        return await unless_disconnected(request.receive, self._in_time(asked, with_prefill))

    async def _in_time(self, asked: Asked, with_prefill: bool) -> Response:
        try:
            async with asyncio.timeout(self._config.answer_seconds) as wait:
                self._waits.add(wait)
                try:
                    return await self._answer(asked, with_prefill)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self._stopping:
                raise EngineStopped("the router is shutting down") from None
            seconds = self._config.answer_seconds
            raise DeadlineExceeded(f"no answer has begun within {seconds:g} s (--answer-seconds)") from None

    async def _answer(self, asked: Asked, with_prefill: bool) -> Response:
        """The first answer of up to ATTEMPTS attempts. Whoever failed is avoided where there is somebody else."""
        failed: set[str] = set()
        answer: Whole | None = None
        for number in range(1, ATTEMPTS + 1):
            prefill = self._fleet.choose("prefill", failed) if with_prefill else None
            decode = self._fleet.choose("decode", failed)
            if failed & {decode.url, "" if prefill is None else prefill.url}:
                await asyncio.sleep(PAUSE_SECONDS * (number - 1))
            outcome = await self._try(asked, decode, prefill)
            if isinstance(outcome, Response):
                return outcome
            culprit = prefill if outcome.reason == "prefill_lost" and prefill is not None else decode
            logger.warning("%s: attempt %d, %s: %s", asked.request_id, number, culprit.url, outcome.trouble)
            if self._stopping:
                raise EngineStopped("the router is shutting down")
            failed.add(culprit.url)
            answer = outcome.answer
            await self._fleet.doubt(culprit)
            if number < ATTEMPTS:
                self._metrics.retries.labels(outcome.reason).inc()
        if answer is None:
            raise WorkerLost(f"{ATTEMPTS} attempts found no worker that answers; come back later")
        return _whole_response(answer, asked, ((b"retry-after", b"1"),))

    async def _try(self, asked: Asked, decode: Worker, prefill: Worker | None) -> Response | Lost:
        """One attempt. The prefill worker counts as busy until the first byte, the decode worker until the last."""
        began = time.monotonic()
        with ExitStack() as held:
            held.enter_context(decode.holding(asked.tokens))

            def track(response: aiohttp.ClientResponse) -> None:
                self._responses.add(response)
                held.callback(self._responses.discard, response)

            with ExitStack() as until_first_byte:
                if prefill is not None:
                    until_first_byte.enter_context(prefill.holding(asked.tokens))
                outcome = await attempt(self._session, asked, decode, prefill, track)
            if isinstance(outcome, Lost):
                return outcome
            self._metrics.first_byte_seconds.observe(time.monotonic() - began)
            if isinstance(outcome, Whole):
                self._metrics.upstream_seconds.observe(time.monotonic() - began)
                return _whole_response(outcome, asked)
            streaming, kept = outcome, held.pop_all()

        def over(outcome: str) -> None:
            streaming.response.close()
            kept.close()
            self._metrics.upstream_seconds.observe(time.monotonic() - began)
            self._count(outcome)

        return PassedStream(streaming, asked.request_id, self._config.silence_seconds, self._why_cut, over)

    def _why_cut(self) -> HotsetError:
        if self._stopping:
            return EngineStopped("the router is shutting down")
        return WorkerLost("the worker was lost in the middle of the answer")

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()


class PassedStream(Response):
    """Server-sent events of a worker, unchanged. Calls `over` once, with the outcome, however the end comes.

    Events go out whole, so that what follows a worker's death is an error event of its own and no broken one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        streaming: Streaming,
        request_id: str,
        silence_seconds: float,
        why_cut: Callable[[], HotsetError],
        over: Callable[[str], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = _headers(streaming.headers, request_id)
        self._streaming = streaming
        self._silence_seconds = silence_seconds
        self._why_cut = why_cut
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "left"
        try:
            outcome = await unless_disconnected(receive, self._send_all(send))
        finally:
            self._over(outcome)

    async def _send_all(self, send: Send) -> str:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pending, piece = b"", self._streaming.first
        while piece:
            events, end, pending = (pending + piece).rpartition(EVENT_END)
            if len(pending) > MOST_HELD_BYTES:
                events, end, pending = events + end + pending, b"", b""
            if events:
                await send({"type": "http.response.body", "body": events + end, "more_body": True})
            try:
                async with asyncio.timeout(self._silence_seconds):
                    piece = await self._streaming.response.content.readany()
            except (aiohttp.ClientError, OSError):  # TimeoutError is one of the latter
                event = f"data: {error_body(self._why_cut()).model_dump_json()}".encode() + EVENT_END
                await send({"type": "http.response.body", "body": event, "more_body": False})
                return "cut"
        await send({"type": "http.response.body", "body": pending, "more_body": False})
        return "answered"


def _whole_response(whole: Whole, asked: Asked, more: RawHeaders = ()) -> Response:
    response = Response(whole.body, whole.status)
    length = (b"content-length", str(len(whole.body)).encode())
    response.raw_headers = _headers([*whole.headers, *more, length], asked.request_id)
    return response


def _headers(headers: RawHeaders, request_id: str) -> list[tuple[bytes, bytes]]:
    """As ASGI wants them, with the id by which the router's and the worker's logs name the request."""
    return [*((name.lower(), value) for name, value in headers), (REQUEST_ID_HEADER.encode(), request_id.encode())]


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, NoWorkers):
        return "no_workers"
    return "left" if isinstance(error, ClientDisconnect | asyncio.CancelledError) else "failed"
