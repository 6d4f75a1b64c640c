"""Divides a few threads fairly among clients."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from hotset.base.errors import QueueFull

WAIT_SECONDS = 30.0  # a job that waits longer is refused
RETRY_SECONDS = 5
T = TypeVar("T")


def client_of(request: Request) -> str:
    """Returns who sent a request: its key or, if it has none, the address from which it came."""
    credentials = request.headers.get("authorization") or request.headers.get("x-api-key")
    return credentials or ("" if request.client is None else request.client.host)


class FairQueue:
    """Runs jobs in `slots` threads. The next job is one of the client that has the fewest running, and no client has
    jobs in all threads. All coroutines must run on the same event loop."""

    def __init__(self, name: str, slots: int) -> None:
        """`name` is what the jobs do, for messages."""
        self._name, self._slots = name, slots
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=f"hotset-{name.replace(' ', '-')}")
        self._running: Counter[str] = Counter()
        # The waiting jobs of each client. The clients whose turn was longest ago come first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: str, job: Callable[[], T]) -> T:
        """Runs a job of `client` and returns its result. Raises QueueFull if it had to wait for WAIT_SECONDS."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._admit()
        try:
            await asyncio.wait_for(asyncio.shield(turn), WAIT_SECONDS)
        except BaseException as error:
            if turn.done():
                self._release(client)
            turn.cancel()
            if not isinstance(error, TimeoutError):
                raise
            raise QueueFull(
                f"{self._name} had to wait for more than {WAIT_SECONDS:g} s, because the server is busy with those of "
                "other requests; try again",
                retry_after_s=RETRY_SECONDS,
            ) from None
        work = asyncio.get_running_loop().run_in_executor(self._threads, job)
        work.add_done_callback(lambda done: self._finish(client, done))  # also if this task is cancelled meanwhile
        return await asyncio.shield(work)

    def _finish(self, client: str, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled():
            done.exception()  # marks the error as retrieved: nobody may be waiting for it any more
        self._release(client)

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]  # a client can send any number of different keys
        self._admit()

    def _admit(self) -> None:
        """Gives free threads to waiting jobs."""
        while (free := self._slots - self._running.total()) > 0:
            for client in [client for client, turns in self._waiting.items() if all(turn.done() for turn in turns)]:
                del self._waiting[client]
            # The last free thread is not given to a client whose jobs run in all other threads.
            ready = [client for client in self._waiting if free > 1 or self._running[client] < max(1, self._slots - 1)]
            if not ready:
                return
            client = min(ready, key=lambda each: self._running[each])
            self._waiting.move_to_end(client)
            turns = self._waiting[client]
            while turns and (turn := turns.popleft()).done():
                pass
            turn.set_result(None)
            self._running[client] += 1
