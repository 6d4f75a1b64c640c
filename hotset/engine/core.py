"""The step loop: the scheduler decides, the runner acts, the scheduler commits."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from hotset.base.errors import EngineStopped
from hotset.engine.closing import DRAIN_SECONDS, closing_seconds
from hotset.engine.handoffs import Port
from hotset.engine.intake import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.runner import Runner, Ticket
from hotset.schedule.plan import Committed
from hotset.schedule.request import FinishReason
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.coordinator import Coordinator
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence

LOGGER = logging.getLogger("hotset.engine")
HURRIED_SECONDS = 1.0  # for handoffs, at the end, where somebody will not wait


class Engine:
    """One model, one pool, one scheduler. Not thread-safe: whoever calls `step` makes every other call as well."""

    def __init__(
        self,
        card: ModelCard,
        scheduler: Scheduler,
        runner: Runner,
        ledger: Ledger,
        memory: Coordinator,
        plans_in_flight: int,
        port: Port | None = None,
    ) -> None:
        """`port`: of a prefill or decode worker."""
        self.card = card
        self._scheduler = scheduler
        self._runner = runner
        self._ledger = ledger
        self._memory = memory
        self._depth = plans_in_flight
        self._port = port
        self._tickets: deque[Ticket] = deque()
        self._broken = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles and captures ahead what steps will need. `progress(done, total)`."""
        self._runner.warm_up(progress)

    @property
    def idle(self) -> bool:
        """Nothing is left to do, or nothing can be done any more."""
        return self._broken or self._scheduler.idle

    def add(self, choice: Choice) -> None:
        """Queues a choice that passed the intake."""
        self._scheduler.add(choice.to_request())

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request, whatever it is doing; unknown ids are ignored."""
        self._scheduler.abort(request_id, reason)

    def step(self) -> Committed:
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
        return not self._tickets and self._scheduler.running == 0

    def _step(self) -> Committed:
        if self._port is not None:
            self._port.exchange()
        while len(self._tickets) < self._depth and (plan := self._scheduler.plan()) is not None:
            self._tickets.append(self._runner.submit(plan))
            if self._port is not None:
                self._port.submitted(plan)
        if self._tickets:
            return self._scheduler.commit(self._tickets.popleft().result())
        return self._scheduler.take_news()

    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        device, host, traffic = self._ledger.device, self._ledger.host, self._memory.traffic()
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            tokens_to_prefill=scheduler.tokens_to_prefill,
            resident=scheduler.in_residence(Residence.RESIDENT),
            tiered=scheduler.in_residence(Residence.TIERED),
            parked=scheduler.parked,
            device_pages_held=device.held,
            device_pages_total=device.capacity,
            host_pages_held=0 if host is None else host.held,
            host_pages_total=0 if host is None else host.capacity,
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
            asked_again=counters.asked_again,
            handed_over=counters.handed_over,
            quarantined_pages=self._ledger.quarantined.device + self._ledger.quarantined.host,
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
        host = self._memory.host
        tensors = () if host is None else (host.rows, host.keys)
        pinned = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return closing_seconds(pinned, with_port=self._port is not None)

    def close(self, drain_seconds: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """Gives the host store back in order, and before it what peers wait for: that may be finished for so long, or
        until `hurried` says that somebody will not wait. Idempotent; nothing may be asked of the engine afterwards."""
        if self._port is not None:
            self._close_port(self._port, drain_seconds, hurried)
        self._broken = True
        self._memory.close()

    def _close_port(self, port: Port, drain_seconds: float, hurried: Callable[[], bool]) -> None:
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
        self._scheduler.audit()
        self._memory.audit(self._scheduler.tiered_seats())
        if self._port is not None:
            self._port.audit()


def _begun(close: Callable[[float], None], seconds: float) -> threading.Thread:
    thread = threading.Thread(target=close, args=(seconds,), daemon=True)
    thread.start()
    return thread
