"""The step loop: the scheduler decides, the runner acts, the scheduler commits."""

from collections import deque

from hotset.base.errors import EngineStopped
from hotset.engine.intake import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.runner import Runner, Ticket
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Committed
from hotset.schedule.request import FinishReason
from hotset.schedule.scheduler import Scheduler


class Engine:
    """One model, one pool, one scheduler. Not thread-safe: whoever calls `step` makes every other call as well."""

    def __init__(
        self, card: ModelCard, scheduler: Scheduler, runner: Runner, pages: PageAllocator, plans_in_flight: int
    ) -> None:
        self.card = card
        self._scheduler = scheduler
        self._runner = runner
        self._pages = pages
        self._depth = plans_in_flight
        self._tickets: deque[Ticket] = deque()
        self._broken = False

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
            raise EngineStopped("an earlier step of this engine failed; make a new one")
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
        counters = self._scheduler.counters
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            pages_free=self._pages.free,
            pages_held=self._pages.held,
            pages_total=self._pages.capacity,
            steps=counters.steps,
            tokens_prefilled=counters.tokens_prefilled,
            tokens_generated=counters.tokens_generated,
            preemptions=counters.preemptions,
            requests_finished={str(reason): count for reason, count in counters.finished.items()},
        )

    def audit(self) -> None:
        """Proves that no page and no seat is lost or shared."""
        self._scheduler.audit()
