"""What comes by the control channel, and what a channel does. Free of the packages that the real one needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hotset.handoff.messages import Message


@dataclass(frozen=True, slots=True)
class Letter:
    """A message, who sent it and for whom it is."""

    origin: str  # the control address at which its sender listens
    sender: str  # its incarnation: drawn anew whenever a process starts
    addressee: str  # the incarnation that it is for; empty: whoever listens there now
    message: Message


@dataclass(frozen=True, slots=True)
class Foreign:
    """A message in another version of the protocol: its sender can be refused, and no more."""

    origin: str
    sender: str
    protocol: int
    kind: str


@dataclass(frozen=True, slots=True)
class Arrival:
    peer: str  # its control address
    message: Message


@dataclass(frozen=True, slots=True)
class Restarted:
    """The process at this address is another one than before."""

    peer: str


PostEvent = Arrival | Restarted | Foreign


class Post(Protocol):
    """One process's end of the control channel. All calls but `wake` come from one thread at a time.

    Nothing waits for a peer and nothing is promised: what cannot be queued is dropped, and whoever needs an answer asks
    again.
    """

    address: str  # at which peers reach this process: `host:port`

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages, by cause."""

    def send(self, peer: str, message: Message) -> None:
        """Queues it for the incarnation heard last at this address; questions of who is there go to any."""

    def receive(self) -> list[PostEvent]:
        """What has come, in its order, a limited number at a time. Never waits."""

    def wait(self, seconds: float) -> None:
        """Until something has come, somebody called `wake`, or so long."""

    def wake(self) -> None:
        """Ends the `wait` of the owner, now or the next. From any thread, at any time."""

    def forget(self, peer: str) -> None:
        """Drops what is queued for it, and its incarnation."""

    def close(self, last_words_s: float = 0.2) -> None:
        """Gives messages just sent so long to leave, then closes. Idempotent."""
