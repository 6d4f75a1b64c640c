"""Workers with real prefix caches but without engines, behind the router's real choice of workers."""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from hotset.kv_events.known_blocks import KnownBlocks, event_hash
from hotset.serve.page_marks import page_marks_header, parse_page_marks
from hotset.serve.responses import WorkerState
from hotset.serve.router.fleet import Fleet, RoutedWorker
from hotset.serve.router.prefixes import PromptPrefixes
from hotset.tiers.prefix_cache import CacheChange, PageHasher, PagesStored, PrefixCache

PAGE_ROWS = 64
PATH = "/v1/chat/completions"
HASHER = PageHasher("model", PAGE_ROWS)


def state_of(role: str = "decode", waiting_tokens: int = 0, degraded: str | None = None) -> WorkerState:
    return WorkerState(
        role=role,
        control="127.0.0.1:7001",
        model="m",
        waiting_tokens=waiting_tokens,
        waiting=0,
        running=0,
        degraded=degraded,
    )


def add_worker(fleet: Fleet, url: str, role: Any = "decode") -> RoutedWorker:
    """Adds a worker that is up. Its health is not checked unless the event loop runs."""
    worker = fleet.add(url, role)
    worker.state, worker.failures = state_of(role), 0
    return worker


def tokens_of(text: str) -> list[int]:
    """A tokenizer for which beginnings of texts have beginnings of tokens: four characters are one token."""
    encoded = text.encode()
    return memoryview(encoded[: len(encoded) // 4 * 4]).cast("I").tolist()


@dataclass
class Session:
    """A conversation, of which every turn repeats the whole history."""

    rng: random.Random
    messages: list[dict[str, str]]

    def next_body(self) -> tuple[bytes, str]:
        """Adds a question, and returns the body of the request and the text of the prompt."""
        self.messages.append({"role": "user", "content": words(self.rng, self.rng.randint(400, 1600))})
        text = "".join(f"<{message['role']}>{message['content']}" for message in self.messages)
        return json.dumps({"model": "m", "messages": self.messages, "max_tokens": 100}).encode(), text

    def answer(self) -> str:
        self.messages.append({"role": "assistant", "content": words(self.rng, self.rng.randint(200, 1200))})
        return f"<assistant>{self.messages[-1]['content']}"


LETTERS = "".join(random.Random(0).choices("abcdefgh ", k=1 << 17))


def words(rng: random.Random, length: int) -> str:
    """Returns a random text."""
    start = rng.randrange(len(LETTERS) - length)
    return LETTERS[start : start + length]


@dataclass
class LocalView:
    """Takes the place of a KvEventsView without sockets."""

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

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.pages)

    def publish_events(self) -> None:
        """Lets the router follow this worker's KV events."""
        blocks = KnownBlocks()

        def on_change(change: CacheChange) -> None:
            hashes = [event_hash(page_hash) for page_hash in change.hashes]
            if isinstance(change, PagesStored):
                blocks.store(hashes, "CPU_TIER1")
            else:
                blocks.remove(hashes, "CPU_TIER1")

        self.cache.on_change = on_change
        self.routed.kv_events = cast(Any, LocalView(blocks))

    def serve(self, tokens: list[int], answer: list[int], salt: str = "") -> int:
        """Serves one request to its end, and returns how many tokens of its prompt were cached."""
        hashes: list[bytes] = []
        HASHER.extend(hashes, tokens, salt)
        used = self.cache.find(hashes[: (len(tokens) - 1) // PAGE_ROWS])
        cached_tokens = len(used) * PAGE_ROWS
        self.cache.use(used)
        context = tokens + answer
        HASHER.extend(hashes, context, salt)
        own = self.cache.allocate(len(hashes) - len(used))
        assert own is not None, "one request must fit"
        pages = [page.page for page in used] + own
        self.cache.publish(used, pages, hashes, context[: len(hashes) * PAGE_ROWS])
        owned = {page.page for page in used}
        self.cache.release([page for page in own if page not in owned])
        self.cache.stop_using(used)
        assert self.routed.state is not None
        self.routed.state.stored_tokens = self.cache.cached * PAGE_ROWS
        return cached_tokens


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
    system_tokens: int = 1024,
    on_request: Callable[[int], None] = lambda number: None,
) -> HitRate:
    """Sends the turns of many sessions through the choice of workers, `at_once` of them in flight."""
    system = {"role": "system", "content": words(rng, 4 * system_tokens)}
    waiting = [Session(random.Random(rng.random()), [dict(system)]) for _ in range(sessions)]
    left = {id(session): turns for session in waiting}
    last: dict[int, str] = {}
    rate = HitRate()
    in_flight: deque[tuple[Session, Any]] = deque()
    number = 0
    while waiting or in_flight:
        if not waiting or len(in_flight) >= at_once:
            session, load = in_flight.popleft()
            load.__exit__(None, None, None)
            if left[id(session)]:
                waiting.append(session)
            continue
        on_request(number)
        number += 1
        session = waiting.pop(rng.randrange(len(waiting)))
        left[id(session)] -= 1
        body, text = session.next_body()
        prompt = PromptPrefixes.of(PATH, body)
        choice = fleet.choose("decode", (), prompt)
        chosen = choice.worker
        load = chosen.in_flight(len(body) // 4, choice.cached_tokens)
        load.__enter__()
        fleet.prefixes.record_sent(prompt, chosen)
        tokens = tokens_of(text)
        rate.prompt_tokens += len(tokens)
        rate.cached_tokens += workers[chosen.url].serve(tokens, tokens_of(session.answer()))
        rate.moves += last.get(id(session), chosen.url) != chosen.url
        last[id(session)] = chosen.url
        if chosen.kv_events is not None:
            fleet.prefixes.record_pages(prompt, parse_page_marks(page_marks_header(tokens, "", HASHER)))
        in_flight.append((session, load))
    return rate


def in_loop(test: Callable[[Fleet], Any]) -> Any:
    """Runs `test` with a fleet whose health checks never start, because the event loop never gets control."""

    async def run() -> Any:
        fleet = Fleet(cast(Any, None), 1.0)
        try:
            return test(fleet)
        finally:
            await fleet.close()

    return asyncio.run(run())
