"""The workers behind a router: their health, their load, and the choice of a worker for the next request."""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from pydantic import ValidationError

from hotset.base.address import Address
from hotset.base.errors import ConfigError, NotAllowed, NoWorkers, RequestError
from hotset.serve.responses import WorkerState
from hotset.serve.router.config import LOOPBACK_HOSTS, is_allowed, worker_url

logger = logging.getLogger("hotset.router")

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
FAILURES_UNTIL_DOWN = 2  # consecutive failures
HEALTH_CHECK_TIMEOUT_SECONDS = 2.0
MAX_STATE_BYTES = 1 << 16
MAX_WORKERS = 256


@dataclass(slots=True)
class RoutedWorker:
    """The router's view of one worker. A worker counts as down until it has passed its first health check.

    At a decode worker, a request counts as in flight until the last byte of its response, at a prefill worker until
    the first byte. A failed attempt counts until it has failed.
    """

    url: str
    role: Role
    state: WorkerState | None = None
    failures: int = FAILURES_UNTIL_DOWN  # consecutive failed health checks and requests
    last_error: str = "has not answered yet"
    requests: int = 0  # requests of this router that are in flight
    tokens: int = 0  # estimated prompt tokens of these requests
    external_tokens: int = 0  # reported waiting tokens beyond `tokens`, at the newest successful health check
    last_chosen: int = 0  # number of the `choose` call that returned this worker most recently
    health_check_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def up(self) -> bool:
        return self.state is not None and self.failures < FAILURES_UNTIL_DOWN

    @property
    def degraded(self) -> str | None:
        """Why the worker cannot admit a request of the maximum length, or None if it can."""
        return None if self.state is None else self.state.degraded

    @property
    def control(self) -> str:
        assert self.state is not None and self.state.control is not None, "a worker without a control address is down"
        return self.state.control

    @property
    def load(self) -> int:
        return self.tokens + self.external_tokens

    @contextmanager
    def in_flight(self, tokens: int) -> Iterator[None]:
        """Counts a request of `tokens` tokens as in flight here until the block ends."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens


class Fleet:
    """All workers of a router. One task per worker checks its health periodically. `session` is borrowed.

    `allowed_hosts` are the hosts whose workers may join.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        poll_seconds: float,
        allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    ) -> None:
        self._session = session
        self._poll_seconds = poll_seconds
        self._allowed_hosts = allowed_hosts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: dict[str, RoutedWorker] = {}
        self._choice_numbers = itertools.count(1)

    @property
    def workers(self) -> list[RoutedWorker]:
        return list(self._workers.values())

    def up(self, role: Role) -> list[RoutedWorker]:
        return [worker for worker in self._workers.values() if worker.role == role and worker.up]

    def add(self, url: str, role: Role) -> RoutedWorker:
        """Adds a worker. It receives requests after its first successful health check."""
        worker = RoutedWorker(url, role)
        self._workers[url] = worker
        self._tasks[url] = asyncio.create_task(self._poll(worker))
        return worker

    async def join(self, address: str) -> RoutedWorker:
        """Adds a worker in the role that it reports, after a health check.

        Raises RequestError if the address is invalid or known, the router is full, or the check fails, and NotAllowed,
        without connecting to the address, if its host is not allowed.
        """
        try:
            url = worker_url(address)
        except ConfigError as error:
            raise RequestError(str(error), param="url", code="invalid_value") from error
        if not is_allowed(url, self._allowed_hosts):
            hosts = ", ".join(self._allowed_hosts)
            message = f"worker {url} may not join: this router allows {hosts}; start it with --allow-workers HOST"
            raise NotAllowed(message, param="url")
        if url in self._workers:
            raise RequestError(f"worker {url} has already joined", param="url", code="known_worker")
        if len(self._workers) >= MAX_WORKERS:
            message = f"the router has {MAX_WORKERS} workers, which is the limit; remove one first"
            raise RequestError(message, param="url", code="too_many")
        state = await self._fetch_state(url)
        role = next((role for role in ROLES if not isinstance(state, str) and role == state.role), None)
        reason = state if isinstance(state, str) else None if role else f"its role is {state.role!r}"
        if reason is None and role is not None and url not in self._workers:
            worker = self.add(url, role)
            await self.check_health(worker)
            if worker.up:
                return worker
            self.remove(url)
            reason = worker.last_error
        message = f"worker {url} cannot join: {reason or 'it has already joined'}"
        raise RequestError(message, param="url", code="no_worker")

    def remove(self, url: str) -> bool:
        """Removes a worker; its requests in flight continue. Returns False for an unknown URL."""
        task = self._tasks.pop(url, None)
        if task is None:
            return False
        task.cancel()
        del self._workers[url]
        logger.info("%s was removed", url)
        return True

    def choose(self, role: Role, avoid: Collection[str]) -> RoutedWorker:
        """Returns the live worker of `role` with the lowest load. A tie goes to the least recently chosen one.

        Workers in `avoid` are chosen only if no other is alive, and degraded ones only if all others are in `avoid`.
        Raises NoWorkers if no worker of the role is alive.
        """
        alive = self.up(role)
        if not alive:
            known = sum(worker.role == role for worker in self._workers.values())
            raise NoWorkers(f"no {role} worker is alive ({known} are known); retry later")
        chosen = min(
            alive,
            key=lambda worker: (worker.url in avoid, worker.degraded is not None, worker.load, worker.last_chosen),
        )
        chosen.last_chosen = next(self._choice_numbers)
        return chosen

    async def report_failure(self, worker: RoutedWorker) -> None:
        """Counts a failed request like a failed health check, and checks the worker's health at once."""
        worker.failures += 1
        await self.check_health(worker)

    async def check_health(self, worker: RoutedWorker) -> None:
        """Fetches a worker's state and records the result. Checks of one worker do not overlap."""
        async with worker.health_check_lock:
            was_up, previous_error = worker.up, worker.last_error
            state = await self._fetch_state(worker.url)
            error = state if isinstance(state, str) else self._mismatch(worker, state)
            if isinstance(state, str) or error is not None:
                # A worker whose state does not match is down at once; a failed fetch may be temporary.
                worker.failures = worker.failures + 1 if isinstance(state, str) else FAILURES_UNTIL_DOWN
                worker.last_error = error or ""
            else:
                worker.state, worker.failures, worker.last_error = state, 0, ""
                worker.external_tokens = max(0, state.waiting_tokens - worker.tokens)
            if worker.up and not was_up:
                logger.info("%s worker %s is up", worker.role, worker.url)
            elif not worker.up and (was_up or worker.last_error != previous_error):
                logger.warning("%s worker %s is down: %s", worker.role, worker.url, worker.last_error)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _poll(self, worker: RoutedWorker) -> None:
        while True:
            await self.check_health(worker)
            await asyncio.sleep(self._poll_seconds)

    async def _fetch_state(self, url: str) -> WorkerState | str:
        """Returns a worker's state, or a short text that explains why it could not be fetched."""
        try:
            async with (
                asyncio.timeout(HEALTH_CHECK_TIMEOUT_SECONDS),
                self._session.get(f"{url}/handoff", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return f"answered {response.status} at /handoff"
                if response.content_type != "application/json":
                    raise ValueError(response.content_type)
                body = await response.content.read(MAX_STATE_BYTES)
                while len(body) < MAX_STATE_BYTES and (more := await response.content.read(MAX_STATE_BYTES)):
                    body += more
                return WorkerState.model_validate_json(body, strict=True)
        except TimeoutError:
            return f"did not answer within {HEALTH_CHECK_TIMEOUT_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"cannot be reached ({type(error).__name__})"
        except (ValidationError, ValueError):
            return "answered something other than a worker's state at /handoff"

    def _mismatch(self, worker: RoutedWorker, state: WorkerState) -> str | None:
        """Returns the reason why a worker that answers must not receive requests, or None if it may."""
        if state.role != worker.role:
            return f"its role is {state.role!r}, not {worker.role!r}; start it with --role {worker.role}"
        if state.control is None:
            return "it has no control address"
        control = Address.parse(state.control)
        if control is None or not control.reachable:
            return f"its control address {state.control!r} is not an address like 10.0.0.1:7001"
        peers = (peer for peer in self._workers.values() if peer is not worker and peer.up)
        peer = next((peer for peer in peers if peer.state and peer.state.model != state.model), None)
        if peer is not None and peer.state is not None:
            return f"it serves {state.model!r}, while {peer.url} serves {peer.state.model!r}"
        return None
