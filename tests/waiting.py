"""Waits for conditions, with a limit that is long enough for an overloaded machine. Has a clock and an event that
tests set."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

WAIT_SECONDS = 60.0


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> bool:
    """Waits until the condition holds, for at most `seconds`, and returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(holds)


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds. Raises TimeoutError if it does not within WAIT_SECONDS."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an asynchronous test, which fails if it takes longer than twice WAIT_SECONDS."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(2 * WAIT_SECONDS):
                await test(*args, **fixtures)

        asyncio.run(limited())

    return run


class Clock:
    """A clock that the test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class ManualEvent:
    """Stands for the event of a forward pass. It happens when the test sets `happened`."""

    def __init__(self, *, happened: bool = False) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened
