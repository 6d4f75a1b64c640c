"""The interfaces through which an engine meets `hotset/fleet`, and the values that cross them.

The core imports nothing of `hotset/fleet`. `connections.py` loads it, and only for an engine whose configuration asks
for it. This module imports neither torch nor the rest of the engine, so that both sides can import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotset.base.address import Address, EventsEndpoint
from hotset.base.metric import counter, gauge, labelled_counter
from hotset.schedule.plan import Plan


class Messages(Protocol):
    """One end of a connection that carries messages. A `Connection` of `multiprocessing` is one.

    Its methods raise OSError or EOFError if the process at the other end has ended.
    """

    def send(self, obj: Any) -> None: ...

    def recv(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Throughput:
    """The bytes of all successful lists of writes, and the seconds during which at least one list was in flight."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """The measured speed of writes from one kind of memory at a prefill worker to one kind at a decode worker."""

    source: str  # 'host' or 'device'
    target: str  # 'host' or 'device'
    gb_per_s: float  # of one large write
    seconds_per_write: float  # the fixed cost of a write, in addition to its bytes


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """The state of the handoffs of one worker, and totals since its start."""

    num_open: int = gauge("hotset_handoffs_open", "Handoffs in progress.")
    num_peers: int = gauge("hotset_handoff_peers", "Peers on which a handoff depends.")
    ring_quarantined_bytes: int = gauge(
        "hotset_staging_bytes_quarantined", "Bytes of the staging ring that a lost peer may still write."
    )
    nbytes: int = counter(
        "hotset_handoff_bytes", "Bytes of KV received from prefill workers or sent to decode workers."
    )
    num_retransmits: int = counter("hotset_handoff_messages_retransmitted", "Control messages that were retransmitted.")
    num_pieces: int = counter("hotset_staging_pieces", "Pieces of KV packed into or unpacked from the staging ring.")
    outcomes: Mapping[str, int] = field(
        default_factory=dict, metadata=labelled_counter("hotset_handoffs", "Finished handoffs by outcome.", "outcome")
    )
    phase_seconds: Mapping[str, float] = field(
        default_factory=dict,
        metadata=labelled_counter(
            "hotset_handoff_phase_seconds", "Total time that handoffs have spent in each phase.", "phase"
        ),
    )
    dropped: Mapping[str, int] = field(
        default_factory=dict,
        metadata=labelled_counter("hotset_handoff_messages_dropped", "Dropped control messages by cause.", "cause"),
    )
    throughput: Throughput | None = None  # None at a decode worker, which writes nothing
    routes: Mapping[str, tuple[Route, ...]] = field(default_factory=dict)  # as measured when each peer connected


class HandoffEndpoint(Protocol):
    """The interface through which the step loop takes part in handoffs."""

    @property
    def address(self) -> str:
        """The address at which peers reach this engine."""

    @property
    def listens_on(self) -> Address:
        """The address on which this process listens for peers."""

    def poll(self) -> None:
        """Passes messages between the agent and the schedulers, in both directions. The step loop calls it before it
        plans."""

    def on_submitted(self, step: Sequence[Plan | None]) -> None:
        """Passes the announcements of the step's plans to the agent: rows that were computed for peers, and first
        tokens. The step loop calls it after submitting the step."""

    @property
    def waiting_for_copies(self) -> bool:
        """Whether a request to a peer waits for copies to the host, which `poll` checks."""

    def stats(self) -> HandoffStats: ...

    def audit(self) -> None: ...

    def close(self, drain_seconds: float) -> None:
        """Starts no more handoffs, waits up to `drain_seconds` for open ones, notifies peers, then closes the transfer
        engine. All waits after the drain take at most `progress.ENDPOINT_SECONDS`. If a handoff has not ended when
        `close` returns, it may still read or write this engine's memory.

        Another thread may call `poll` and `on_submitted` meanwhile. A second call of `close` cuts the drain short.
        """


class CachePublisher(Protocol):
    """Publishes the changes of one replica's prefix cache as KV events. No method waits for subscribers."""

    @property
    def endpoint(self) -> EventsEndpoint:
        """Where subscribers connect."""

    def flush(self) -> None:
        """Publishes the changes since the last call."""

    def close(self) -> None: ...
