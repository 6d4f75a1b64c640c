"""The step loop: schedulers plan, the executor runs the plans, schedulers commit the results."""

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hotset.base.errors import EngineStopped
from hotset.engine.input_processor import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.ports import CachePublisher, HandoffEndpoint
from hotset.engine.progress import DRAIN_SECONDS, closing_seconds
from hotset.engine.workers.executor import Executor, StepFuture
from hotset.schedule.plan import TokenOutputs
from hotset.schedule.request import FinishReason, Request
from hotset.schedule.scheduler import Scheduler
from hotset.schedule.snapshots import RequestSnapshot
from hotset.schedule.statistics import RankStats

LOGGER = logging.getLogger("hotset.engine")
HURRIED_SECONDS = 1.0  # time for open handoffs to finish after a second request to stop


class Engine:
    """Runs one model and its requests. Not thread-safe: all methods must be called from the same thread."""

    def __init__(
        self,
        card: ModelCard,
        schedulers: Sequence[Scheduler],
        executor: Executor,
        plans_in_flight: int,
        endpoint: HandoffEndpoint | None = None,
        publishers: Sequence[CachePublisher] = (),
    ) -> None:
        """There is a scheduler for each data parallel rank. `endpoint` performs the handoffs of a prefill or decode
        worker. Other engines have none."""
        self.card = card
        self.schedulers = schedulers
        self.executor = executor
        self._plans_in_flight = plans_in_flight
        self._endpoint = endpoint
        self._unplanned = False  # the last call of `step` returned outputs before it had planned a step
        self._publishers = publishers
        self._pending: deque[StepFuture] = deque()
        self._broken = False  # closed, or a step failed

    @property
    def idle(self) -> bool:
        """True if no request is open, no step is in flight and all outputs have been returned, or if the engine has
        failed or was closed."""
        return self._broken or all(scheduler.idle for scheduler in self.schedulers)

    @property
    def steps(self) -> int:
        """The number of steps committed since start."""
        return sum(scheduler.counters.steps for scheduler in self.schedulers)

    @property
    def open_requests(self) -> int:
        return sum(scheduler.open_requests for scheduler in self.schedulers)

    def add(self, choice: Choice) -> None:
        """Queues a choice at the replica with the least work: the tokens of its requests, plus the tokens of the choice
        that are neither in its prefix cache nor about to be computed there for another request."""
        request, scheduler = choice.to_request(), self.schedulers[0]
        if len(self.schedulers) > 1:
            scheduler = self._find_cheapest(request)
        scheduler.add(request)

    def _find_cheapest(self, request: Request) -> Scheduler:
        """Returns the scheduler at which a request costs least, and the first one if several cost the same.

        The cost is the scheduler's load plus the tokens that it must compute for the request, at least one. Counting
        these takes long, so schedulers whose load alone is too high are skipped.
        """
        loads = [scheduler.load for scheduler in self.schedulers]
        costs: dict[int, int] = {}
        for index in sorted(range(len(loads)), key=loads.__getitem__):
            if costs and loads[index] >= min(costs.values()):
                break
            costs[index] = loads[index] + self.schedulers[index].uncached_tokens(request)
        return self.schedulers[min(costs, key=lambda index: (costs[index], index))]

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request in any phase. Unknown ids are ignored."""
        for scheduler in self.schedulers:
            scheduler.abort(request_id, reason)

    def step(self) -> TokenOutputs:
        """Submits steps until `plans_in_flight` are pending or there is nothing to plan, then commits the oldest
        pending step, if any. Returns the new outputs, which may be empty.

        If `step` raises, submitted plans may never be committed. The engine cannot continue then, and every later call
        raises EngineStopped.
        """
        if self._broken:
            raise EngineStopped("this engine is closed, or an earlier step failed; create a new one")
        try:
            outputs = self._step()
            for publisher in self._publishers:
                publisher.flush()
            return outputs
        except BaseException:
            self._broken = True
            raise

    @property
    def waiting_for_peers(self) -> bool:
        """True if no step is in flight, no request is running, and nothing is left to plan or to send to a peer. Any
        request that is still open then waits for a peer, or for pages of a request that waits for a peer."""
        return not (self._pending or self._unplanned) and not any(
            scheduler.queues.running or scheduler.has_messages for scheduler in self.schedulers
        )

    @property
    def waiting_for_copies(self) -> bool:
        """True if a message to a peer waits for copies to the host. `step` must be called again soon to send it."""
        return self._endpoint is not None and self._endpoint.waiting_for_copies

    def _step(self) -> TokenOutputs:
        self.executor.check()
        if self._endpoint is not None:
            self._endpoint.poll()
            self._unplanned = any(scheduler.has_outputs for scheduler in self.schedulers)
            if self._unplanned:  # the first tokens of prompts that have landed do not wait for a step
                return _merge([scheduler.take_outputs() for scheduler in self.schedulers])
        while len(self._pending) < self._plans_in_flight:
            step = [scheduler.plan() for scheduler in self.schedulers]
            if not any(step):
                break
            self._pending.append(self.executor.submit(step))
            if self._endpoint is not None:
                self._endpoint.on_submitted(step)
        if not self._pending:
            return _merge([scheduler.take_outputs() for scheduler in self.schedulers])
        results = self._pending.popleft().results()
        return _merge(
            [
                scheduler.take_outputs() if result is None else scheduler.commit(result)
                for scheduler, result in zip(self.schedulers, results, strict=True)
            ]
        )

    def stats(self) -> EngineStats:
        ranks = [scheduler.stats() for scheduler in self.schedulers]
        traffic = self.executor.traffic()
        copies = RankStats(
            rows_mirrored=traffic.rows_mirrored,
            bytes_swapped=traffic.bytes_swapped,
            slot_lookups=Counter(traffic.lookups),
            slot_misses=Counter(traffic.misses),
        )
        return replace(
            EngineStats.total([*ranks, copies]),
            lacks_room=not all(
                scheduler.ledger.fits_beside_quarantine(self.card.max_model_len - 1) for scheduler in self.schedulers
            ),
            handoff=None if self._endpoint is None else self._endpoint.stats(),
            ranks=ranks if len(ranks) > 1 else (),
        )

    def take_snapshots(self) -> list[RequestSnapshot]:
        """Returns the state of open requests, and of those that have ended since the last call."""
        return [snapshot for scheduler in self.schedulers for snapshot in scheduler.take_snapshots()]

    @property
    def closing_seconds(self) -> float:
        """The time that `close` can take on a slow machine, in addition to `drain_seconds`."""
        return closing_seconds(self.executor.pinned_bytes, with_endpoint=self._endpoint is not None)

    def close(self, drain_seconds: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """Drains open handoffs, then releases the memory. The engine cannot be used afterwards. Idempotent.

        The drain takes at most `drain_seconds`, or DRAIN_SECONDS if that is longer. After a failed step there is no
        drain. `hurried` is polled during the drain; when it returns True, the drain ends within HURRIED_SECONDS.
        """
        if self._endpoint is not None:
            self._close_endpoint(self._endpoint, drain_seconds, hurried)
        self._broken = True
        try:
            self.executor.close()
        finally:
            for publisher in self._publishers:
                publisher.close()

    def _close_endpoint(self, endpoint: HandoffEndpoint, drain_seconds: float, hurried: Callable[[], bool]) -> None:
        """Drains open handoffs and notifies peers. Unless a step has failed, the engine runs steps meanwhile, because
        handoffs need them."""
        closing = [_start_thread(endpoint.close, 0.0 if self._broken else max(DRAIN_SECONDS, drain_seconds))]
        while any(thread.is_alive() for thread in closing):
            if len(closing) == 1 and hurried():
                closing.append(_start_thread(endpoint.close, HURRIED_SECONDS))
            if not self._broken:
                try:
                    with contextlib.suppress(EngineStopped):  # the agent raises it after its thread has ended
                        self.step()
                except Exception:
                    # The engine cannot continue, but its memory must still be released in order.
                    LOGGER.exception("a step failed while the engine was closing")
            closing[0].join(0.02 if self.waiting_for_peers else 0.001)
        self._endpoint = None

    def audit(self) -> None:
        """Checks that every page and seat is free or has exactly one owner, and that the residency maps and the state
        of open handoffs are consistent. Raises AssertionError if not."""
        for scheduler in self.schedulers:
            scheduler.audit()
        self.executor.audit([scheduler.tiered_seats() for scheduler in self.schedulers])
        if self._endpoint is not None:
            self._endpoint.audit()


def _start_thread(close: Callable[[float], None], seconds: float) -> threading.Thread:
    thread = threading.Thread(target=close, args=(seconds,), daemon=True)
    thread.start()
    return thread


def _merge(outputs: Sequence[TokenOutputs]) -> TokenOutputs:
    """Merges the outputs of all replicas."""
    if len(outputs) == 1:
        return outputs[0]
    merged = TokenOutputs()
    for replica_outputs in filter(None, outputs):
        first = len(merged.token_ids)
        merged.request_ids += replica_outputs.request_ids
        merged.token_ids += replica_outputs.token_ids
        alternatives = replica_outputs.alternatives
        merged.alternatives.update({first + index: of_token for index, of_token in alternatives.items()})
        merged.prompt_logprobs += replica_outputs.prompt_logprobs
        merged.cached_tokens.update(replica_outputs.cached_tokens)
        merged.finished.update(replica_outputs.finished)
        merged.errors.update(replica_outputs.errors)
    return merged
