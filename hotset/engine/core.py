"""The step loop: the scheduler decides, the runner acts, the scheduler commits."""

from collections import deque
from collections.abc import Callable

from hotset.base.errors import EngineStopped
from hotset.engine.intake import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.runner import Runner, Ticket
from hotset.schedule.plan import Committed
from hotset.schedule.request import FinishReason
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.coordinator import Coordinator
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence


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
    ) -> None:
        self.card = card
        self._scheduler = scheduler
        self._runner = runner
        self._ledger = ledger
        self._memory = memory
        self._depth = plans_in_flight
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

    def _step(self) -> Committed:
        while len(self._tickets) < self._depth and (plan := self._scheduler.plan()) is not None:
            self._tickets.append(self._runner.submit(plan))
        if self._tickets:
            return self._scheduler.commit(self._tickets.popleft().result())
        return Committed(finished=self._scheduler.take_ended())

    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        device, host, traffic = self._ledger.device, self._ledger.host, self._memory.traffic()
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
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
            rows_flushed=traffic.rows_flushed,
            bytes_swapped=traffic.bytes_swapped,
            slot_lookups=traffic.lookups,
            slot_misses=traffic.misses,
            requests_finished={str(reason): count for reason, count in counters.finished.items()},
        )

    def close(self) -> None:
        """Gives the host store back in order. Idempotent; nothing may be asked of the engine afterwards."""
        self._broken = True
        self._memory.close()

    def audit(self) -> None:
        """Proves that no page and no seat is lost or shared, and that every residency map is consistent."""
        self._scheduler.audit()
        self._memory.audit(self._scheduler.tiered_seats())
