"""The engine's end of handoffs: passes messages between its schedulers and the handoff agent.

A decode worker reserves pages and requests KV from prefill workers. A prefill worker computes prompts for decode
workers. It announces ranges of computed rows, each with an event that occurs when the rows are in the prefill worker's
host store. Only the method `close` waits for peers or the device.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from hotset.base.address import Address, control_port
from hotset.base.config import EngineConfig
from hotset.base.errors import InternalError
from hotset.base.processes import this_process
from hotset.base.sampling import PromptSpec
from hotset.base.units import MIB
from hotset.engine.input_processor import ModelCard, all_in_vocabulary
from hotset.engine.ports import HandoffEndpoint, HandoffStats
from hotset.engine.workers.executor import Executor, Step
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import HandoffAgent, open_channel
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.messages import Hello
from hotset.fleet.handoff.packing import EngineCopies
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.routes import PROBE_BYTES, show_routes
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging, check_staging
from hotset.fleet.handoff.stores import (
    TransferMemory,
    TransferWorker,
    device_store_name,
    host_shards,
    host_store_name,
    landing_policy,
    landing_store_name,
    landing_stores,
    memory_devices,
    pool_shards,
    regions,
)
from hotset.fleet.handoff.worker_service import TransferService
from hotset.fleet.transfer.api import MemoryKind, Transfer
from hotset.fleet.transfer.engines import LANES, TransferSettings
from hotset.fleet.transfer.workers import RemoteTransfer, WorkerConnection, WorkerTransfers, engine_address
from hotset.schedule.handoffs import (
    CancelFetch,
    DeviceEvent,
    HandoffId,
    HandoffKey,
    PrefillFailed,
    Reservation,
    RowsComputed,
)
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import LandingPolicy

LOGGER = logging.getLogger("hotset.engine")


@dataclass(frozen=True, slots=True)
class TransferResources:
    """The transfer engine of an endpoint, and the memory that is registered with it in addition to the stores. The
    endpoint keeps both alive."""

    transfer: Transfer | Endpoints  # `Endpoints` at a decode worker
    memory: Sequence[TransferMemory]
    connections: Sequence[WorkerConnection]  # to the workers that serve transfer endpoints

    def close(self) -> None:
        self.transfer.close()
        for connection in self.connections:
            connection.close()


@dataclass(frozen=True, slots=True)
class _PendingReservation:
    """A reservation that is not announced to its peer yet, because earlier steps may still copy rows to its host pages.
    These copies have finished when `after` has occurred. If `after` is None, they had already finished."""

    replica: int
    reservation: Reservation
    after: DeviceEvent | None


class _Endpoint:
    """The part of `HandoffEndpoint` that both roles have in common."""

    def __init__(self, agent: HandoffAgent, resources: TransferResources, executor: Executor) -> None:
        self._agent, self._resources, self._executor = agent, resources, executor

    @property
    def address(self) -> str:
        return self._agent.address

    @property
    def listens_on(self) -> Address:
        return self._agent.listens_on

    def stats(self) -> HandoffStats:
        return self._agent.stats()

    def audit(self) -> None:
        self._agent.audit()

    def close(self, drain_seconds: float) -> None:
        self._agent.close(drain_seconds)
        self._resources.close()


class DecodeEndpoint(_Endpoint):
    """Implements `HandoffEndpoint` for a decode worker."""

    def __init__(
        self,
        agent: HandoffAgent,
        resources: TransferResources,
        schedulers: Sequence[Scheduler],
        executor: Executor,
        landing: LandingPolicy,
    ) -> None:
        """`landing` is the policy for prefill workers whose routes are not measured."""
        super().__init__(agent, resources, executor)
        self._schedulers, self._landing = schedulers, landing
        self._pending: list[_PendingReservation] = []
        self._prefix = secrets.token_hex(4)  # a restarted worker has another prefix, so its request ids are new

    def poll(self) -> None:
        for event in self._agent.take_events():
            if isinstance(event, msg.PeerLost):
                for scheduler in self._schedulers:
                    scheduler.fail_waiting(event.peer, event.reason)
                continue
            if isinstance(event, msg.RoutesMeasured):
                self._choose_landing(event)
                continue
            if not isinstance(event, msg.Landed | msg.FetchFailed | msg.Quiesced):
                raise InternalError(f"a decode worker received {event}")
            _, replica_number, name = event.key.request_id.split(":", 2)
            scheduler, attempt = self._schedulers[int(replica_number)], event.key.attempt
            match event:
                case msg.Landed(_, token_id, alternatives):
                    scheduler.complete_landing(name, attempt, token_id, alternatives)
                case msg.FetchFailed(_, quiesced, retry, reason):
                    was_open = scheduler.fail_landing(name, attempt, quiesced=quiesced, retry=retry, reason=reason)
                    level = logging.WARNING if was_open or not quiesced else logging.DEBUG
                    LOGGER.log(level, "the KV of %s did not arrive, attempt %d: %s", name, attempt, reason)
                case msg.Quiesced():
                    scheduler.end_quarantine(name, attempt)
        for replica, scheduler in enumerate(self._schedulers):
            for update in scheduler.take_landing_updates():
                if isinstance(update, Reservation):
                    self._pending.append(_PendingReservation(replica, update, self._executor.mirrored_event()))
                else:
                    self._cancel(replica, update.key)
        ready = [pending for pending in self._pending if pending.after is None or pending.after.query()]
        self._pending = [pending for pending in self._pending if pending not in ready]
        for pending in ready:
            self._agent.put(self._fetch(pending.replica, pending.reservation))

    def on_submitted(self, step: Step) -> None:
        if any(plan.announcements for plan in step if plan is not None):
            raise InternalError("a decode worker computed a prompt for a peer")

    @property
    def waiting_for_copies(self) -> bool:
        return bool(self._pending)

    def _choose_landing(self, measured: msg.RoutesMeasured) -> None:
        policy = landing_policy(measured.routes, self._landing)
        for scheduler in self._schedulers:
            scheduler.ledger.landing_of_peer[measured.peer] = policy
        rows = "the host" if policy.prefer_host or not policy.on_device else "the host or the device"
        keys = "the host" if policy.keys_on_host else "the device"
        text = "routes from %s: %s; rows land on %s, index keys of rows on the host on %s"
        LOGGER.info(text, measured.peer, show_routes(measured.routes), rows, keys)

    def _cancel(self, replica: int, key: HandoffKey) -> None:
        for pending in self._pending:
            if (pending.replica, pending.reservation.key) == (replica, key):
                self._pending.remove(pending)
                self._schedulers[replica].fail_landing(key.request_id, key.attempt, quiesced=True, retry=False)
                return
        self._agent.put(CancelFetch(self._key(replica, key)))

    def _fetch(self, replica: int, reservation: Reservation) -> msg.Fetch:
        request = msg.HandoffRequest(
            key=self._key(replica, reservation.key),
            prompt=reservation.prompt,
            landing=landing_store_name(replica, on_device=reservation.on_device, keys_on_host=reservation.keys_on_host),
            row_pages=reservation.row_pages,
            key_pages=reservation.key_pages,
            first=reservation.first,
        )
        return msg.Fetch(reservation.prefill_at, request)

    def _key(self, replica: int, key: HandoffKey) -> HandoffKey:
        """Returns the key that peers see for a key of this replica's scheduler."""
        return replace(key, request_id=f"{self._prefix}:{replica}:{key.request_id}")


class PrefillEndpoint(_Endpoint):
    """Implements `HandoffEndpoint` for a prefill worker."""

    def __init__(
        self,
        agent: HandoffAgent,
        resources: TransferResources,
        scheduler: Scheduler,
        executor: Executor,
        card: ModelCard,
    ) -> None:
        super().__init__(agent, resources, executor)
        self._scheduler, self._card = scheduler, card
        self._request_ids: dict[HandoffId, str] = {}  # request ids of this engine
        self._serials = itertools.count()

    def poll(self) -> None:
        for event in self._agent.take_events():
            match event:
                case msg.StartPrefill():
                    self._start(event)
                case msg.ReleasePages(peer, key):
                    name = self._request_ids.pop((peer, key), None)
                    if name is not None:
                        self._scheduler.drop_prompt(name)

    def on_submitted(self, step: Step) -> None:
        (plan,) = step
        assert plan is not None, "an engine with one replica submits no step without a plan"
        after = self._executor.mirrored_event() if plan.announcements else None
        for announcement in plan.announcements:
            if isinstance(announcement, RowsComputed):
                announcement = replace(announcement, after=after)
            self._agent.put(announcement)

    @property
    def waiting_for_copies(self) -> bool:
        return False  # the agent waits for the copies of announced rows

    def _start(self, prefill: msg.StartPrefill) -> None:
        refusal = self._refusal(prefill.prompt)
        if refusal is not None:
            LOGGER.warning("refused to compute %s for %s: %s", prefill.key.request_id, prefill.peer, refusal)
            self._agent.put(PrefillFailed(prefill.peer, prefill.key, retry=False, reason=refusal))
            return
        # A peer may reuse a key while plans in flight still contain the key's previous request, so ids have a serial.
        name = f"{prefill.peer} {prefill.key.request_id} {prefill.key.attempt} #{next(self._serials)}"
        self._request_ids[prefill.peer, prefill.key] = name
        request = Request(
            name,
            prefill.prompt,
            max_length=len(prefill.prompt) + 1,
            for_peer=(prefill.peer, prefill.key),
            stays_on_device=prefill.from_device,
        )
        self._scheduler.add(request)

    def _refusal(self, prompt: PromptSpec) -> str | None:
        """Returns why this worker cannot compute the prompt, or None if it can."""
        max_tokens, vocab = self._card.max_model_len - 1, self._card.vocab
        if not 0 < len(prompt) <= max_tokens:
            return f"the prompt has {len(prompt)} tokens, but this worker computes 1 to {max_tokens}"
        token_ids = (*prompt.token_ids, *prompt.stop_ids, *(prompt.params.logit_bias or ()))
        if not all_in_vocabulary(token_ids, vocab):
            return f"the prompt has a token id outside this worker's vocabulary of {vocab}"
        if prompt.params.seed is None:
            return "the prompt has no seed; both workers need the same seed"
        return None


def open_endpoint(
    config: EngineConfig,
    model: msg.ModelIdentity,
    schedulers: Sequence[Scheduler],
    executor: Executor,
    card: ModelCard,
    open_transfer: Callable[[TransferSettings], Transfer],
    wake: Callable[[], None],
) -> HandoffEndpoint:
    """Opens the endpoint of a prefill or decode worker.

    `open_transfer` opens a transfer endpoint of this process: one at a prefill worker, and one for each peer at a
    decode worker. Raises StartupError if the control port cannot be bound, if memory cannot be registered, or if the
    staging memory is too small.
    """
    is_prefill = config.role == "prefill"
    # Contexts of a prefill worker on a GPU can be read from its device pool. On a CPU, its host store is as fast.
    with_pools = card.landing.on_device and (not is_prefill or card.landing.prefer_host)
    hosts, pool = executor.hosts(), executor.pool if with_pools else None
    settings = _transfer_settings(config)
    workers: Sequence[TransferWorker] = ()
    if with_pools or not executor.maps_all_hosts:
        service = TransferService(settings, open_transfer, with_pools, config.staging_mib * MIB)
        workers = executor.start_service(service)
    connections = [WorkerConnection(worker.connection) for worker in workers]
    # Contexts of workers on other nodes are not staged.
    staging_mib = 0 if any(worker.described.host is not None for worker in workers) else config.staging_mib
    staging = TransferMemory(staging_mib * MIB, memory_devices(pool, host=bool(hosts)))
    stores = landing_stores(host_shards(hosts, workers, staging), pool_shards(pool, workers, staging))
    for store in stores.values():
        if store.staging:
            check_staging(config.staging_mib * MIB, store)
    probes = TransferMemory(PROBE_BYTES, memory_devices(pool, host=True), zeroed=True)
    known_probes = _worker_probes(workers) | probes.ranges
    device = torch.device("cpu") if pool is None else pool.device
    registered = [*regions([shard.store for shard in hosts], pool), *probes.regions, *staging.regions]

    def open_registered() -> Transfer:
        with ExitStack() as undo:
            opened = open_transfer(replace(settings, device=str(device)))
            undo.callback(opened.close)
            for region in registered:
                opened.register(region)
            endpoints = [opened]
            for connection in connections:
                endpoints.append(RemoteTransfer(connection, settings.deadline_s))
                undo.callback(endpoints[-1].close)
            undo.pop_all()
        return WorkerTransfers(endpoints)

    with ExitStack() as undo:
        for connection in connections:
            undo.callback(connection.close)
        transfer = open_registered() if is_prefill else Endpoints(open_registered)
        undo.callback(transfer.close)
        channel = open_channel(config.control, secret=config.handoff_secret, advertise=config.advertise)
        undo.callback(channel.close)
        hello = Hello(
            control=channel.address,
            model=model,
            stores=stores,
            transfer=transfer.name,
            description=b"" if isinstance(transfer, Endpoints) else transfer.describe(),
            process=this_process(),
            writers=tuple(process for worker in workers if (process := worker.described.process) is not None),
            probes={kind.value: memory for kind, memory in known_probes.items()},
        )
        copies = EngineCopies(device, connections)
        for store in stores.values():
            if store.memory == MemoryKind.DEVICE.value and store.staging:
                copies.warm_up(store)
        agent: HandoffAgent
        if isinstance(transfer, Endpoints):
            staged = any(store.staging for store in stores.values())
            receiver = Receiver(staging=ReceiverStaging(stores) if staged else None)
            agent = DecodeAgent(receiver, hello, channel, transfer, wake=wake, copies=copies)
        else:
            sender = Sender(Sources(stores[host_store_name(0)], stores.get(device_store_name(0))))
            agent = PrefillAgent(sender, hello, channel, transfer, wake=wake, copies=copies)
        agent.start()
        undo.pop_all()
    resources = TransferResources(transfer, (staging, probes), connections)
    if is_prefill:
        return PrefillEndpoint(agent, resources, schedulers[0], executor, card)
    return DecodeEndpoint(agent, resources, schedulers, executor, card.landing)


def _transfer_settings(config: EngineConfig) -> TransferSettings:
    return TransferSettings(
        config.transfer,
        host=control_port(config.control, config.advertise, config.handoff_secret).peers.host,
        interface=config.listening_interface,
        protocol=config.transfer_protocol or "tcp",
        lanes=1 if config.role == "decode" else LANES,  # a decode worker writes nothing
    )


def _worker_probes(workers: Sequence[TransferWorker]) -> dict[MemoryKind, msg.MemoryRange]:
    """Returns the probe memory of the first worker process, with engine addresses."""
    return {
        kind: replace(memory, address=engine_address(1, memory.address))
        for worker in workers[:1]
        for kind, memory in worker.described.probes.items()
    }
