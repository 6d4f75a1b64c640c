"""The engine's end of handoffs: what its scheduler decides goes to the agent, what the agent reports to the scheduler.

A decode worker reserves pages and has them filled; a prefill worker computes prompts for others and announces rows as
they reach its host store. Nothing here waits.
"""

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hotset.base.config import EngineConfig
from hotset.engine.intake import ModelCard
from hotset.handoff.agent import HandoffAgent, HandoffStats, open_channel
from hotset.handoff.messages import (
    Ask,
    Calm,
    Drop,
    Fetch,
    GiveUp,
    Hello,
    Key,
    Landed,
    Landing,
    Lost,
    Model,
    NotComputed,
    Prefill,
    Sampled,
    Span,
    Store,
    Written,
)
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.schedule.plan import FirstToken, Plan, Reservation, Rows, Withdrawal
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.coordinator import Coordinator
from hotset.transfer.api import Event, Memory, Region, Transfer

LOGGER = logging.getLogger("hotset.engine")


class Port(Protocol):
    """What the step loop does about handoffs."""

    def exchange(self) -> None:
        """Passes on what there is to pass on, both ways. Between steps."""

    def submitted(self, plan: Plan) -> None:
        """This plan has been handed to the device."""

    def stats(self) -> HandoffStats: ...

    def audit(self) -> None: ...

    def close(self, drain_seconds: float) -> None:
        """Begins nothing more; finishes what is open for so long at most, tells peers, and then waits until nothing is
        written any more here or read. `exchange` and `submitted` may be called meanwhile; `close` too: it hurries."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A reservation whose host pages the device may still be writing for somebody else."""

    reservation: Reservation
    after: Event | None


class DecodePort:
    def __init__(self, agent: HandoffAgent, transfer: Transfer, scheduler: Scheduler, memory: Coordinator) -> None:
        self._agent, self._transfer, self._scheduler, self._memory = agent, transfer, scheduler, memory
        self._held: list[_Held] = []
        self._prefix = f"{secrets.token_hex(4)}:"  # a worker that comes back asks under other names

    def exchange(self) -> None:
        scheduler = self._scheduler
        for fact in self._agent.facts():
            assert isinstance(fact, Landed | Lost | Calm), f"a decode worker is told {fact}"
            name, attempt = fact.key.request_id.removeprefix(self._prefix), fact.key.attempt
            match fact:
                case Landed(_, token_id, alternatives):
                    scheduler.landed(name, attempt, token_id, alternatives)
                case Lost(_, quiesced, retry, reason):
                    wanted = scheduler.lost(name, attempt, quiesced=quiesced, retry=retry, reason=reason)
                    level = logging.WARNING if wanted or not quiesced else logging.DEBUG
                    LOGGER.log(level, "%s did not arrive, attempt %d: %s", name, attempt, reason)
                case Calm():
                    scheduler.calm(name, attempt)
        for outgoing in scheduler.take_outgoing():
            if isinstance(outgoing, Reservation):
                self._held.append(_Held(outgoing, self._memory.stored()))
            else:
                self._withdraw(outgoing)
        ready = [held for held in self._held if held.after is None or held.after.query()]
        self._held = [held for held in self._held if held not in ready]
        for held in ready:
            self._agent.put(self._fetch(held.reservation))

    def submitted(self, plan: Plan) -> None:
        """A decode worker computes for nobody else."""
        assert not plan.sent, "a prompt for a peer, at a decode worker"

    def stats(self) -> HandoffStats:
        return self._agent.stats()

    def audit(self) -> None:
        self._agent.audit()

    def close(self, drain_seconds: float) -> None:
        self._agent.close(drain_seconds)
        self._transfer.close()

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        name, attempt = withdrawal.request_id, withdrawal.attempt
        for held in self._held:
            if (held.reservation.request_id, held.reservation.attempt) == (name, attempt):
                self._held.remove(held)
                self._scheduler.lost(name, attempt, quiesced=True, retry=False)
                return
        self._agent.put(GiveUp(Key(self._prefix + name, attempt)))

    def _fetch(self, reservation: Reservation) -> Fetch:
        ask = Ask(
            Key(self._prefix + reservation.request_id, reservation.attempt),
            reservation.token_ids,
            reservation.params,
            "device" if reservation.on_device else "host",
            reservation.row_pages,
            reservation.key_pages,
            tuple(sorted(reservation.stop_ids)),
        )
        return Fetch(reservation.prefill_at, ask)


class PrefillPort:
    def __init__(
        self, agent: HandoffAgent, transfer: Transfer, scheduler: Scheduler, memory: Coordinator, card: ModelCard
    ) -> None:
        self._agent, self._transfer, self._scheduler, self._memory = agent, transfer, scheduler, memory
        self._card = card
        self._asked: dict[str, Prefill] = {}
        self._named: dict[tuple[str, Key], str] = {}  # what is asked now: its name as a request
        self._serials = itertools.count()

    def exchange(self) -> None:
        for fact in self._agent.facts():
            match fact:
                case Prefill():
                    self._begin(fact)
                case Drop(peer, key):
                    name = self._named.pop((peer, key), None)
                    if name is not None:
                        del self._asked[name]
                        self._scheduler.drop(name)

    def submitted(self, plan: Plan) -> None:
        after = self._memory.stored() if plan.sent else None
        for sent in plan.sent:
            asked = self._asked[sent.request_id]
            match sent:
                case Rows(_, first, last, pages):
                    self._agent.put(Written(asked.peer, asked.key, first, last, pages, after))
                case FirstToken(_, token_id, alternatives):
                    self._agent.put(Sampled(asked.peer, asked.key, token_id, alternatives))

    def stats(self) -> HandoffStats:
        return self._agent.stats()

    def audit(self) -> None:
        self._agent.audit()

    def close(self, drain_seconds: float) -> None:
        self._agent.close(drain_seconds)
        self._transfer.close()

    def _begin(self, asked: Prefill) -> None:
        refusal = self._refusal(asked)
        if refusal is not None:
            LOGGER.warning("refused to compute %s for %s: %s", asked.key.request_id, asked.peer, refusal)
            self._agent.put(NotComputed(asked.peer, asked.key, retry=False, reason=refusal))
            return
        # A peer may come back and ask by the same key while plans in flight still know the request before.
        name = f"{asked.peer} {asked.key.request_id} {asked.key.attempt} #{next(self._serials)}"
        self._named[asked.peer, asked.key] = name
        self._asked[name] = asked
        length = len(asked.token_ids) + 1
        stops = frozenset(asked.stop_ids)
        self._scheduler.add(Request(name, list(asked.token_ids), asked.params, stops, length, for_peer=True))

    def _refusal(self, asked: Prefill) -> str | None:
        longest, vocab = self._card.max_model_len - 1, self._card.vocab
        if not 0 < len(asked.token_ids) <= longest:
            return f"a prompt of {len(asked.token_ids)} tokens, where this worker computes 1 to {longest}"
        if not all(
            0 <= token < vocab for token in (*asked.token_ids, *asked.stop_ids, *(asked.params.logit_bias or ()))
        ):
            return f"a token id outside this worker's vocabulary of {vocab}"
        if asked.params.seed is None:
            return "no seed: whoever goes on with the answer must sample as this worker does"
        return None


def make_port(
    config: EngineConfig,
    model: Model,
    scheduler: Scheduler,
    memory: Coordinator,
    card: ModelCard,
    transfer: Transfer,
    wake: Callable[[], None],
) -> tuple[Port, str]:
    """The port of a prefill or decode worker, and the address at which its peers reach it. It owns `transfer`.
    StartupError if the control port cannot be bound or memory not be registered."""
    prefill = config.role == "prefill"
    try:
        for region in regions(memory, landing=not prefill):
            transfer.register(region)
        channel = open_channel(config.control, secret=config.handoff_secret, advertise=config.advertise)
    except BaseException:
        transfer.close()
        raise
    try:
        stores: dict[Landing, Store] = {"host": host_store(memory)} if prefill else landing_stores(memory)
        hello = Hello(channel.address, model, stores, transfer.name, transfer.describe())
        machine = Sender(stores["host"]) if prefill else Receiver()
        agent = HandoffAgent(machine, hello, channel, transfer, wake=wake)
        agent.start()
    except BaseException:
        channel.close()
        transfer.close()
        raise
    if prefill:
        return PrefillPort(agent, transfer, scheduler, memory, card), channel.address
    return DecodePort(agent, transfer, scheduler, memory), channel.address


def landing_stores(memory: Coordinator) -> dict[Landing, Store]:
    """Where contexts may land: rows on the host or on the device, index keys on the device either way."""
    pool, geometry = memory.pool, memory.pool.geometry
    row_bytes = pool.shape.row.stride_bytes
    on_device = Span(
        tuple((layer.data_ptr(),) for layer in pool.bytes),
        geometry.part_bytes,
        geometry.page_rows,
        geometry.page_rows,
        row_bytes,
    )
    keys = None
    if pool.shape.key is not None:
        assert pool.key_blocks is not None
        parts = range(pool.shape.key_parts)
        bases = tuple(tuple(pool.bytes[first + part].data_ptr() for part in parts) for first in pool.shape.key_layers)
        stride = pool.shape.key.stride_bytes
        keys = Span(bases, geometry.part_bytes, geometry.keys_per_page, pool.key_blocks.shape[2], stride)
    stores: dict[Landing, Store] = {"device": Store(on_device, keys)}
    if memory.host is not None:
        stores["host"] = Store(host_store(memory).rows, keys)
    return stores


def host_store(memory: Coordinator) -> Store:
    """Rows and index keys as they lie in the host store."""
    host, shape = memory.host, memory.pool.shape
    assert host is not None, "there is no host store"

    def span(tensor: "list[int]", stride: int) -> Span:
        bases = tuple((address,) for address in tensor)
        return Span(bases, host.page_rows * stride, host.page_rows, host.page_rows, stride)

    keys = None
    if host.keys is not None and shape.key is not None:
        keys = span([group.data_ptr() for group in host.keys], shape.key.stride_bytes)
    return Store(span([layer.data_ptr() for layer in host.rows], shape.row.stride_bytes), keys)


def regions(memory: Coordinator, *, landing: bool) -> list[Region]:
    """What a transfer engine must know: the host store, which prefill workers send from; and the device pool, where
    peers' contexts are `landing` here."""
    pool, host = memory.pool, memory.host
    stored = () if host is None else (host.rows, host.keys)
    found = [Region(tensor.data_ptr(), tensor.nbytes) for tensor in stored if tensor is not None]
    if landing:
        kind = Memory.DEVICE if pool.device.type == "cuda" else Memory.HOST
        found.append(Region(pool.bytes.data_ptr(), pool.bytes.nbytes, kind, pool.device.index or 0))
    return found
