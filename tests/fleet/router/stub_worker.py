"""A worker without an engine, in its own process. It has some endpoints of `hotset serve --role` and can misbehave.

`python stub_worker.py ROLE NAME [--port N] [--model M] [--behaviour B]` prints its URL. GET /seen returns the
requests that the worker received, and POST /behave changes its behaviour. The behaviours are:

    well         answers like a worker
    lost         answers 503 prefill_lost
    lost-once    answers 503 prefill_lost once and behaves well afterwards
    full         answers 503 no_room_left
    stopped      answers 503 engine_stopped
    busy         answers 429
    dies         dies before the first byte of a response
    dies-midway  dies between two events of a stream
    half         dies within an event
    short        dies within a response that is not an event stream
    garbage      answers with bytes that are not HTTP
    slow         never answers
    late-body    sends the headers and the first byte of a full response, and the rest LATE_SECONDS later
    drip         streams events until the behaviour changes
    silent       sends one event of a stream and then nothing
    nonsense     answers /handoff with HTML
    redirects    answers /handoff with a redirect to `target`
    moved        answers completions with a redirect to `target`
"""

import argparse
import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

LATE_SECONDS = 1.0


class Stub:
    """The state and the endpoints of the worker."""

    def __init__(self, role: str, name: str, model: str, behaviour: str) -> None:
        self.role, self.name, self.model, self.behaviour = role, name, model, behaviour
        self.seen: list[dict[str, object]] = []
        self.open = 0  # completions in progress
        self.disconnected = 0  # completions that the client disconnected from
        self.waiting_tokens = 0
        self.degraded: str | None = None
        self.control = f"{name}:9000"
        self.kv_events: list[dict[str, int]] = []  # the ports of publishers
        self.stored_tokens = 0
        self.page_marks = ""  # the value of the header x-hotset-pages
        self.target = ""

    def app(self) -> Starlette:
        gets = {"/handoff": self.handoff, "/seen": self.report, "/v1/models": self.models}
        answered = ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")
        posts = {"/behave": self.behave, **dict.fromkeys(answered, self.complete)}
        routes = [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
        return Starlette(routes=[*routes, *(Route(path, answer, methods=["POST"]) for path, answer in posts.items())])

    async def handoff(self, request: Request) -> Response:
        if self.behaviour == "nonsense":
            return Response("<html>welcome</html>")
        if self.behaviour == "redirects":
            return RedirectResponse(self.target + "/handoff")
        state = {"role": self.role, "control": self.control, "model": self.model, "degraded": self.degraded}
        state |= {"kv_events": self.kv_events, "stored_tokens": self.stored_tokens}
        return JSONResponse({**state, "waiting_tokens": self.waiting_tokens, "waiting": 0, "running": self.open})

    async def report(self, request: Request) -> Response:
        return JSONResponse({"requests": self.seen, "open": self.open, "disconnected": self.disconnected})

    async def behave(self, request: Request) -> Response:
        self.seen.clear()
        self.disconnected = 0
        for name, value in (await request.json()).items():
            setattr(self, name, value)
        return Response()

    async def models(self, request: Request) -> Response:
        self.seen.append({"path": "/v1/models", "headers": dict(request.headers)})
        return JSONResponse({"object": "list", "data": [{"id": self.model, "from": self.name}]})

    async def complete(self, request: Request) -> Response:
        body = await request.body()
        self.seen.append({"path": request.url.path, "headers": dict(request.headers), "body": body.decode("latin-1")})
        match self.behaviour:
            case "lost" | "lost-once":
                self.behaviour = "well" if self.behaviour == "lost-once" else "lost"
                return refusal(503, "prefill_lost", {"Retry-After": "1"})
            case "full":
                return refusal(503, "no_room_left")
            case "stopped":
                return refusal(503, "engine_stopped", anthropic=request.url.path.startswith("/v1/messages"))
            case "moved":
                return RedirectResponse(self.target + request.url.path)
            case "busy":
                return refusal(429, "queue_full", {"Retry-After": "7"})
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage":
                transport = request.scope["transport"]
                transport.write(b"\x00\x01 what is HTTP?\r\n\r\n")
                transport.close()
            case "slow":
                await self.wait_for_disconnect(request)
                return Response()
            case "late-body":
                return StreamingResponse(self.late(), media_type="application/json", headers={"content-length": "2"})
            case "short":
                return StreamingResponse(self.short(), media_type="application/json", headers={"content-length": "100"})
        wants_stream = json.loads(body or b"{}").get("stream", False)
        headers = {"X-Worker": self.name}
        if "x-hotset-pages" in request.headers:
            headers["x-hotset-pages"] = self.page_marks
        if not wants_stream:
            return JSONResponse({"text": f"from {self.name}"}, headers=headers)
        return StreamingResponse(self.events(request), media_type="text/event-stream", headers=headers)

    async def wait_for_disconnect(self, request: Request) -> None:
        self.open += 1
        try:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        finally:  # a stream is cancelled when its client disconnects
            self.open -= 1
        self.disconnected += 1

    async def late(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(LATE_SECONDS)
        yield b"}"

    async def short(self) -> AsyncIterator[bytes]:
        yield b'{"text":'
        os.kill(os.getpid(), signal.SIGKILL)

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            for number in range(1 << 30):
                yield event(self.name, number)
                await asyncio.sleep(0.01)
                if self.behaviour == "silent":
                    await self.wait_for_disconnect(request)
                if number == 2 and self.behaviour in ("dies-midway", "half"):
                    yield b'data: {"text": "hal' if self.behaviour == "half" else b""
                    await asyncio.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
                if number >= 4 and self.behaviour != "drip":
                    break
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        finally:
            self.open -= 1


def event(name: str, number: int) -> bytes:
    """Returns an event with odd spacing and non-ASCII bytes, which a relay that reformats events would change."""
    return f'data: {{"text":  "é{number}", "from": "{name}"}}\n\n'.encode()


def refusal(status: int, code: str, headers: dict[str, str] | None = None, *, anthropic: bool = False) -> Response:
    if anthropic:
        error = {"type": "api_error", "message": code, "details": {"error_code": code}}
        return JSONResponse({"type": "error", "error": error, "request_id": "r"}, status, headers)
    return JSONResponse({"error": {"message": code, "type": "t", "param": None, "code": code}}, status, headers)


class WithTransport:
    """Adds the raw connection to the scope, so that the application can send invalid HTTP."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = getattr(send, "__self__", None)
        scope["transport"] = getattr(owner, "transport", None)
        await self.app(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("name")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--behaviour", default="well")
    options = parser.parse_args()
    stub = Stub(options.role, options.name, options.model, options.behaviour)
    with socket.create_server(("127.0.0.1", options.port)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(WithTransport(stub.app()), log_level="error", lifespan="off")
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
