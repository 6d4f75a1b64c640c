"""The header with page marks is computed while a request is in the engine's queue, and delays nothing before that."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from waiting import in_event_loop, until

from hotset.base.errors import QueueFull
from hotset.base.sampling import SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.engine.outputs import Delta
from hotset.serve.chunks import ChunkResponder
from hotset.serve.generation import GenerationJob, respond
from hotset.serve.page_marks import PAGE_MARKS_HEADER, page_marks_header
from hotset.serve.responses import ChunkBase, Usage
from hotset.serve.service import Service
from hotset.tiers.prefix_cache import PageHasher

HASHER = PageHasher("a model", 4)
PROMPT = list(range(10))


class FakeClient:
    """An engine client whose requests wait until `start`, then get one token."""

    model = SimpleNamespace(page_hasher=HASHER)

    def __init__(self) -> None:
        self.waiting = self.open = 0
        self.start = asyncio.Event()

    def check(self) -> None: ...

    async def generate(self, request_id: str, prompt: Sequence[int], *_: Any) -> AsyncGenerator[Delta, None]:
        self.waiting += 1
        self.open += 1
        try:
            try:
                await self.start.wait()
            finally:
                self.waiting -= 1
            yield Delta(0, "a", (1,))
            await asyncio.Event().wait() if request_id.startswith("endless") else None
            yield Delta(0, "", (), finish_reason="length")
        finally:
            self.open -= 1


class FakeFormatter:
    def first_chunk(self, index: int) -> None: ...

    def chunk(self, delta: Delta) -> None: ...

    def usage_chunk(self, usage: Usage) -> ChunkBase:
        raise AssertionError("nobody asks for it")

    def full_response(self, outputs: Any, usage: Usage) -> Usage:
        return usage


@pytest.fixture
def busy_threads() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Yields a pool whose only thread waits for an event before it runs anything, and this event."""
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(free.wait)
        try:
            yield threads, free
        finally:
            free.set()


def send_request(
    service: Service, *, stream: bool = False, name: str = "r"
) -> tuple[asyncio.Task[Response], Callable[[], None]]:
    """Sends a request. Returns the task that responds, and a function that disconnects the client."""
    gone = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "headers": [(PAGE_MARKS_HEADER.encode(), b"1")]}
    job = GenerationJob(name, [PROMPT], SamplingParams(), stream)
    responder = ChunkResponder(service, job, FakeFormatter())
    return asyncio.create_task(respond(Request(scope, receive), service, job, responder)), gone.set


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_requests_whose_marks_are_not_computed_yet_count_as_waiting(
    busy_threads: tuple[ThreadPoolExecutor, threading.Event], stream: bool
) -> None:
    threads, free = busy_threads
    client: Any = FakeClient()
    service = Service(client, ServeConfig(max_queue=2), text_threads=threads)
    first, _ = send_request(service, stream=stream)
    await until(lambda: client.waiting == 1)
    second, disconnect = send_request(service, stream=stream)
    await until(lambda: client.waiting == 2)
    with pytest.raises(QueueFull):
        await send_request(service, stream=stream)[0]
    disconnect()
    with pytest.raises(ClientDisconnect):
        await second
    assert client.waiting == client.open == 1, "the client's disconnect was not noticed"
    client.start.set()
    await until(lambda: client.waiting == 0)
    assert not first.done(), "the header is sent with the response"
    free.set()
    response = await first
    assert response.headers[PAGE_MARKS_HEADER] == page_marks_header(PROMPT, "", HASHER)


@in_event_loop
async def test_a_client_that_disconnects_between_the_first_token_and_the_header_ends_its_request(
    busy_threads: tuple[ThreadPoolExecutor, threading.Event],
) -> None:
    client: Any = FakeClient()
    client.start.set()
    service = Service(client, ServeConfig(), text_threads=busy_threads[0])
    response, disconnect = send_request(service, stream=True, name="endless")
    await until(lambda: service.load.queue.present == 0 and client.open == 1)  # the first token has arrived
    disconnect()
    with pytest.raises(ClientDisconnect):
        await response
    assert client.open == 0
