"""An OpenAI-compatible server whose answers follow a script."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Body = dict[str, Any]
Script = Callable[["Stream"], Awaitable[None]]
MODEL = "scripted"
BOS = 1
FIRST_ID = 10  # /tokenize returns BOS, and then one id for each word, from FIRST_ID on


class Stream:
    """The response to one request. The events of a stream are sent with `text` and `finish`."""

    def __init__(self, server: "ScriptedServer", request: web.Request, body: Body) -> None:
        self.server = server
        self.body = body
        self.index = len(server.bodies)  # counts the requests after those of the probe
        self._request = request
        self._response: web.StreamResponse | None = None

    async def text(self, text: str) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})

    async def finish(self, completion_tokens: int | None = None) -> None:
        """Sends the finish reason, the usage if the server counts tokens, and the end marker."""
        await self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.server.tokens_of is not None:
            tokens = self.body["max_tokens"] if completion_tokens is None else completion_tokens
            usage = {"prompt_tokens": self.server.tokens_of(self.body), "completion_tokens": tokens}
            await self.event({"choices": [], "usage": usage})
        await self._write(b"data: [DONE]\n\n")

    async def event(self, chunk: Body) -> None:
        await self._write(f"data: {json.dumps(chunk)}\n\n".encode())

    async def refuse(self, status: int, message: str) -> None:
        raise Refused(status, message)

    async def _write(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._response.prepare(self._request)
        await self._response.write(data)

    def response(self) -> web.StreamResponse:
        return self._response or web.json_response({"choices": []})


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.response = web.json_response({"error": {"message": message}}, status=status)


async def all_tokens(stream: Stream) -> None:
    """Sends as many tokens as the client requested."""
    for number in range(stream.body["max_tokens"]):
        await stream.text(f" {number}")
    await stream.finish()


def count_prompt(body: Body) -> int:
    """Counts one token for each id or word."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


class ScriptedServer:
    """Serves at `url` inside `async with`. The short requests of the probe are always answered, and not kept.

    `refused_fields` are answered with 400. `tokens_of` counts the tokens of a prompt; None sends no usage.
    """

    def __init__(
        self,
        script: Script = all_tokens,
        *,
        tokenize: bool = True,
        refused_fields: tuple[str, ...] = (),
        api_key: str | None = None,
        tokens_of: Callable[[Body], int] | None = count_prompt,
        max_model_len: int | None = None,
    ) -> None:
        self.bodies: list[Body] = []  # of all requests but the probe's
        self.running = 0
        self.most_running = 0
        self.tokens_of = tokens_of
        self._script = script
        self._refused_fields = refused_fields
        self._api_key = api_key
        self._max_model_len = max_model_len
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        if tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        self.url = ""

    async def __aenter__(self) -> "ScriptedServer":
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": {"message": "the API key is wrong"}}, status=401)
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self._max_model_len}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [BOS, *range(FIRST_ID, FIRST_ID + len(words))]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for field in self._refused_fields:
            if field in body:
                return web.json_response({"error": {"message": f"unknown field {field}"}}, status=400)
        stream = Stream(self, request, body)
        if body["max_tokens"] == 1:  # only the probe asks for a single token
            await all_tokens(stream)
            return stream.response()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._script(stream)
        except Refused as refused:
            return refused.response
        finally:
            self.running -= 1
        return stream.response()
