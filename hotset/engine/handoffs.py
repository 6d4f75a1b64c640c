"""The engine's end of handoffs: what its scheduler decides goes to the agent, what the agent reports to the scheduler.

A decode worker reserves pages and has them filled; a prefill worker computes prompts for others and announces rows as
they reach its host store. Nothing here waits.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotset.base.config import EngineConfig
from hotset.base.units import MIB
from hotset.engine.input_processor import ModelCard
from hotset.engine.stores import host_landing, landing_stores, regions, stores_of_host
from hotset.engine.workers.executor import Executor, Step
from hotset.handoff.agent import HandoffAgent, HandoffStats, open_channel
from hotset.handoff.messages import (
    CancelFetch,
    Fetch,
    FetchFailed,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    Landing,
    ModelIdentity,
    PrefillFailed,
    Quiesced,
    ReleasePages,
    RowsComputed,
    StartPrefill,
    Store,
)
from hotset.handoff.packing import StagingMemory
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import ReceiverStaging, check_staging
from hotset.schedule.plan import PromptComputed, Reservation, RowsWritten, Withdrawal
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import LandingPolicy
from hotset.transfer.api import DeviceEvent, Transfer
from hotset.transfer.engines import prefer_few_writes

LOGGER = logging.getLogger("hotset.engine")


class HandoffEndpoint(Protocol):
    """What the step loop does about handoffs."""

    def exchange(self) -> None:
        """Passes on what there is to pass on, both ways. Between steps."""

    def submitted(self, step: Step) -> None:
        """These plans have been handed to the workers."""

    def stats(self) -> HandoffStats: ...

    def audit(self) -> None: ...

    def close(self, drain_seconds: float) -> None:
        """Begins nothing more; finishes what is open for so long at most, tells peers, and then waits until nothing is
        written any more here or read. `exchange` and `submitted` may be called meanwhile; `close` too: it hurries."""


@dataclass(frozen=True, slots=True)
class TransferResources:
    """What KV travels by, and the memory that it may travel through."""

    transfer: Transfer
    staging: StagingMemory | None


@dataclass(frozen=True, slots=True)
class _Held:
    """A reservation whose host pages the device may still be writing for somebody else."""

    replica: int
    reservation: Reservation
    after: DeviceEvent | None


class DecodeEndpoint:
    def __init__(
        self, agent: HandoffAgent, moved_by: TransferResources, schedulers: Sequence[Scheduler], executor: Executor
    ) -> None:
        self._agent, self._moved_by, self._schedulers, self._executor = agent, moved_by, schedulers, executor
        self._held: list[_Held] = []
        self._prefix = secrets.token_hex(4)  # a worker that comes back asks under other names

    def exchange(self) -> None:
        for event in self._agent.take_events():
            assert isinstance(event, Landed | FetchFailed | Quiesced), f"a decode worker received {event}"
            _, at, name = event.key.request_id.split(":", 2)
            scheduler, attempt = self._schedulers[int(at)], event.key.attempt
            match event:
                case Landed(_, token_id, alternatives):
                    scheduler.complete_landing(name, attempt, token_id, alternatives)
                case FetchFailed(_, quiesced, retry, reason):
                    wanted = scheduler.fail_landing(name, attempt, quiesced=quiesced, retry=retry, reason=reason)
                    level = logging.WARNING if wanted or not quiesced else logging.DEBUG
                    LOGGER.log(level, "%s did not arrive, attempt %d: %s", name, attempt, reason)
                case Quiesced():
                    scheduler.end_quarantine(name, attempt)
        for replica, scheduler in enumerate(self._schedulers):
            for outgoing in scheduler.take_landing_updates():
                if isinstance(outgoing, Reservation):
                    self._held.append(_Held(replica, outgoing, self._executor.mirrored_event()))
                else:
                    self._withdraw(replica, outgoing)
        ready = [held for held in self._held if held.after is None or held.after.query()]
        self._held = [held for held in self._held if held not in ready]
        for held in ready:
            self._agent.put(self._fetch(held.replica, held.reservation))

    def submitted(self, step: Step) -> None:
        """A decode worker computes for nobody else."""
        assert not any(plan.announcements for plan in step if plan is not None), (
            "a decode worker computed a prompt for a peer"
        )

    def stats(self) -> HandoffStats:
        return self._agent.stats()

    def audit(self) -> None:
        self._agent.audit()

    def close(self, drain_seconds: float) -> None:
        self._agent.close(drain_seconds)
        self._moved_by.transfer.close()

    def _withdraw(self, replica: int, withdrawal: Withdrawal) -> None:
        name, attempt = withdrawal.request_id, withdrawal.attempt
        for held in self._held:
            if (held.reservation.request_id, held.reservation.attempt) == (name, attempt):
                self._held.remove(held)
                self._schedulers[replica].fail_landing(name, attempt, quiesced=True, retry=False)
                return
        self._agent.put(CancelFetch(self._key(replica, name, attempt)))

    def _fetch(self, replica: int, reservation: Reservation) -> Fetch:
        ask = HandoffRequest(
            key=self._key(replica, reservation.request_id, reservation.attempt),
            prompt=reservation.prompt,
            landing="device" if reservation.on_device else host_landing(replica),
            row_pages=reservation.row_pages,
            key_pages=reservation.key_pages,
        )
        return Fetch(reservation.prefill_at, ask)

    def _key(self, replica: int, name: str, attempt: int) -> HandoffKey:
        return HandoffKey(f"{self._prefix}:{replica}:{name}", attempt)


class PrefillEndpoint:
    def __init__(
        self,
        agent: HandoffAgent,
        moved_by: TransferResources,
        scheduler: Scheduler,
        executor: Executor,
        card: ModelCard,
    ) -> None:
        self._agent, self._moved_by, self._scheduler, self._executor = agent, moved_by, scheduler, executor
        self._card = card
        self._asked: dict[str, StartPrefill] = {}
        self._named: dict[tuple[str, HandoffKey], str] = {}  # what is asked now: its name as a request
        self._serials = itertools.count()

    def exchange(self) -> None:
        for event in self._agent.take_events():
            match event:
                case StartPrefill():
                    self._begin(event)
                case ReleasePages(peer, key):
                    name = self._named.pop((peer, key), None)
                    if name is not None:
                        del self._asked[name]
                        self._scheduler.drop_prompt(name)

    def submitted(self, step: Step) -> None:
        (plan,) = step
        assert plan is not None, "a step without a plan"
        after = self._executor.mirrored_event() if plan.announcements else None
        for announcement in plan.announcements:
            asked = self._asked[announcement.request_id]
            match announcement:
                case RowsWritten(_, first, last, pages):
                    self._agent.put(RowsComputed(asked.peer, asked.key, first, last, pages, after))
                case PromptComputed(_, token_id, alternatives):
                    self._agent.put(FirstTokenSampled(asked.peer, asked.key, token_id, alternatives))

    def stats(self) -> HandoffStats:
        return self._agent.stats()

    def audit(self) -> None:
        self._agent.audit()

    def close(self, drain_seconds: float) -> None:
        self._agent.close(drain_seconds)
        self._moved_by.transfer.close()

    def _begin(self, asked: StartPrefill) -> None:
        refusal = self._refusal(asked)
        if refusal is not None:
            LOGGER.warning("refused to compute %s for %s: %s", asked.key.request_id, asked.peer, refusal)
            self._agent.put(PrefillFailed(asked.peer, asked.key, retry=False, reason=refusal))
            return
        # A peer may come back and ask by the same key while plans in flight still know the request before.
        name = f"{asked.peer} {asked.key.request_id} {asked.key.attempt} #{next(self._serials)}"
        self._named[asked.peer, asked.key] = name
        self._asked[name] = asked
        self._scheduler.add(Request(name, asked.prompt, max_length=len(asked.prompt) + 1, for_peer=True))

    def _refusal(self, asked: StartPrefill) -> str | None:
        prompt, longest, vocab = asked.prompt, self._card.max_model_len - 1, self._card.vocab
        if not 0 < len(prompt) <= longest:
            return f"a prompt of {len(prompt)} tokens, where this worker computes 1 to {longest}"
        token_ids = (*prompt.token_ids, *prompt.stop_ids, *(prompt.params.logit_bias or ()))
        if not all(0 <= token < vocab for token in token_ids):
            return f"a token id outside this worker's vocabulary of {vocab}"
        if prompt.params.seed is None:
            return "no seed: whoever goes on with the answer must sample as this worker does"
        return None


def landing_policy(config: EngineConfig) -> LandingPolicy:
    """Peers can write to device memory only if it belongs to the engine's own process, that is, with one worker."""
    on_device = config.workers == 1
    few_writes = prefer_few_writes(config.transfer, config.transfer_protocol)
    return LandingPolicy(on_device, keys_on_host=few_writes or not on_device)


def open_endpoint(
    config: EngineConfig,
    model: ModelIdentity,
    schedulers: Sequence[Scheduler],
    executor: Executor,
    card: ModelCard,
    transfer: Transfer,
    wake: Callable[[], None],
) -> tuple[HandoffEndpoint, str]:
    """The port of a prefill or decode worker, and the address at which its peers reach it. It owns `transfer`.
    StartupError if the control port cannot be bound or memory not be registered."""
    prefill = config.role == "prefill"
    hosts, pool = executor.hosts(), None if prefill else executor.pool
    stores = landing_stores(hosts, pool, card.landing)
    try:
        staging = _staging(config, stores)
        for region in [*regions(hosts, pool), *([] if staging is None else [staging.region])]:
            transfer.register(region)
        channel = open_channel(config.control, secret=config.handoff_secret, advertise=config.advertise)
    except BaseException:
        transfer.close()
        raise
    try:
        ring = None if prefill or staging is None else staging.memory_range
        hello = Hello(channel.address, model, stores, transfer.name, transfer.describe(), ring)
        machine: Sender | Receiver
        if prefill:
            machine = Sender(stores[host_landing(0)], buffers=() if staging is None else staging.buffers)
        else:
            within_reach = stores_of_host(stores, pool)
            machine = Receiver(staging=None if ring is None else ReceiverStaging(ring, within_reach))
        agent = HandoffAgent(machine, hello, channel, transfer, wake=wake)
        agent.start()
    except BaseException:
        channel.close()
        transfer.close()
        raise
    if prefill:
        return PrefillEndpoint(
            agent, TransferResources(transfer, staging), schedulers[0], executor, card
        ), channel.address
    return DecodeEndpoint(agent, TransferResources(transfer, staging), schedulers, executor), channel.address


def _staging(config: EngineConfig, stores: Mapping[Landing, Store]) -> StagingMemory | None:
    """ConfigError if it could carry nothing."""
    if not config.staging_mib:
        return None
    for store in stores.values():
        check_staging(config.staging_mib * MIB, store)
    return StagingMemory(config.staging_mib * MIB)
