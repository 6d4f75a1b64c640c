"""Work for a client that disconnects, or whose request is cancelled, ends before its request."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.requests import ClientDisconnect
from waiting import in_event_loop

from hotset.serve import http_server
from hotset.serve.http_server import unless_disconnected


async def never() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


async def disconnects() -> dict[str, str]:
    return {"type": "http.disconnect"}


class Numbers:
    """A generator whose end takes until `may_end` is set."""

    def __init__(self) -> None:
        self.began, self.ending, self.may_end, self.ended = (asyncio.Event() for _ in range(4))

    async def generate(self) -> AsyncGenerator[int, None]:
        try:
            self.began.set()
            await asyncio.Event().wait()
            yield 0
        finally:
            self.ending.set()
            await self.may_end.wait()
            self.ended.set()


async def consume(numbers: AsyncGenerator[int, None]) -> None:
    async for _ in numbers:
        pass


@in_event_loop
async def test_the_result_is_returned_and_an_error_is_raised() -> None:
    async def fails() -> int:
        raise ValueError("work")

    assert await unless_disconnected(never, asyncio.sleep(0, 7)) == 7
    with pytest.raises(ValueError, match="work"):
        await unless_disconnected(never, fails())


@in_event_loop
async def test_work_for_a_client_that_has_disconnected_ends_first() -> None:
    source = Numbers()
    numbers = source.generate()

    async def disconnect_later() -> dict[str, str]:
        await source.began.wait()
        return await disconnects()

    request = asyncio.create_task(unless_disconnected(disconnect_later, consume(numbers)))
    await source.ending.wait()
    assert not request.done()
    source.may_end.set()
    with pytest.raises(ClientDisconnect):
        await request
    assert source.ended.is_set()


@in_event_loop
async def test_a_request_that_is_cancelled_twice_still_ends_after_its_work() -> None:
    """A server that stops cancels a request again, whose client has disconnected. The generator is then still ending,
    and must not be closed by the request at the same time."""
    source = Numbers()
    numbers = source.generate()

    async def respond() -> None:
        async with aclosing(numbers):
            await unless_disconnected(never, consume(numbers))

    request = asyncio.create_task(respond())
    await source.began.wait()
    request.cancel()
    await source.ending.wait()
    request.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not request.done()
    source.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert source.ended.is_set()


@in_event_loop
async def test_a_request_does_not_wait_for_ever_for_work_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "CLEANUP_SECONDS", 0.01)
    source = Numbers()
    request = asyncio.create_task(unless_disconnected(never, consume(source.generate())))
    await source.began.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert not source.ended.is_set() and "has not ended" in caplog.text
    source.may_end.set()
    await source.ended.wait()
