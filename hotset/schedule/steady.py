"""Schedules together the decoding requests that only gain one token in each of the next plans.

Such a request is *steady*: its pages suffice, no page is published, and the answer does not end. Scheduling and
committing all steady requests together takes a fraction of the time that they would take one by one. Their progress is
derived from plan numbers. A request that is preempted or ends, or that needs a page, is *settled* first: its counts
are stored, and it is scheduled by itself.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from hotset.schedule.plan import Plan, PlanBuilder, StepResult, TokenOutputs
from hotset.schedule.request import Phase, PlanNumbers, Request


def plans_without_event(request: Request) -> int:
    """Returns for how many of the next plans a decoding request needs no page, publishes none, and does not end.

    A plan that computes row r needs its page. When it commits, r + 1 rows are computed, and r + 2 tokens are known.
    """
    first_event = min(request.holding.capacity, request.publish_at - 1, request.max_length - 2)
    return first_event - request.num_scheduled


class SteadyDecodes:
    """The steady requests of one scheduler. Each is part of every plan from its `steady_since` on."""

    def __init__(self, numbers: PlanNumbers) -> None:
        self._numbers = numbers
        self._requests: list[Request] = []  # some may have been settled since the last plan
        self._due: list[tuple[int, int, Request]] = []  # a heap: first plan with an event, arrival, request

    def settle_due(self, number: int) -> None:
        """Settles the requests that plan `number` must schedule by themselves."""
        while self._due and self._due[0][0] <= number:
            heappop(self._due)[2].settle()

    def schedule(self, plan: PlanBuilder) -> range:
        """Adds one token of every steady request to the plan. Returns their segments."""
        number, first = plan.number, len(plan.requests)
        self._requests = steady = [request for request in self._requests if request.steady_since <= number]
        segments = range(first, first + len(steady))
        plan.requests += steady
        plan.seats += [request.holding.seat for request in steady]
        plan.starts += [request.settled_scheduled + number - request.steady_since for request in steady]
        plan.counts += [1] * len(steady)
        plan.sampled += segments
        self._numbers.next = number + 1
        return segments

    def join(self, request: Request) -> None:
        """Makes a request in the newest plan steady, if it decodes and has no event in the next plan."""
        if request.phase is Phase.DECODE and not request.needs_prompt_logits:
            plans = plans_without_event(request)
            if plans > 0:
                request.steady_since = self._numbers.next
                self._requests.append(request)
                heappush(self._due, (self._numbers.next + plans, request.arrival, request))

    @staticmethod
    def commit(
        plan: Plan, requests: Sequence[Request], segments: range, result: StepResult, outputs: TokenOutputs
    ) -> list[int]:
        """Records the tokens of requests that are still steady. `segments` belong to requests that were steady when the
        plan was made. Returns those of them whose requests are no longer steady, or end with this plan."""
        not_steady = []
        columns = slice(segments.start, segments.stop)
        rows = zip(segments, requests[columns], result.token_ids[columns], strict=True)
        for segment, request, token in rows:
            if request.steady_since > plan.number:
                not_steady.append(segment)
            elif token in request.prompt.stop_ids or segment in result.failures:
                request.settle()
                not_steady.append(segment)
            else:
                if segment in result.alternatives:
                    outputs.alternatives[len(outputs.token_ids)] = result.alternatives[segment]
                outputs.request_ids.append(request.request_id)
                outputs.token_ids.append(token)
                request.tokens.append(token)
        return not_steady
