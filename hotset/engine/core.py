"""The step loop: schedulers decide, the executor acts, schedulers commit."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotset.base.errors import EngineStopped
from hotset.engine.handoffs import HandoffEndpoint
from hotset.engine.input_processor import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.timeouts import DRAIN_SECONDS, closing_seconds
from hotset.engine.workers.executor import Executor, StepFuture
from hotset.schedule.plan import TokenOutputs
from hotset.schedule.request import Counters, FinishReason
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence

LOGGER = logging.getLogger("hotset.engine")
HURRIED_SECONDS = 1.0  # for handoffs, at the end, where somebody will not wait


@dataclass(frozen=True, slots=True)
class Replica:
    """Some of the engine's requests, with pools of their own. All but data parallel engines have one."""

    scheduler: Scheduler
    ledger: Ledger


class Engine:
    """One model, and all that is asked of it. Not thread-safe: whoever calls `step` makes every other call as well."""

    def __init__(
        self,
        card: ModelCard,
        replicas: Sequence[Replica],
        executor: Executor,
        plans_in_flight: int,
        port: HandoffEndpoint | None = None,
    ) -> None:
        """`port`: of a prefill or decode worker."""
        self.card = card
        self.replicas = replicas
        self.executor = executor
        self._schedulers = [replica.scheduler for replica in replicas]
        self._depth = plans_in_flight
        self._port = port
        self._pending: deque[StepFuture] = deque()
        self._broken = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles and captures ahead what steps will need. `progress(done, total)`."""
        self.executor.warm_up(progress)

    @property
    def idle(self) -> bool:
        """Nothing is left to do, or nothing can be done any more."""
        return self._broken or all(scheduler.idle for scheduler in self._schedulers)

    def add(self, choice: Choice) -> None:
        """Queues a choice that passed the intake, where the fewest tokens are."""
        min(self._schedulers, key=lambda scheduler: scheduler.load).add(choice.to_request())

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request, whatever it is doing; unknown ids are ignored."""
        for scheduler in self._schedulers:
            scheduler.abort(request_id, reason)

    def step(self) -> TokenOutputs:
        """Keeps `plans_in_flight` steps submitted and takes in the oldest; the news are empty if there was none.

        An exception on the way leaves plans that nobody will commit: it goes up, and the engine is done for.
        """
        if self._broken:
            raise EngineStopped("this engine was closed, or an earlier step of it failed; make a new one")
        try:
            return self._step()
        except BaseException:
            self._broken = True
            raise

    @property
    def waiting_for_peers(self) -> bool:
        """There is nothing to compute until a peer has answered."""
        return not self._pending and all(scheduler.running == 0 for scheduler in self._schedulers)

    def _step(self) -> TokenOutputs:
        self.executor.check()
        if self._port is not None:
            self._port.exchange()
        while len(self._pending) < self._depth:
            step = [scheduler.plan() for scheduler in self._schedulers]
            if not any(step):
                break
            self._pending.append(self.executor.submit(step))
            if self._port is not None:
                self._port.submitted(step)
        if not self._pending:
            return _joined([scheduler.take_outputs() for scheduler in self._schedulers])
        results = self._pending.popleft().results()
        return _joined(
            [
                scheduler.take_outputs() if result is None else scheduler.commit(result)
                for scheduler, result in zip(self._schedulers, results, strict=True)
            ]
        )

    def stats(self) -> EngineStats:
        schedulers, ledgers = self._schedulers, [replica.ledger for replica in self.replicas]
        counters = Counters.total(scheduler.counters for scheduler in schedulers)
        devices, hosts = [ledger.device for ledger in ledgers], [ledger.host for ledger in ledgers if ledger.host]
        traffic = self.executor.traffic()
        return EngineStats(
            running=sum(scheduler.running for scheduler in schedulers),
            waiting=sum(scheduler.waiting for scheduler in schedulers),
            tokens_to_prefill=sum(scheduler.tokens_to_prefill for scheduler in schedulers),
            resident=sum(scheduler.in_residence(Residence.RESIDENT) for scheduler in schedulers),
            tiered=sum(scheduler.in_residence(Residence.TIERED) for scheduler in schedulers),
            parked=sum(scheduler.parked for scheduler in schedulers),
            device_pages_held=sum(device.held for device in devices),
            device_pages_total=sum(device.capacity for device in devices),
            host_pages_held=sum(host.held for host in hosts),
            host_pages_total=sum(host.capacity for host in hosts),
            steps=counters.steps,
            tokens_prefilled=counters.tokens_prefilled,
            tokens_generated=counters.tokens_generated,
            demotions=counters.demotions,
            promotions=counters.promotions,
            parks=counters.parks,
            resumes=counters.resumes,
            recomputes=counters.recomputes,
            landed=counters.landed,
            lost=counters.lost,
            retries=counters.retries,
            handed_off=counters.handed_off,
            quarantined_pages=sum(ledger.quarantined.device + ledger.quarantined.host for ledger in ledgers),
            handoff=None if self._port is None else self._port.stats(),
            rows_flushed=traffic.rows_flushed,
            bytes_swapped=traffic.bytes_swapped,
            slot_lookups=traffic.lookups,
            slot_misses=traffic.misses,
            requests_finished={str(reason): count for reason, count in counters.finished.items()},
        )

    @property
    def closing_seconds(self) -> float:
        """What `close` may take beyond the drain that it is given, on a slow machine."""
        return closing_seconds(self.executor.pinned_bytes, with_endpoint=self._port is not None)

    def close(self, drain_seconds: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """Gives the host store back in order, and before it what peers wait for: that may be finished for so long, or
        until `hurried` says that somebody will not wait. Idempotent; nothing may be asked of the engine afterwards."""
        if self._port is not None:
            self._close_port(self._port, drain_seconds, hurried)
        self._broken = True
        self.executor.close()

    def _close_port(self, port: HandoffEndpoint, drain_seconds: float, hurried: Callable[[], bool]) -> None:
        """Peers are told, and what was begun for them is finished, before memory goes."""
        closing = [_begun(port.close, 0.0 if self._broken else max(DRAIN_SECONDS, drain_seconds))]
        while any(thread.is_alive() for thread in closing):
            if len(closing) == 1 and hurried():
                closing.append(_begun(port.close, HURRIED_SECONDS))
            if not self._broken:
                try:
                    with contextlib.suppress(EngineStopped):  # of an agent that has ended
                        self.step()
                except Exception:
                    # The engine is done for, and all the more its memory must be given back in order.
                    LOGGER.exception("a step failed while the engine was closing")
            closing[0].join(0.02 if self.waiting_for_peers else 0.001)
        self._port = None

    def audit(self) -> None:
        """Proves that no page and no seat is lost or shared, and that every residency map is consistent."""
        for scheduler in self._schedulers:
            scheduler.audit()
        self.executor.audit([scheduler.tiered_seats() for scheduler in self._schedulers])
        if self._port is not None:
            self._port.audit()


def _begun(close: Callable[[float], None], seconds: float) -> threading.Thread:
    thread = threading.Thread(target=close, args=(seconds,), daemon=True)
    thread.start()
    return thread


def _joined(news: Sequence[TokenOutputs]) -> TokenOutputs:
    """The news of all replicas as one."""
    if len(news) == 1:
        return news[0]
    joined = TokenOutputs()
    for each in news:
        first = len(joined.token_ids)
        joined.request_ids += each.request_ids
        joined.token_ids += each.token_ids
        joined.alternatives.update({first + at: row for at, row in each.alternatives.items()})
        joined.finished.update(each.finished)
        joined.errors.update(each.errors)
    return joined
