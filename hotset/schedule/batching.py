"""Fills the next plan with tokens of running requests: a token of each decoding request, drafts, chunks of prompts."""

from collections.abc import Sequence

from hotset.base.units import ceil_div
from hotset.schedule.landings import Announcements
from hotset.schedule.preemption import Preemptor
from hotset.schedule.queues import SchedulerState
from hotset.schedule.request import Phase, Request
from hotset.schedule.speculation import Speculation
from hotset.schedule.steady import SteadyDecodes
from hotset.tiers.residence import Residence


class Batching:
    """Schedules tokens of requests that have seats. If pages for a token are short, requests are preempted."""

    def __init__(
        self,
        state: SchedulerState,
        preemptor: Preemptor,
        steady: SteadyDecodes,
        speculation: Speculation | None,
        announcements: Announcements,
        stages: int,
    ) -> None:
        """Decoding requests are divided among `stages` plans in flight, because the last stage of a pipeline samples
        the token that the first stage computes next. With `speculation`, a step also verifies their drafted tokens."""
        self._ledger, self._queues = state.ledger, state.queues
        self._next_plan, self._counters = state.next_plan, state.counters
        self._preemptor, self._steady, self._speculation = preemptor, steady, speculation
        self._announcements, self._stages = announcements, stages

    def schedule_decodes(self) -> tuple[list[Request], range]:
        """Adds one token and the drafts of each decoding request to the plan. Returns the requests with several tokens
        left to compute, and the segments of steady requests."""
        prefills: list[Request] = []
        running, seats, number = self._queues.running, self._next_plan.seats, self._next_plan.number
        pending, max_decodes = self._preemptor.pending, ceil_div(len(running), self._stages)
        if self._speculation is not None:
            self._speculation.begin_plan(len(running))
            self._next_plan.num_drafts = self._speculation.num_drafts
        self._steady.settle_due(number)
        for request in tuple(running):
            if request.steady_since <= number:
                continue
            if request.seat is None or (pending and request in pending):
                continue  # it was preempted for an older request in this plan, or its change is pending
            num_scheduled = request.num_scheduled
            remaining = min(len(request.tokens) + request.num_unsampled, request.max_length - 1) - num_scheduled
            if remaining > 1:
                prefills.append(request)
            elif (request.num_unsampled and self._needs_newest(request)) or len(seats) == max_decodes:
                continue  # its newest token is not sampled yet, or the plan has its share of decodes
            elif (
                remaining == 1
                and (num_scheduled < request.holding.capacity or self._grow(request))
                and not self._becomes_tiered(request)
            ):
                drafts: Sequence[int] = ()
                if self._speculation is not None and self._next_plan.num_drafts:
                    drafts = self._speculation.draft(request, self._next_plan)
                self._schedule(request, 1 + len(drafts), drafts)
        not_steady = tuple(self._next_plan.requests)
        steady = self._steady.schedule(self._next_plan)
        if self._stages == 1 and self._speculation is None:
            for request in not_steady:
                if request not in pending:
                    self._steady.join(request)
        return prefills, steady

    def schedule_chunk(self, request: Request, budget: int) -> int:
        """Adds the next tokens of a prompt to the plan, at most `budget`. Returns their number."""
        count = min(budget, len(request.tokens) - request.num_scheduled)
        self._schedule(request, count)
        return count

    def _needs_newest(self, request: Request) -> bool:
        """Returns whether the newest token of a request must be sampled before the request is scheduled again."""
        return self._stages > 1 or (self._speculation is not None and self._speculation.needs_newest(request))

    def _grow(self, request: Request) -> bool:
        """Grants pages for one more token of a request. If pages are short, the older steady requests are added to the
        plan first, and then requests are preempted."""
        commands = self._ledger.grow(request.holding, request.num_scheduled + 1)
        if commands is not None:
            self._next_plan.commands += commands
            return True
        for older in tuple(self._queues.running):
            if older.steady_since <= self._next_plan.number and older.arrival < request.arrival:
                older.settle()
                self._schedule(older, 1)
        return self._preemptor.grow(request)

    def _becomes_tiered(self, request: Request) -> bool:
        """Returns True if all chunks of a streamed prompt are scheduled. The last commit makes the request tiered."""
        if request.phase is Phase.DECODE:
            return False
        return request.holding.residence is Residence.STREAMED and request.num_scheduled >= len(request.tokens)

    def _schedule(self, request: Request, count: int, drafts: Sequence[int] = ()) -> None:
        """Adds the next `count` tokens of a request to the plan. The request has pages for them, and the last of these
        tokens are its `drafts`."""
        next_plan, seat = self._next_plan, request.seat
        assert seat is not None
        next_plan.seats.append(seat)
        next_plan.starts.append(request.num_scheduled - request.drafts_in_flight)
        next_plan.counts.append(count)
        next_plan.unverified.append(request.drafts_in_flight)
        if request.phase is Phase.PREFILL and request.num_unsampled == 0:
            self._counters.tokens_prefilled += count
        request.settled_scheduled += count
        if request.needs_prompt_logits:
            next_plan.add_prompt_range(request, count)
        if request.for_peer:
            self._announcements.announce_rows(request)
        samples = request.num_scheduled == len(request.tokens) + request.num_unsampled + len(drafts)
        if samples:
            next_plan.sampled += [len(next_plan.requests)] * (1 + len(drafts))
            request.settled_unsampled += 1 + len(drafts)
        if drafts:
            next_plan.drafts[len(next_plan.requests)] = drafts
            request.drafts_in_flight += len(drafts)
        if self._speculation is not None:
            next_plan.draft_limits.append(self._speculation.draft_limit(request, samples=samples))
        next_plan.requests.append(request)
        request.settled_in_flight += 1
