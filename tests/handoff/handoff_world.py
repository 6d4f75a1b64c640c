"""Workers in one process with real sockets between them, and a channel that loses and delays messages."""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from handoff_engines import DecodeEngine, Memory, PrefillEngine

from hotset.handoff.agent import ControlChannel
from hotset.handoff.channel import Channel
from hotset.handoff.codec import Codec
from hotset.handoff.messages import ChannelEvent, Envelope, Message
from hotset.transfer.api import Transfer
from hotset.transfer.loopback import Hub, Loopback

OURS = "127.0.0.1:1"


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + index * 17) % 500 for index in range(length)]


class FaultyPost:
    """A channel that loses, duplicates or delays messages by kind."""

    def __init__(self, inner: ControlChannel, seed: int = 0) -> None:
        self.inner, self.address = inner, inner.address
        self.lose: dict[str, int] = {}  # how many messages of this kind will still be lost
        self.twice: set[str] = set()
        self.late: dict[str, float] = {}  # the longest delay of messages of this kind, in seconds
        self.sent: list[str] = []
        self._random = random.Random(seed)
        self._held: list[tuple[float, str, Message]] = []

    @property
    def dropped(self) -> Any:
        return self.inner.dropped

    def send(self, peer: str, message: Message) -> None:
        kind = type(message).__name__
        self.sent.append(kind)
        if self.lose.get(kind, 0) > 0:
            self.lose[kind] -= 1
            return
        for _ in range(2 if kind in self.twice else 1):
            if kind in self.late:
                self._held.append((time.monotonic() + self._random.uniform(0, self.late[kind]), peer, message))
            else:
                self.inner.send(peer, message)

    def receive(self) -> list[ChannelEvent]:
        now = time.monotonic()
        due = sorted((each for each in self._held if each[0] <= now), key=lambda each: each[0])
        self._held = [each for each in self._held if each[0] > now]
        for _, peer, message in due:
            self.inner.send(peer, message)
        return self.inner.receive()

    def wait(self, seconds: float) -> None:
        next_due = min((each[0] for each in self._held), default=float("inf")) - time.monotonic()
        self.inner.wait(max(0.0, min(seconds, next_due)))

    def wake(self) -> None:
        self.inner.wake()

    def forget(self, peer: str) -> None:
        self.inner.forget(peer)

    def close(self, linger_s: float = 0.2) -> None:
        self.inner.close(linger_s)


@dataclass
class World:
    """Workers in this process, over one hub."""

    hub: Hub = field(default_factory=lambda: Hub(threaded=True))
    engines: list[DecodeEngine | PrefillEngine] = field(default_factory=list)

    def decode(
        self, channel: ControlChannel | None = None, pages: int = 64, ranks: int = 1, **rest: Any
    ) -> DecodeEngine:
        memory = Memory(pages, 8, ranks=ranks)
        engine = DecodeEngine(memory, channel or Channel("127.0.0.1:0"), Loopback(self.hub), **rest)
        self.engines.append(engine)
        return engine

    def prefill(
        self, channel: ControlChannel | None = None, transfer: Transfer | None = None, ranks: int = 1, **rest: Any
    ) -> PrefillEngine:
        channel, transfer = channel or Channel("127.0.0.1:0"), transfer or Loopback(self.hub)
        engine = PrefillEngine(Memory(32, 16, ranks=ranks), channel, transfer, **rest)
        self.engines.append(engine)
        return engine

    def settled(self) -> bool:
        """Waits until no handoff is open, and all engines have released their pages."""
        for engine in self.engines:
            if engine.agent.stats().num_open or (isinstance(engine, PrefillEngine) and engine.held):
                return False
        return True

    def audit(self) -> None:
        for engine in self.engines:
            engine.audit()


@contextmanager
def worlds() -> Iterator[World]:
    """Yields a world and closes it at the end. Its engines must be alive by then."""
    made = World()
    try:
        yield made
    finally:
        for engine in made.engines:
            engine.close()
        made.hub.close()
    for engine in made.engines:
        assert engine.died is None, engine.died


class Dictated:
    """A channel whose incoming messages the test supplies."""

    def __init__(self) -> None:
        self.address = OURS
        self.dropped: Mapping[str, int] = {}
        self.coming: list[ChannelEvent] = []
        self.said: list[Message] = []

    def send(self, peer: str, message: Message) -> None:
        self.said.append(message)
        envelope = Envelope(OURS, "ab", "cd", message)
        assert Codec().decode(Codec().encode(envelope)) == envelope, "what an agent says must be a message"

    def receive(self) -> list[ChannelEvent]:
        events, self.coming = self.coming, []
        return events

    def wait(self, seconds: float) -> None: ...
    def wake(self) -> None: ...
    def forget(self, peer: str) -> None: ...
    def close(self, linger_s: float = 0.2) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
