"""Workers in one process with real sockets between them, and channels for tests: one with faults, one scripted."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from handoff_engines import DecodeEngine, PrefillEngine, make_memory
from loopback import Hub, Loopback
from processes import fork_server
from waiting import WAIT_SECONDS

from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.codec import Codec
from hotset.fleet.handoff.messages import ChannelEvent, Envelope, Message
from hotset.fleet.transfer.api import Transfer

OWN_ADDRESS = "127.0.0.1:1"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns deterministic token ids."""
    return [(seed * 131 + index * 17) % 500 for index in range(length)]


class FaultyChannel:
    """A channel that loses, duplicates or delays outgoing messages. Each fault is set by the name of a message type."""

    def __init__(self, inner: Channel, seed: int = 0) -> None:
        self.inner, self.address, self.listens_on = inner, inner.address, inner.listens_on
        self.lose: dict[str, int] = {}  # the number of further messages of each type that will be lost
        self.duplicate: set[str] = set()  # types whose messages are sent twice, unless they are lost
        self.max_delay: dict[str, float] = {}  # seconds, by type; each message gets a random delay up to this limit
        self.sent: list[str] = []  # the type of every message passed to `send`, including lost ones
        self._random = random.Random(seed)
        self._delayed: list[tuple[float, str, Message]] = []

    @property
    def dropped(self) -> Any:
        return self.inner.dropped

    def send(self, peer: str, message: Message) -> None:
        kind = type(message).__name__
        self.sent.append(kind)
        if self.lose.get(kind, 0) > 0:
            self.lose[kind] -= 1
            return
        for _ in range(2 if kind in self.duplicate else 1):
            if kind in self.max_delay:
                self._delayed.append((time.monotonic() + self._random.uniform(0, self.max_delay[kind]), peer, message))
            else:
                self.inner.send(peer, message)

    def receive(self) -> list[ChannelEvent]:
        now = time.monotonic()
        due = sorted((entry for entry in self._delayed if entry[0] <= now), key=lambda entry: entry[0])
        self._delayed = [entry for entry in self._delayed if entry[0] > now]
        for _, peer, message in due:
            self.inner.send(peer, message)
        return self.inner.receive()

    def wait(self, seconds: float) -> None:
        next_due = min((entry[0] for entry in self._delayed), default=float("inf")) - time.monotonic()
        self.inner.wait(max(0.0, min(seconds, next_due)))

    def wake(self) -> None:
        self.inner.wake()

    def forget(self, peer: str) -> None:
        self.inner.forget(peer)

    def close(self, linger_s: float = 0.2) -> None:
        self.inner.close(linger_s)


@dataclass
class World:
    """Workers in this process, with loopback transfers over one hub."""

    hub: Hub = field(default_factory=lambda: Hub(threaded=True))
    engines: list[DecodeEngine | PrefillEngine] = field(default_factory=list)

    def decode(self, channel: Channel | None = None, pages: int = 64, ranks: int = 1, **options: Any) -> DecodeEngine:
        memory = make_memory(pages, 8, ranks=ranks)
        engine = DecodeEngine(memory, channel or Channel("127.0.0.1:0"), partial(Loopback, self.hub), **options)
        self.engines.append(engine)
        return engine

    def prefill(
        self, channel: Channel | None = None, transfer: Transfer | None = None, ranks: int = 1, **options: Any
    ) -> PrefillEngine:
        channel, chosen = channel or Channel("127.0.0.1:0"), transfer or Loopback(self.hub)
        engine = PrefillEngine(make_memory(32, 16, ranks=ranks), channel, lambda: chosen, **options)
        self.engines.append(engine)
        return engine

    def is_idle(self) -> bool:
        """Returns whether no handoff is open and all prefill engines have released their pages."""
        for engine in self.engines:
            if engine.agent.stats().num_open or (isinstance(engine, PrefillEngine) and engine.held):
                return False
        return True

    def audit(self) -> None:
        for engine in self.engines:
            engine.audit()


@contextmanager
def open_world() -> Iterator[World]:
    """Yields a world and closes it at the end. Asserts that no thread of its engines has failed."""
    world = World()
    try:
        yield world
    finally:
        for engine in world.engines:
            engine.close()
        world.hub.close()
    for engine in world.engines:
        assert engine.failure is None, engine.failure


@contextmanager
def prefill_process(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[str, Connection, int]]:
    """Runs `serve(pipe, *arguments)` in a process of its own. Yields the address that it sends first, the other end of
    the pipe, and its pid."""
    context = fork_server()
    pipe, far_end = context.Pipe()
    process = context.Process(target=serve, args=(far_end, *arguments), daemon=True)
    process.start()
    far_end.close()
    assert process.pid is not None
    try:
        assert pipe.poll(WAIT_SECONDS), "the prefill process did not start"
        yield pipe.recv(), pipe, process.pid
    finally:
        process.kill()
        process.join()
        pipe.close()


class ScriptedChannel:
    """A channel whose incoming messages the test supplies. It records the outgoing ones."""

    def __init__(self) -> None:
        self.address = OWN_ADDRESS
        self.dropped: Mapping[str, int] = {}
        self.incoming: list[ChannelEvent] = []
        self.sent: list[Message] = []

    def send(self, peer: str, message: Message) -> None:
        self.sent.append(message)
        envelope = Envelope(OWN_ADDRESS, "ab", "cd", message)
        assert Codec().decode(Codec().encode(envelope)) == envelope, f"the codec does not preserve {message}"

    def receive(self) -> list[ChannelEvent]:
        events, self.incoming = self.incoming, []
        return events

    def wait(self, seconds: float) -> None: ...
    def wake(self) -> None: ...
    def forget(self, peer: str) -> None: ...
    def close(self, linger_s: float = 0.2) -> None: ...
