"""The server under test: its model, what it accepts, and how a request is sent to it."""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import aiohttp

from hotset.base.errors import ConfigError, RequestError, StartupError
from hotset.lab.bench.answer import Failure, StreamedAnswer, failure_of
from hotset.lab.bench.config import BenchConfig
from hotset.lab.bench.drafts import Counters, read_counters
from hotset.lab.bench.words import WORDS
from hotset.lab.bench.workload import PlannedRequest, Prompt, PromptSource

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_SECONDS = 10.0
REPLY_SECONDS = 30.0  # for a reply that generates no tokens
PROBE_UNITS = (32, 96)  # lengths of the two prompts from which tokens per word are computed
TOKENS_PER_WORD = 1.3  # the usual ratio for English, for a server that reports no usage


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What the server says about itself, and which fields of a request it accepts."""

    url: str
    model: str
    max_model_len: int | None  # None if the server does not say
    version: str | None
    exact_lengths: bool  # the server accepts ignore_eos and min_tokens
    usage: bool  # the server counts the tokens of a stream


class Target:
    """A server. Its methods are called inside `async with`, which owns the connections.

    `probe` is called first. It raises StartupError if the server cannot be reached or is not an OpenAI-compatible one,
    and RequestError if it refuses the requests of this benchmark.
    """

    def __init__(self, url: str, config: BenchConfig) -> None:
        if "://" not in url:
            url = f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._config = config
        self._fields = {"temperature": config.temperature, **config.extra_fields}
        self._session: aiohttp.ClientSession | None = None
        self._report: ServerReport | None = None

    async def __aenter__(self) -> "Target":
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout, sock_connect=CONNECT_SECONDS)
        # No limit of connections: an open loop must never wait for an earlier request.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def report(self) -> ServerReport:
        assert self._report is not None, "`probe` has not been called"
        return self._report

    async def probe(self) -> PromptSource:
        """Asks the server for its model. Short requests then show which fields it accepts and how it counts tokens.
        Returns the source of random prompts."""
        listed = await self._get_json("/v1/models", lambda reply: reply["data"][0])
        limit = listed.get("max_model_len")
        _, version = await self._request("GET", "/version", None)
        self._report = ServerReport(
            url=self.url,
            model=self._config.model or str(listed["id"]),
            max_model_len=limit if isinstance(limit, int) else None,
            version=_version(version),
            exact_lengths=True,
            usage=True,
        )
        ids = await self._token_ids()
        source = PromptSource(ids) if ids is not None else PromptSource(WORDS)
        return await self._calibrated(source)

    async def counters(self) -> Counters:
        """Returns the counters of drafts, which are up to half a second old. Returns none if the server is not a
        Hotset server, or cannot be reached."""
        try:
            status, scrape = await self._request("GET", "/metrics", None)
        except StartupError:
            return {}
        return read_counters(scrape.decode(errors="replace")) if status == 200 else {}

    def payload(self, request: PlannedRequest) -> bytes:
        """Returns the body of a request."""
        body: dict[str, Any] = {"model": self.report.model, "stream": True, "max_tokens": request.output_tokens}
        body |= {"stream_options": {"include_usage": True}} if self.report.usage else {}
        if self.report.exact_lengths:
            body |= {"ignore_eos": True, "min_tokens": request.output_tokens}
        return json.dumps(body | self._fields | self._prompt_field(request.prompt)).encode()

    async def send(self, payload: bytes, clock: Callable[[], float]) -> StreamedAnswer:
        """Sends a request and reads its stream. A failure is stored in the answer, never raised."""
        answer = StreamedAnswer()
        assert self._session is not None
        try:
            async with self._session.post(self.url + PATHS[self._config.endpoint], data=payload) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    answer.failure = failure_of(response.status, await response.read())
                    return answer
                while data := await response.content.readany():
                    answer.feed(data, clock())
                answer.end()
        except aiohttp.ConnectionTimeoutError:
            answer.failure = Failure(None, f"no connection within {CONNECT_SECONDS:g} s")
        except TimeoutError:
            answer.failure = Failure(None, f"no complete answer within {self._config.request_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            answer.failure = Failure(None, _reason(error))
        return answer

    def _prompt_field(self, prompt: Prompt) -> dict[str, Any]:
        if self._config.endpoint == "completions":
            return {"prompt": prompt}
        return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    async def _token_ids(self) -> list[int] | None:
        """Returns ids of ordinary tokens, or None if prompts are to be sent as text."""
        if self._config.endpoint == "chat" or self._config.prompt_format == "text":
            return None
        ids = await self._tokenize(" ".join(WORDS))
        if not ids and self._config.prompt_format == "ids":
            raise ConfigError(f"--prompt-format ids: {self.url} has no /tokenize, which tells the valid token ids")
        if not ids:
            return None
        special = set(await self._tokenize("") or ())  # for example a beginning-of-text token
        return sorted(set(ids) - special) or None

    async def _tokenize(self, text: str) -> list[int] | None:
        status, body = await self._request("POST", "/tokenize", {"model": self.report.model, "prompt": text})
        try:
            tokens = json.loads(body)["tokens"] if status == 200 else None
        except (ValueError, LookupError, TypeError):
            return None
        return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None

    async def _calibrated(self, source: PromptSource) -> PromptSource:
        """Sends two short prompts and returns the source with the lengths that the server counted."""
        short, long = [await self._probe_tokens(source, count) for count in PROBE_UNITS]
        if short is None or long is None:
            self._report = replace(self.report, usage=False)
            return replace(source, tokens_per_unit=TOKENS_PER_WORD) if source.as_text else source
        per_unit = (long - short) / (PROBE_UNITS[1] - PROBE_UNITS[0])
        if per_unit <= 0:
            counted = f"{short} tokens for {PROBE_UNITS[0]} words, and {long} for {PROBE_UNITS[1]}"
            raise StartupError(f"{self.url} counts {counted}, so prompts of a given length cannot be made")
        return replace(source, tokens_per_unit=per_unit, extra_tokens=short - PROBE_UNITS[0] * per_unit)

    async def _probe_tokens(self, source: PromptSource, count: int) -> int | None:
        """Returns the server's count of a prompt's tokens. If the server refuses the request, it is repeated without
        the fields that the OpenAI API does not have."""
        random = Random(os.urandom(8))  # a prompt of an earlier run could be in a prefix cache
        request = PlannedRequest(source.prompt(source.draw(count, random)), output_tokens=1)
        answer = await self.send(self.payload(request), asyncio.get_running_loop().time)
        if answer.failure is not None and answer.failure.status in (400, 422) and self.report.exact_lengths:
            self._report = replace(self.report, exact_lengths=False)
            answer = await self.send(self.payload(request), asyncio.get_running_loop().time)
        if answer.failure is not None:
            raise self._refusal(PATHS[self._config.endpoint], answer.failure)
        return answer.input_tokens

    async def _get_json(self, path: str, extract: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        status, body = await self._request("GET", path, None)
        if status != 200:
            raise self._refusal(path, failure_of(status, body))
        try:
            return extract(json.loads(body))
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(
                f"{self.url}{path} did not send the reply of an OpenAI-compatible server; is the URL right?"
            ) from error

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        timeout = aiohttp.ClientTimeout(total=REPLY_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, self.url + path, data=data, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(_reason(error)) from error

    def _unreachable(self, reason: str) -> StartupError:
        return StartupError(f"{self.url} cannot be reached: {reason}. Start a server with: hotset serve")

    def _refusal(self, path: str, failure: Failure) -> StartupError | RequestError:
        if failure.status is None:
            return self._unreachable(failure.message)
        advice = ""
        if failure.status in (401, 403):
            advice = "; give the key with --api-key-file or the environment variable HOTSET_API_KEY"
        elif path == "/v1/models":
            advice = "; the URL must be that of an OpenAI-compatible server, like http://127.0.0.1:8000"
        elif failure.status == 404:
            advice = "; check --model and --endpoint"
        return RequestError(f"{self.url}{path} answered {failure.status}: {failure.message}{advice}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _version(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["version"])
    except (ValueError, LookupError, TypeError):
        return None
