"""The scheduler: continuous batching with chunked prefill over a fixed number of seats and two pools of pages.

`plan()` decides the next step, the runner executes it, and `commit(result)` records its tokens. Several plans can be in
flight; they commit in order. A request loses its seat or pages, or changes its residence, only while no plan in flight
uses the request.

`queues` holds the waiting and running requests. `admission` decides which request is admitted and in which residence.
`prefixes` finds the cached pages from which a request starts. `preemption` decides which request is preempted.
`batching` fills the plan with tokens of running requests. `landings` keeps the messages to prefill and decode workers.
`steady` schedules together the requests that only gain one token per plan. Their counts follow from plan numbers. A
steady request is *settled* before anything else happens to it: its counts are stored in its `settled_...` fields.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hotset.base.config import TiersMode
from hotset.base.errors import InternalError
from hotset.base.sampling import Alternatives
from hotset.schedule.admission import Admission
from hotset.schedule.batching import Batching
from hotset.schedule.handoffs import CancelFetch, HandoffKey, Reservation
from hotset.schedule.landings import Announcements, Landings
from hotset.schedule.plan import Plan, PlanBuilder, StepResult, TokenOutputs
from hotset.schedule.preemption import Preemptor
from hotset.schedule.prefixes import Prefixes
from hotset.schedule.queues import Queues, SchedulerState
from hotset.schedule.request import FinishReason, Phase, PlanNumbers, Request
from hotset.schedule.snapshots import RequestSnapshot, Snapshots
from hotset.schedule.speculation import Speculation
from hotset.schedule.statistics import RankStats
from hotset.schedule.steady import SteadyDecodes
from hotset.tiers.commands import Flush
from hotset.tiers.ledger import NO_PAGES, Ledger
from hotset.tiers.prefix_cache import PageHasher
from hotset.tiers.residence import Residence

PROMOTE_AFTER_PLANS = 8  # plans without memory pressure before a tiered request is promoted
CONTEXT_TOKENS_PER_COMPUTED_TOKEN = 8  # so many tokens of contexts delay other requests as much as computing one token
MAX_ATTEMPTS = 3  # attempts to have one prompt computed by a prefill worker


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan that has not been committed, and the requests of its segments."""

    plan: Plan
    requests: list[Request]
    # Segments of requests that were steady when the plan was made. Before `steady.stop`, each segment samples one
    # token, so its index is also the index of its token
    steady: range


class Scheduler:
    """Owns every request, from `add` until it is released. Requests are served in order of arrival."""

    def __init__(
        self,
        ledger: Ledger,
        seats: int,
        max_num_batched_tokens: int,
        tiers: TiersMode = "auto",
        promote_after_plans: int = PROMOTE_AFTER_PLANS,
        stages: int = 1,
        hasher: PageHasher | None = None,
        extend_locally: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        """At most `seats` requests run at once. For the other arguments, see the parts that get them.

        A step computes one token of every decoding request, and prompt tokens until there are `max_num_batched_tokens`
        in all. It leaves room for at least one prompt token, so prompts advance however many requests decode.
        """
        self.counters = RankStats()
        self.ledger = ledger
        self._max_num_batched_tokens = max_num_batched_tokens
        self._next_plan = PlanBuilder()
        self._speculation = speculation
        self.queues = Queues(seats)
        self._landings = Landings(ledger.geometry)
        self._announcements = Announcements(ledger.geometry)
        self._state = state = SchedulerState(ledger, self.queues, self._next_plan, self.counters, tiers)
        self._prefixes = Prefixes(state, hasher)
        self._preemptor = Preemptor(state, self._prefixes, promote_after_plans)
        self._admission = Admission(state, self._preemptor, self._landings, self._prefixes, extend_locally)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._plan_numbers = PlanNumbers()
        self._steady = SteadyDecodes(self._plan_numbers)
        self._batching = Batching(state, self._preemptor, self._steady, speculation, self._announcements, stages)
        self._outputs = TokenOutputs()  # not yet returned: first tokens of landings, and requests that have ended
        self._arrivals = 0
        self._snapshots = Snapshots()

    def stats(self) -> RankStats:
        """Returns what was counted since the start, and the current state."""
        return self._state.stats()

    @property
    def open_requests(self) -> int:
        """The number of requests in any phase that have not been released."""
        return len(self._requests)

    @property
    def load(self) -> int:
        """The work that a new request would wait for, in tokens. A request goes to the replica with the lowest sum of
        `load` and the request's `uncached_tokens`.

        Tokens to compute count fully. Tokens in contexts of open requests, which decode steps only read, count
        1 / CONTEXT_TOKENS_PER_COMPUTED_TOKEN.
        """
        context_tokens = sum(len(request.tokens) for request in self._requests.values())
        return self.queues.tokens_to_prefill + context_tokens // CONTEXT_TOKENS_PER_COMPUTED_TOKEN

    def uncached_tokens(self, request: Request) -> int:
        """Returns how many tokens of a new request must be computed for it, at least one. The rows of its other tokens
        are in the prefix cache, or open requests will publish them."""
        return len(request.tokens) - self._prefixes.cached_tokens(request, self._requests.values())

    def tiered_seats(self) -> dict[int, int]:
        """Returns the number of rows of every seat that is tiered in the workers' memory, for audits. Seats for which
        the next plan has commands are left out, because workers have not executed these yet."""
        not_executed = {command.seat for command in self._next_plan.commands}
        return {seat: rows for seat, rows in self.queues.tiered_rows().items() if seat not in not_executed}

    @property
    def idle(self) -> bool:
        """True if no request is left, no plan is in flight, and all outputs have been returned."""
        return not (self._requests or self._in_flight or self._outputs)

    def add(self, request: Request) -> None:
        """Queues a request. The front end has checked that it fits empty pools.

        A worker that computes prompts for peers has no other requests. Such a prompt gets all its pages at admission
        and never grows, so no prompt is preempted while its rows are being sent.
        """
        if request.request_id in self._requests:
            raise InternalError(f"there is already a request {request.request_id}")
        self._admission.check_possible(request)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request.plan_numbers = self._plan_numbers
        self._requests[request.request_id] = request
        self.queues.enqueue(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request in any phase. Unknown and ended requests are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.ENDING:
            self._end(request, reason)

    def complete_landing(self, request_id: str, attempt: int, token_id: int, alternatives: Alternatives | None) -> None:
        """Records that the KV of a prompt has landed completely. `token_id` is the first token of the answer.

        A landing that has ended already is ignored. If the request was cancelled, its pages are released.
        """
        request = self._landing(request_id, attempt)
        if request is None:
            return
        if request.phase is Phase.ENDING:
            self._release(request)
            return
        self.counters.landed += 1
        self.counters.tokens_generated += 1
        self._outputs.add(request_id, token_id, alternatives)
        request.num_scheduled = len(request.prompt)
        request.tokens.append(token_id)
        request.move(Phase.PARKED)
        self.queues.enqueue(request)
        self._check_end(request, token_id)

    def fail_landing(self, request_id: str, attempt: int, *, quiesced: bool, retry: bool, reason: str = "") -> bool:
        """Records that a landing has failed. The request waits again if `retry` and attempts remain, otherwise it ends.

        Unless `quiesced`, the writer may still write to the pages, so these go into quarantine. Returns False if the
        landing has ended already or the request was cancelled.
        """
        request = self._landing(request_id, attempt)
        if request is None:
            return False
        if not quiesced:
            self.ledger.quarantine(request.holding, HandoffKey(request_id, attempt))
        self.ledger.release(request.holding)
        if request.phase is Phase.ENDING:
            self._release(request)
            return False
        self.counters.lost += 1
        request.move(Phase.WAITING)
        request.attempt += 1
        self.queues.enqueue(request)
        if not retry or attempt >= MAX_ATTEMPTS:
            self._end(request, "lost", reason)
        else:
            self.counters.retries += 1
        return True

    def fail_waiting(self, prefill_at: str, reason: str) -> None:
        """Ends the requests that still wait for pages and whose prompts a lost prefill worker would compute.

        If they got pages, each would wait for another timeout of the worker. Requests that can start from the prefix
        cache stay in the queue.
        """
        waiting = [request for request in self.queues.waiting if request.phase is Phase.WAITING]
        affected = [request for request in waiting if request.prefill_at == prefill_at]
        for request in filter(self._admission.needs_peer, affected):
            self.counters.lost += 1
            self._end(request, "lost", reason)

    def end_quarantine(self, request_id: str, attempt: int) -> None:
        """Releases the quarantined pages of a failed landing after its writer has stopped."""
        self.ledger.end_quarantine(HandoffKey(request_id, attempt))

    def drop_prompt(self, request_id: str) -> None:
        """Removes a prompt computed for a peer after the peer received or cancelled it. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.ENDING:
            self._remove(request)

    def take_landing_updates(self) -> list[Reservation | CancelFetch]:
        """Returns the reservations and cancellations to send to prefill workers, each of them once.

        A peer can write as soon as it has a reservation. A reservation is therefore returned only after every plan
        that could still use its pages for their previous owner has been committed.
        """
        return self._landings.take(self._in_flight[0].plan.number if self._in_flight else self._next_plan.number)

    def plan(self) -> Plan | None:
        """Returns the plan of the next step, or None if there is nothing to execute now."""
        next_plan, pending = self._next_plan, self._preemptor.pending
        self._preemptor.apply_pending()
        prefills, steady = self._batching.schedule_decodes()
        budget = max(self._max_num_batched_tokens - sum(next_plan.counts), 1)
        for request in prefills:
            if budget > 0 and request.running and request not in pending:
                budget -= self._batching.schedule_chunk(request, budget)
        for request in self._admission.admit_waiting() if budget > 0 else ():
            if request.running:
                budget -= self._batching.schedule_chunk(request, budget)
            if budget <= 0:
                break
        self._preemptor.promote_one()
        if self.queues.waiting and not (next_plan.seats or self.queues.running or self._in_flight):
            self._make_room_for_first()
        if not (next_plan.seats or self._announcements or self._landings.reserved_in(next_plan.number)):
            return None
        requests = next_plan.requests
        plan = next_plan.build(self._announcements.take())
        self._in_flight.append(_InFlight(plan, requests, steady))
        return plan

    def commit(self, result: StepResult) -> TokenOutputs:
        """Records the result of the oldest plan in flight. Returns its tokens, and what `take_outputs` would return."""
        in_flight = self._in_flight.popleft()
        if result.number != in_flight.plan.number:
            raise InternalError(f"plan {result.number} committed before {in_flight.plan.number}")
        outputs, plan, requests = self._outputs, in_flight.plan, in_flight.requests
        num_landed = len(outputs.token_ids)  # first tokens of landings, which are counted already
        kept = plan.kept(result)
        if self._speculation is not None:
            self._speculation.reject(plan, requests, kept, result.unsampled, self.counters)
        for segment in result.unsampled:
            self._schedule_again(requests[segment], plan)
        segments: Sequence[int] = range(len(requests))
        if in_flight.steady:
            not_steady = self._steady.commit(plan, requests, in_flight.steady, result, outputs)
            one_by_one = [*range(in_flight.steady.start), *not_steady]  # as segments, and as indices of their tokens
            segments = [*one_by_one, *range(in_flight.steady.stop, len(requests))]
            kept = [*one_by_one, *range(in_flight.steady.stop, len(result.token_ids))]
        self._plan_numbers.oldest = plan.number + 1
        for segment in segments:
            request, computed = requests[segment], plan.starts[segment] + plan.counts[segment]
            request.settled_in_flight -= 1
            if computed >= request.publish_at and plan.number >= request.void_before:
                self._prefixes.publish(request, min(computed, request.num_scheduled))
        for prompt_range, columns in zip(plan.prompt_ranges, result.prompt_logprobs, strict=True):
            request = requests[prompt_range.segment]
            if request.phase is not Phase.ENDING:
                outputs.prompt_logprobs.append((request.request_id, columns))
        for index in kept:
            request, token = requests[plan.sampled[index]], result.token_ids[index]
            if request.phase in (Phase.ENDING, Phase.FINISHED) or plan.number < request.void_before:
                continue  # the request ended, or it was scheduled again, since this plan was made
            self._commit_token(request, token, result.alternatives.get(index), result.failures.get(index))
        for segment, drafts in result.next_drafts.items():
            decodes = requests[segment].phase is Phase.DECODE and segment not in result.unsampled
            if self._speculation is not None and decodes:
                self._speculation.receive(requests[segment], drafts)
        for segment in segments:
            if requests[segment].phase is Phase.ENDING and requests[segment].in_flight == 0:
                self._release(requests[segment])
        self.counters.steps += 1
        self.counters.tokens_generated += len(outputs.token_ids) - num_landed
        return self.take_outputs()

    @property
    def has_messages(self) -> bool:
        """Whether announcements, reservations or cancellations are pending."""
        return bool(self._announcements) or bool(self._landings)

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` returns tokens or ends of requests."""
        return bool(self._outputs)

    def take_outputs(self) -> TokenOutputs:
        """Returns outputs that need no step, each of them once: first tokens of landings, and requests that ended."""
        outputs, self._outputs = self._outputs, TokenOutputs()
        outputs.cached_tokens = self._prefixes.take_cached_tokens()
        return outputs

    def take_snapshots(self) -> list[RequestSnapshot]:
        """Returns the state of open requests, and of those that have ended since the last call."""
        return self._snapshots.take(self._requests.values())

    def audit(self) -> None:
        """Proves that every page and every seat is free or has exactly one owner."""
        requests = list(self._requests.values())
        self.ledger.audit([request.holding for request in requests])
        self.queues.audit(requests)
        self._admission.audit()
        for request in requests:
            if request.seat is not None:
                need = self.ledger.pages_needed(request.holding, request.holding.residence, request.num_scheduled)
                assert need == NO_PAGES, f"{request.request_id} has rows without a page"

    def _make_room_for_first(self) -> None:
        """Makes room for the first request in the queue that does not wait for a prefix. Although no request runs, this
        request does not fit.

        The youngest other parked request releases its pages and will be recomputed. If no other request is parked, the
        missing pages may be in quarantine. The request then ends, unless requests outside the queue can release pages.
        """
        ready = [request for request in self.queues.waiting if not self._prefixes.must_wait(request)]
        if not ready:
            return
        first, *others = ready
        holders = [request for request in others if request.phase is Phase.PARKED]
        if holders:
            self._preemptor.recompute(holders[-1])
        elif self.ledger.quarantined != NO_PAGES and len(self._requests) == len(self.queues.waiting):
            pages = self.ledger.quarantined.device + self.ledger.quarantined.host
            why = f"{pages} pages are in quarantine, because lost prefill workers could still write to them"
            self._end(first, "no_room", f"{why}; the remaining pages are too few now")

    def _schedule_again(self, request: Request, plan: Plan) -> None:
        """Unschedules the newest committed token of a request and everything scheduled after it, because a mask of its
        structure was late.

        The next plan computes the logits of this token again. Results of plans in flight are ignored for this request.
        A tiered request is parked, because the stamps of a hot buffer must not decrease.
        """
        if request.phase in (Phase.ENDING, Phase.FINISHED) or plan.number < request.void_before:
            return
        request.settle()
        request.num_scheduled = len(request.tokens) - 1
        request.settled_unsampled = request.drafts_in_flight = 0
        request.void_before = self._next_plan.number
        if request.holding.residence is Residence.TIERED and request not in self._preemptor.pending:
            self._preemptor.change_residence(request, Residence.PARKED)
        if request.phase is Phase.PREFILL and request.num_scheduled and not request.for_peer:
            self._admission.on_kv_ready(request)

    def _commit_token(
        self, request: Request, token: int, alternatives: Alternatives | None, failure: str | None
    ) -> None:
        """Records a token that was sampled for a request. If there is a `failure`, the token has no meaning."""
        if request.for_peer:
            self._hand_off(request, token, alternatives, failure)
        elif failure is not None:
            self._end(request, "structure", failure)
        elif request.prompt_only:
            self._end(request, "length")
        else:
            self._outputs.add(request.request_id, token, alternatives)
            request.settled_unsampled -= 1
            request.tokens.append(token)
            if request.phase is Phase.PREFILL:
                self._admission.on_kv_ready(request)
            self._check_end(request, token)

    def _check_end(self, request: Request, token: int) -> None:
        """Ends the request if `token`, its newest, is a stop token or is the last that its maximal length allows."""
        if token in request.prompt.stop_ids:
            self._end(request, "stop")
        elif len(request.tokens) >= request.max_length:
            self._end(request, "length")

    def _hand_off(self, request: Request, token: int, alternatives: Alternatives | None, failure: str | None) -> None:
        """Parks a prompt computed for a peer and announces it. Its rows stay on the host until they have been sent. If
        the rows are sent from the device, the prompt is not parked.

        `failure` says why no first token could be sampled. The peer gets this reason instead of a token.
        """
        holding, length = request.holding, request.num_scheduled
        if request.stays_on_device and holding.residence is Residence.RESIDENT:
            self._next_plan.commands.append(Flush(holding.seat, length))
        else:
            self._next_plan.commands += self.ledger.park(holding, length)
        self.queues.stop(request, Phase.HANDOFF)
        self._announcements.announce_rows(request, whole=True)
        if failure is None:
            self._announcements.announce_first_token(request, token, alternatives)
        else:
            self._announcements.announce_failure(request, failure)
        self.counters.handed_off += 1

    def _landing(self, request_id: str, attempt: int) -> Request | None:
        """Returns the request of this landing, or None if the landing has ended or a newer attempt has replaced it."""
        request = self._requests.get(request_id)
        if request is None or request.attempt != attempt or request.phase is Phase.PARKED:
            return None
        return request if request.holding.residence is Residence.LANDING else None

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self.counters.requests_finished[reason] += 1
        request.finish_reason = reason
        self._outputs.finished[request.request_id] = reason
        if error is not None:
            self._outputs.errors[request.request_id] = error
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Removes a request in any phase. It is released once no plan in flight and no peer uses its pages."""
        request.settle()
        if request.phase in (Phase.WAITING, Phase.PARKED):
            self.queues.waiting.remove(request)
            self._release(request)
        elif request.phase is Phase.HANDOFF:
            self._announcements.discard(request)
            self._release(request)
        elif request.phase is Phase.LANDING:
            request.move(Phase.ENDING)
            if self._landings.cancel(request):
                self._release(request)
        else:
            request.move(Phase.ENDING)
            self.queues.running.remove(request)
            self._preemptor.pending.pop(request, None)
            if request.in_flight == 0:
                self._release(request)

    def _release(self, request: Request) -> None:
        """Releases the seat and pages of a request that no plan in flight uses. The last call for every request."""
        if request.phase is Phase.FINISHED:
            return
        if request.in_flight:
            raise InternalError(f"{request.request_id} is part of a plan in flight")
        request.move(Phase.FINISHED)
        self.queues.release_seat(request)
        self._prefixes.publish_rest(request)
        self.ledger.release(request.holding)
        if self._speculation is not None:
            self._speculation.forget(request)
        del self._requests[request.request_id]
        self._snapshots.on_released(request)
