"""No client gets all threads of a queue, and no thread is lost when a client stops waiting."""

import asyncio
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

import pytest
from waiting import in_event_loop

from hotset.base.errors import QueueFull
from hotset.serve import fair_queue
from hotset.serve.fair_queue import FairQueue

TIMEOUT_SECONDS = 10.0
T = TypeVar("T")


class Jobs:
    """Jobs that last until they are ended, in a queue. All waits have a timeout, so that no thread outlives a test."""

    def __init__(self, slots: int) -> None:
        self.queue = FairQueue("testing", slots)
        self._ends: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._started: asyncio.Queue[str] = asyncio.Queue()

    def begin(self, client: str, name: str) -> "asyncio.Task[str]":
        """Queues a job."""
        end, loop = self._ends[name], asyncio.get_running_loop()

        def job() -> str:
            loop.call_soon_threadsafe(self._started.put_nowait, name)
            end.wait(TIMEOUT_SECONDS)
            return name

        return asyncio.create_task(self.queue.run(client, job))

    async def next_started(self) -> str:
        return await soon(self._started.get())

    def end(self, *names: str) -> None:
        """Ends jobs, also before they have begun."""
        for name in names:
            self._ends[name].set()

    def close(self) -> None:
        """Ends all jobs."""
        self.end(*self._ends)


def soon(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    return asyncio.wait_for(awaitable, TIMEOUT_SECONDS)


@in_event_loop
async def test_a_client_never_has_all_threads() -> None:
    with closing(Jobs(3)) as jobs:
        greedy = [jobs.begin("greedy", f"greedy {number}") for number in range(4)]
        assert {await jobs.next_started(), await jobs.next_started()} == {"greedy 0", "greedy 1"}
        other = jobs.begin("other", "other")
        assert await jobs.next_started() == "other"
        jobs.close()
        assert await soon(other) == "other"
        assert await soon(asyncio.gather(*greedy)) == [f"greedy {number}" for number in range(4)]


@in_event_loop
async def test_the_next_thread_is_for_the_client_with_the_fewest_jobs() -> None:
    with closing(Jobs(4)) as jobs:
        clients = ["a", "a", "b", "b", "a", "c", "b"]
        tasks = [jobs.begin(client, f"{client}{number}") for number, client in enumerate(clients)]
        assert {await jobs.next_started() for _ in range(4)} == {"a0", "a1", "b2", "b3"}
        jobs.end("b2")
        assert await jobs.next_started() == "c5"  # a has waited longer, but it has two threads, and b has one
        jobs.end("b3")
        assert await jobs.next_started() == "b6"
        jobs.close()
        await soon(asyncio.gather(*tasks))


@in_event_loop
async def test_a_cancelled_wait_leaves_the_thread_to_others() -> None:
    with closing(Jobs(1)) as jobs:
        first = jobs.begin("a", "first")
        assert await jobs.next_started() == "first"
        waiting = jobs.begin("b", "waiting")
        third = jobs.begin("c", "third")
        await asyncio.sleep(0)  # now they wait
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        jobs.close()
        assert await soon(first) == "first" and await soon(third) == "third"


@in_event_loop
async def test_a_job_whose_client_has_gone_holds_its_thread_until_it_ends() -> None:
    with closing(Jobs(2)) as jobs:
        gone, other = jobs.begin("a", "gone"), jobs.begin("a", "other")
        assert await jobs.next_started() == "gone"
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        third = jobs.begin("b", "third")
        assert await jobs.next_started() == "third"
        jobs.close()
        assert await soon(third) == "third" and await soon(other) == "other"


@in_event_loop
async def test_a_job_that_waits_too_long_is_refused_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Jobs(1)) as jobs:
        first = jobs.begin("a", "first")
        assert await jobs.next_started() == "first"
        monkeypatch.setattr(fair_queue, "WAIT_SECONDS", 0.01)
        with pytest.raises(QueueFull, match=r"testing had to wait for more than 0\.01 s") as refused:
            await jobs.begin("b", "late")
        assert refused.value.retry_after_s == fair_queue.RETRY_SECONDS
        monkeypatch.undo()
        jobs.end("first", "next")
        await soon(first)
        assert await soon(jobs.begin("b", "next")) == await jobs.next_started() == "next"


class Client(str):
    """The name of a client. A weak reference shows when the queue has forgotten it."""


@in_event_loop
async def test_nothing_is_kept_of_clients_without_jobs() -> None:
    with closing(Jobs(1)) as jobs:
        client = Client("key")
        kept = weakref.ref(client)
        await jobs.queue.run(client, lambda: None)
        del client
        gc.collect()
        assert kept() is None
