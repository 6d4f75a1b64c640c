"""The workers that a router knows: who is alive, how much each has to do, and who gets the next request."""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from pydantic import ValidationError

from hotset.base.errors import ConfigError, NoWorkers, RequestError
from hotset.serve.protocol import WorkerState
from hotset.serve.router.config import worker_url

logger = logging.getLogger("hotset.router")

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
OUT_AFTER = 2  # failures in a row
LOOK_SECONDS = 2.0
MOST_STATE_BYTES = 1 << 16
MOST_WORKERS = 256


@dataclass(slots=True)
class Worker:
    """One worker as this router sees it. It is out until it has answered once."""

    url: str
    role: Role
    state: WorkerState | None = None
    failures: int = OUT_AFTER
    trouble: str = "has not answered yet"
    requests: int = 0  # of ours, under way
    tokens: int = 0  # of those; at a prefill worker only until their first byte
    foreign_tokens: int = 0  # that wait there and are not ours, as of the last look
    last_chosen: int = 0
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def up(self) -> bool:
        return self.state is not None and self.failures < OUT_AFTER

    @property
    def control(self) -> str:
        assert self.state is not None and self.state.control is not None, "a worker without one is never up"
        return self.state.control

    @property
    def load(self) -> int:
        return self.tokens + self.foreign_tokens

    @contextmanager
    def holding(self, tokens: int) -> Iterator[None]:
        """Counts a request here until the block is left."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens


class Fleet:
    """Looks at every worker again and again, from its own tasks. `session` is borrowed."""

    def __init__(self, session: aiohttp.ClientSession, poll_seconds: float) -> None:
        self._session = session
        self._poll_seconds = poll_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: dict[str, Worker] = {}
        self._numbers = itertools.count(1)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def up(self, role: Role) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.role == role and worker.up]

    def add(self, url: str, role: Role) -> Worker:
        """Takes a worker in; it gets requests once it has answered."""
        worker = Worker(url, role)
        self._workers[url] = worker
        self._tasks[url] = asyncio.create_task(self._watch(worker))
        return worker

    async def join(self, given: str) -> Worker:
        """Takes in a worker that answers now, in the role that it states. RequestError where it does not."""
        try:
            url = worker_url(given)
        except ConfigError as error:
            raise RequestError(str(error), param="url", code="invalid_value") from error
        if url in self._workers:
            raise RequestError(f"worker {url} is here already", param="url", code="known_worker")
        if len(self._workers) >= MOST_WORKERS:
            raise RequestError(f"{MOST_WORKERS} workers are here, which is the limit", param="url", code="too_many")
        found = await self._asked(url)
        role = next((role for role in ROLES if not isinstance(found, str) and role == found.role), None)
        refused = found if isinstance(found, str) else None if role else f"its role is {found.role!r}"
        if refused is None and role is not None and url not in self._workers:
            worker = self.add(url, role)
            await self.look(worker)
            if worker.up:
                return worker
            self.remove(url)
            refused = worker.trouble
        raise RequestError(f"worker {url} cannot join: {refused or 'it does already'}", param="url", code="no_worker")

    def remove(self, url: str) -> bool:
        """Sends no further request there; those under way go on. False where there is no such worker."""
        task = self._tasks.pop(url, None)
        if task is None:
            return False
        task.cancel()
        del self._workers[url]
        logger.info("%s has left", url)
        return True

    def choose(self, role: Role, avoid: Collection[str]) -> Worker:
        """The live worker with the fewest tokens, one outside `avoid` if there is any; of equals, the longest unused.

        NoWorkers where none is alive.
        """
        alive = self.up(role)
        if not alive:
            known = sum(worker.role == role for worker in self._workers.values())
            raise NoWorkers(f"none of {known} {role} workers is alive; come back later")
        fresh = [worker for worker in alive if worker.url not in avoid]
        chosen = min(fresh or alive, key=lambda worker: (worker.load, worker.last_chosen))
        chosen.last_chosen = next(self._numbers)
        return chosen

    async def doubt(self, worker: Worker) -> None:
        """A request failed there: that counts as a failure, and a look at once says whether it is out."""
        worker.failures += 1
        await self.look(worker)

    async def look(self, worker: Worker) -> None:
        """Asks a worker for its state, and notes the answer or its absence. One look at a time."""
        async with worker.looking:
            was_up, said = worker.up, worker.trouble
            found = await self._asked(worker.url)
            trouble = found if isinstance(found, str) else self._objection(worker, found)
            if isinstance(found, str) or trouble is not None:
                # A live worker that does not fit is out at once; one that said nothing may be heard the next time.
                worker.failures = worker.failures + 1 if isinstance(found, str) else OUT_AFTER
                worker.trouble = trouble or ""
            else:
                worker.state, worker.failures, worker.trouble = found, 0, ""
                worker.foreign_tokens = max(0, found.waiting_tokens - worker.tokens)
            if worker.up and not was_up:
                logger.info("%s worker %s is up", worker.role, worker.url)
            elif not worker.up and (was_up or worker.trouble != said):
                logger.warning("%s worker %s is out: %s", worker.role, worker.url, worker.trouble)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self.look(worker)
            await asyncio.sleep(self._poll_seconds)

    async def _asked(self, url: str) -> WorkerState | str:
        """A worker's state, or in a few words why there is none."""
        try:
            async with (
                asyncio.timeout(LOOK_SECONDS),
                self._session.get(f"{url}/handoff", allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    return f"answered {answer.status} at /handoff"
                body = await answer.content.read(MOST_STATE_BYTES)
                while len(body) < MOST_STATE_BYTES and (more := await answer.content.read(MOST_STATE_BYTES)):
                    body += more
                return WorkerState.model_validate_json(body)
        except TimeoutError:
            return f"gave no answer for {LOOK_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"cannot be reached ({type(error).__name__})"
        except (ValidationError, ValueError):
            return "answered nonsense at /handoff"

    def _objection(self, worker: Worker, state: WorkerState) -> str | None:
        """Why a worker that answers gets no requests all the same."""
        if state.role != worker.role:
            return f"its role is {state.role!r}, not {worker.role!r}; start it with --role {worker.role}"
        if state.control is None:
            return "it has no control address"
        others = (other for other in self._workers.values() if other is not worker and other.up)
        other = next((other for other in others if other.state and other.state.model != state.model), None)
        if other is not None and other.state is not None:
            return f"it serves {state.model!r}, while {other.url} serves {other.state.model!r}"
        return None
