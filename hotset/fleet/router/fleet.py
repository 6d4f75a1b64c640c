"""The workers behind a router: their health, their load, and the choice of a worker for the next request."""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import zmq.asyncio
from pydantic import ValidationError

from hotset.base.address import Address
from hotset.base.errors import ConfigError, NotAllowed, NoWorkers, RequestError
from hotset.fleet.router.config import LOOPBACK_HOSTS, is_allowed, worker_url
from hotset.fleet.router.kv_events_view import KvEventsView
from hotset.fleet.router.prefixes import PrefixIndex, PromptPrefixes
from hotset.serve.responses import WorkerState

logger = logging.getLogger("hotset.router")

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
FAILURES_UNTIL_DOWN = 2  # consecutive failures
MAX_STATE_BYTES = 1 << 16
MAX_WORKERS = 256
CACHED_WEIGHT = 4  # a cached token of a session outweighs this many tokens of overload, since a move also takes memory
BALANCED_TOKENS = 2048  # smaller differences of load do not move a session: one or two steps compute them
REQUEST_TOKENS = 256  # the load of a request in flight, besides the tokens that must be computed or received for it
FULL_CHARGE = 0.25  # from this difference in the used share of host stores on, the charge has its maximum
CACHE_IDS = itertools.count(1)
NO_PROMPT = PromptPrefixes()


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
    uncached_tokens: int = 0  # the part of `tokens` that must be computed or received, because it was not cached
    external_tokens: int = 0  # reported waiting tokens beyond `tokens`, at the newest successful health check
    last_chosen: int = 0  # number of the `choose` call that returned this worker most recently
    cache_id: int = field(default_factory=CACHE_IDS.__next__)  # changes whenever the worker comes up
    kv_events: KvEventsView | None = None  # None if the worker publishes no KV events, or is down
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
        return self.uncached_tokens + self.external_tokens + REQUEST_TOKENS * self.requests

    @property
    def stored_share(self) -> float | None:
        """The share of the worker's host store that is in use, or None if the size of the store is unknown."""
        if self.state is None or not self.state.host_tokens:
            return None
        return self.state.stored_tokens / self.state.host_tokens

    def has_block(self, block_hash: int) -> bool | None:
        """Returns whether a page is in the worker's prefix cache, or None if its KV events are not received."""
        return None if self.kv_events is None else self.kv_events.has_block(block_hash)

    @contextmanager
    def in_flight(self, tokens: int, cached_tokens: int) -> Iterator[None]:
        """Counts a request of `tokens` tokens, of which `cached_tokens` are cached, as in flight until the block
        ends."""
        uncached_tokens = max(1, tokens - cached_tokens)
        self.requests += 1
        self.tokens += tokens
        self.uncached_tokens += uncached_tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens
            self.uncached_tokens -= uncached_tokens


@dataclass(frozen=True, slots=True)
class ChosenWorker:
    """A worker for one attempt, and an estimate of the prompt tokens that are in its prefix cache."""

    worker: RoutedWorker
    cached_tokens: int


class Fleet:
    """All workers of a router. One task per worker checks its health periodically. The caller owns `session`.

    `allowed_hosts` are the hosts whose workers may join.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        poll_seconds: float,
        health_timeout_seconds: float,
        allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    ) -> None:
        self._session = session
        self._poll_seconds = poll_seconds
        self._health_timeout_seconds = health_timeout_seconds
        self._allowed_hosts = allowed_hosts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: dict[str, RoutedWorker] = {}
        self._choice_numbers = itertools.count(1)
        self.prefixes = PrefixIndex()
        self._events_context: zmq.asyncio.Context | None = None  # None until a worker publishes KV events

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
        self._follow_events(self._workers.pop(url))
        logger.info("%s was removed", url)
        return True

    def choose(self, role: Role, avoid: Collection[str], prompt: PromptPrefixes = NO_PROMPT) -> ChosenWorker:
        """Returns the live worker of `role` at which a prompt costs least.

        A session that continues stays at the worker that has most of it in its cache, unless that worker is overloaded.
        The cost of a new session is the load of the worker, plus the tokens that are not in its cache, plus a charge
        for the use of its memory.

        A tie goes to the lowest load, then to the least recently chosen worker. Workers in `avoid` are chosen only if
        no other worker is alive, and degraded workers only if all others are in `avoid`. Raises NoWorkers if no worker
        of the role is alive.
        """
        alive = self.up(role)
        if not alive:
            known = sum(worker.role == role for worker in self._workers.values())
            raise NoWorkers(f"no {role} worker is alive ({known} are known); retry later")
        cached_tokens = self.prefixes.cached_tokens(prompt, alive)
        uncached_tokens = [max(0, prompt.tokens - cached) for cached in cached_tokens]
        if self.prefixes.continues_session(prompt):
            balanced = min(worker.load for worker in alive) + BALANCED_TOKENS
            costs: list[float] = [
                max(0, worker.load - balanced) + CACHED_WEIGHT * uncached
                for worker, uncached in zip(alive, uncached_tokens, strict=True)
            ]
        else:
            charges = _memory_charges(alive, max(uncached_tokens))
            costs = [
                worker.load + uncached + charge
                for worker, uncached, charge in zip(alive, uncached_tokens, charges, strict=True)
            ]

        def rank(index: int) -> tuple[bool, bool, float, int, int]:
            worker = alive[index]
            return worker.url in avoid, worker.degraded is not None, costs[index], worker.load, worker.last_chosen

        index = min(range(len(alive)), key=rank)
        alive[index].last_chosen = next(self._choice_numbers)
        return ChosenWorker(alive[index], cached_tokens[index])

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
            self._follow_events(worker)
            if worker.up and not was_up:
                worker.cache_id = next(CACHE_IDS)  # it may be a new process with an empty cache
                logger.info("%s worker %s is up", worker.role, worker.url)
            elif not worker.up and (was_up or worker.last_error != previous_error):
                logger.warning("%s worker %s is down: %s", worker.role, worker.url, worker.last_error)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        views = [worker.kv_events for worker in self.workers if worker.kv_events is not None]
        await asyncio.gather(*(view.wait_closed() for view in views))
        if self._events_context is not None:
            self._events_context.destroy(linger=0)

    def _follow_events(self, worker: RoutedWorker) -> None:
        """Follows the KV events of a worker that is up and publishes them. Stops following any other worker."""
        is_followed = worker.up and self._workers.get(worker.url) is worker
        wanted = worker.state.kv_events if is_followed and worker.state is not None else []
        if worker.kv_events is not None and worker.kv_events.publishers != wanted:
            worker.kv_events.close()
            worker.kv_events = None
        if worker.kv_events is None and wanted:
            self._events_context = self._events_context or zmq.asyncio.Context()
            worker.kv_events = KvEventsView(self._events_context, worker.url, wanted)

    async def _poll(self, worker: RoutedWorker) -> None:
        while True:
            await self.check_health(worker)
            await asyncio.sleep(self._poll_seconds)

    async def _fetch_state(self, url: str) -> WorkerState | str:
        """Returns a worker's state, or a short text that explains why it could not be fetched."""
        try:
            async with (
                asyncio.timeout(self._health_timeout_seconds),
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
            return f"did not answer within {self._health_timeout_seconds:g} s"
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


def _memory_charges(workers: Sequence[RoutedWorker], limit: int) -> list[float]:
    """Returns each worker's charge, in tokens, for using a larger share of its host store than the other workers.

    Without a charge, all sessions that share a system prompt would stay at the worker that had it first, until their
    requests overlap. `limit` is the maximum charge. If the size of a store is unknown, all charges are 0.
    """
    shares = [share for worker in workers if (share := worker.stored_share) is not None]
    if len(shares) < len(workers):
        return [0] * len(workers)
    return [limit * min(1.0, (share - min(shares)) / FULL_CHARGE) for share in shares]
