"""Workers with real prefix caches but without engines, behind the router's real choice of workers."""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from hotset.fleet.kv_events.subscriber import KnownBlocks
from hotset.fleet.router.fleet import Fleet, RoutedWorker
from hotset.fleet.router.prefixes import PromptPrefixes
from hotset.serve.page_marks import page_marks_header, parse_page_marks
from hotset.serve.responses import WorkerState
from hotset.tiers.prefix_cache import CacheChange, PageHasher, PagesStored, PrefixCache, event_hash

PAGE_ROWS = 64
PATH = "/v1/chat/completions"
HASHER = PageHasher("model", PAGE_ROWS)


def state_of(
    role: str = "decode", degraded: str | None = None, stored_tokens: int = 0, host_tokens: int = 0
) -> WorkerState:
    return WorkerState(
        role=role,
        control="127.0.0.1:7001",
        model="m",
        waiting_tokens=0,
        waiting=0,
        running=0,
        degraded=degraded,
        stored_tokens=stored_tokens,
        host_tokens=host_tokens,
    )


def add_worker(fleet: Fleet, url: str, role: Any = "decode") -> RoutedWorker:
    """Adds a worker that is up. Its health is not checked unless the event loop runs."""
    worker = fleet.add(url, role)
    worker.state, worker.failures = state_of(role), 0
    return worker


def tokens_of(text: str) -> list[int]:
    """Tokenizes text: four characters are one token, so texts that begin alike have tokens that begin alike."""
    encoded = text.encode()
    return memoryview(encoded[: len(encoded) // 4 * 4]).cast("I").tolist()


@dataclass(frozen=True)
class Sizes:
    """The lengths of the parts of conversations, in characters. Four are a token."""

    system: int = 4096
    question: tuple[int, int] = (400, 1600)  # the least and the most
    answer: tuple[int, int] = (200, 1200)


@dataclass
class Session:
    """A conversation. Every turn repeats the whole history."""

    rng: random.Random
    messages: list[dict[str, str]]
    sizes: Sizes

    def next_body(self) -> tuple[bytes, str]:
        """Adds a question, and returns the body of the request and the text of the prompt."""
        self.messages.append({"role": "user", "content": words(self.rng, self.rng.randint(*self.sizes.question))})
        text = "".join(f"<{message['role']}>{message['content']}" for message in self.messages)
        return json.dumps({"model": "m", "messages": self.messages, "max_tokens": 100}).encode(), text

    def answer(self) -> str:
        self.messages.append({"role": "assistant", "content": words(self.rng, self.rng.randint(*self.sizes.answer))})
        return f"<assistant>{self.messages[-1]['content']}"


NORMAL = Sizes()
LETTERS = "".join(random.Random(0).choices("abcdefgh ", k=1 << 17))


def words(rng: random.Random, length: int) -> str:
    """Returns a random text."""
    start = rng.randrange(len(LETTERS) - length)
    return LETTERS[start : start + length]


@dataclass
class LocalView:
    """Replaces a KvEventsView, and has no sockets."""

    blocks: KnownBlocks
    synced: bool = True

    def has_block(self, block_hash: int) -> bool | None:
        return block_hash in self.blocks if self.synced else None

    async def wait_closed(self) -> None:
        pass


@dataclass
class ModelledWorker:
    """A worker that has a prefix cache of `pages` pages and computes nothing."""

    routed: RoutedWorker
    pages: int
    cache: PrefixCache = field(init=False)
    _blocks: KnownBlocks = field(default_factory=KnownBlocks)  # the blocks that the router knows
    _undelivered: deque[CacheChange] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.pages)

    def publish_events(self) -> None:
        """Lets the router follow this worker's KV events, as far as they are delivered."""
        self.cache.on_change = self._undelivered.append
        self.routed.kv_events = cast(Any, LocalView(self._blocks))

    def deliver_events(self) -> None:
        """Lets the router know what has changed in the cache."""
        while self._undelivered:
            change = self._undelivered.popleft()
            hashes = [event_hash(page_hash) for page_hash in change.hashes]
            if isinstance(change, PagesStored):
                self._blocks.store(hashes, "CPU_TIER1")
            else:
                self._blocks.remove(hashes, "CPU_TIER1")

    def answer_health_check(self) -> None:
        """Lets the router know how much is stored."""
        assert self.routed.state is not None
        self.routed.state.stored_tokens = self.cache.cached * PAGE_ROWS
        self.routed.state.host_tokens = self.pages * PAGE_ROWS

    def begin(self, tokens: list[int]) -> "Running":
        """Admits a request, which uses the pages of its prompt that are cached."""
        hashes: list[bytes] = []
        HASHER.extend(hashes, tokens, "")
        used = self.cache.find(hashes[: (len(tokens) - 1) // PAGE_ROWS])
        self.cache.use(used)
        return Running(tokens, len(used) * PAGE_ROWS, used)

    def finish(self, running: "Running", answer: list[int]) -> None:
        """Publishes the pages of a request that ends. If all others are in use, it publishes nothing."""
        context, hashes, used = running.tokens + answer, list[bytes](), running.used
        HASHER.extend(hashes, context, "")
        own = self.cache.allocate(len(hashes) - len(used))
        if own is not None:
            pages = [page.page for page in used] + own
            self.cache.publish(used, pages, hashes, context[: len(hashes) * PAGE_ROWS])
            owned = {page.page for page in used}
            self.cache.release([page for page in own if page not in owned])
        self.cache.stop_using(used)


@dataclass
class Running:
    """A request at a worker."""

    tokens: list[int]
    cached_tokens: int
    used: list[Any]  # the cached pages that it uses


@dataclass
class HitRate:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moves: int = 0

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def serve_sessions(
    fleet: Fleet,
    workers: dict[str, ModelledWorker],
    rng: random.Random,
    *,
    sessions: int = 32,
    turns: int = 8,
    at_once: int = 8,
    sizes: Sizes = NORMAL,
    on_request: Callable[[int], None] = lambda number: None,
) -> HitRate:
    """Sends the turns of many sessions through the choice of workers, `at_once` of them in flight.

    Pages are published when a request ends. The router receives KV events after the next request, and asks for the
    stored tokens after every eighth request.
    """
    system = {"role": "system", "content": words(rng, sizes.system)}
    waiting = [Session(random.Random(rng.random()), [dict(system)], sizes) for _ in range(sessions)]
    left = {id(session): turns for session in waiting}
    last: dict[int, str] = {}
    rate = HitRate()
    in_flight: deque[Callable[[], None]] = deque()
    number = 0

    def send(session: Session) -> Callable[[], None]:
        body, text = session.next_body()
        prompt, tokens = PromptPrefixes.of(PATH, body), tokens_of(text)
        choice = fleet.choose("decode", (), prompt)
        worker, modelled, requests = choice.worker, workers[choice.worker.url], ExitStack()
        requests.enter_context(worker.in_flight(len(body) // 4, choice.cached_tokens))
        requests.enter_context(fleet.prefixes.in_flight(prompt, worker))
        running = modelled.begin(tokens)
        rate.prompt_tokens += len(tokens)
        rate.cached_tokens += running.cached_tokens
        rate.moves += last.get(id(session), worker.url) != worker.url
        last[id(session)] = worker.url

        def end() -> None:
            modelled.finish(running, tokens_of(session.answer()))
            requests.close()
            fleet.prefixes.record_sent(prompt, worker)
            if worker.kv_events is not None:
                fleet.prefixes.record_pages(prompt, parse_page_marks(page_marks_header(tokens, "", HASHER)))
            if left[id(session)]:
                waiting.append(session)

        return end

    while waiting or in_flight:
        if not waiting or len(in_flight) >= at_once:
            in_flight.popleft()()
            continue
        on_request(number)
        number += 1
        session = waiting.pop(rng.randrange(len(waiting)))
        left[id(session)] -= 1
        in_flight.append(send(session))
        for modelled in workers.values():
            modelled.deliver_events()
            if number % 8 == 0:
                modelled.answer_health_check()
    return rate


def in_loop(test: Callable[[Fleet], Any]) -> Any:
    """Runs `test` with a fleet whose health checks never start, because the event loop never gets control."""

    async def run() -> Any:
        fleet = Fleet(cast(Any, None), 1.0, 1.0)
        try:
            return test(fleet)
        finally:
            await fleet.close()

    return asyncio.run(run())
