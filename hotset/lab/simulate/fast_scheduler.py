"""A scheduler for simulations, which makes no plan while nothing happens but further tokens.

Most plans only compute one more token of every decoding request, and perhaps the next chunk of one long prompt. Such
plans are *quiet*: no request is admitted, preempted or promoted, no prompt ends, and pages for all tokens are free.
What they compute follows from the first of them. They are therefore only counted. The scheduler and the ledger record
the tokens of all of them at once, before the next plan that is not quiet. Requests, tiers and times are the same as if
every plan was made; only the ids of pages can differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from hotset.base.errors import InternalError
from hotset.lab.simulate.step_clock import FIRST_ANSWER_TOKEN, QUIET_PLAN, StepWork, work_of
from hotset.schedule.plan import Plan, StepResult, TokenOutputs
from hotset.schedule.request import NEVER, FinishReason, Phase, Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.residence import Residence

NO_OUTPUTS = TokenOutputs()


@dataclass(slots=True)
class _QuietPlans:
    """Plans that were not made, because nothing happens in them, and how many more can follow."""

    left: int  # further plans that are quiet unless a request arrives
    commits_left: int  # further commits in which no answer ends and no page of an answer enters the prefix cache
    decodes: Sequence[Request]
    tiered: int  # all running requests that are tiered
    positions: int  # sum of the first positions of `decodes` in the next quiet plan
    prompt: Request | None  # each plan computes `chunk` tokens of this prompt, the next one from position `first` on
    first: int
    chunk: int
    planned: int = 0  # since the scheduler recorded such plans last
    committed: int = 0  # those of them that were committed

    def next_work(self) -> StepWork:
        """Counts one more plan, and returns its work."""
        decodes, first = len(self.decodes), self.first
        work = StepWork(
            decodes,
            self.positions / decodes if decodes else 0.0,
            min(decodes, self.tiered),
            ((first, first + self.chunk),) if self.prompt is not None else (),
        )
        self.left -= 1
        self.planned += 1
        self.positions += decodes
        self.first += self.chunk
        return work


class FastScheduler(Scheduler):
    """Skips quiet plans. It samples the tokens of answers itself, all different, so that answers share no prefix.

    It works without pipeline stages, drafts, handoffs and stop tokens. Between two plans that are not quiet, `counters`
    have all steps, but not the tokens of quiet plans.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.work = StepWork()  # of the newest plan
        self._quiet: _QuietPlans | None = None
        self._tokens: Iterator[int] = count(FIRST_ANSWER_TOKEN)
        self._prompts_added = self._tokens_released = 0  # tokens of all requests

    def plan(self) -> Plan | None:
        if not self._requests:
            return None
        if self._quiet is None or self._quiet.left == 0:
            self._end_quiet_plans()
            self._quiet = self._find_quiet_plans()
        if self._quiet is not None:
            self.work = self._quiet.next_work()
            return QUIET_PLAN
        plan = super().plan()
        if plan is not None:
            self.work = work_of(plan, self.in_residence(Residence.TIERED))
        return plan

    def commit(self, result: StepResult) -> TokenOutputs:
        """Records that the oldest plan in flight was executed. The tokens in `result` are ignored."""
        if self._in_flight:  # these were made before the quiet plans
            plan = self._in_flight[0].plan
            return super().commit(StepResult(plan.number, list(islice(self._tokens, len(plan.sampled)))))
        if self._quiet is None:
            raise InternalError("there is no plan in flight")
        if self._quiet.commits_left == 0:
            self._end_quiet_plans()
            return self.commit(result)
        self._quiet.commits_left -= 1
        self._quiet.committed += 1
        self.counters.steps += 1
        return self.take_outputs() if self._outputs else NO_OUTPUTS

    def add(self, request: Request) -> None:
        if self._quiet is not None and self._quiet.prompt is None:
            self._end_quiet_plans()  # the next plan can admit it; with a prompt in each plan, none has room for another
        super().add(request)
        self._prompts_added += len(request.tokens)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        self._end_quiet_plans()
        super().abort(request_id, reason)

    @property
    def tokens_to_prefill(self) -> int:
        quiet = self._quiet
        return super().tokens_to_prefill - (0 if quiet is None else quiet.planned * quiet.chunk)

    @property
    def context_tokens(self) -> int:
        quiet, known = self._quiet, self._prompts_added + self.counters.tokens_generated - self._tokens_released
        return known if quiet is None else known + quiet.committed * len(quiet.decodes)

    def _release(self, request: Request) -> None:
        self._tokens_released += len(request.tokens)
        super()._release(request)

    def in_residence(self, residence: Residence) -> int:
        if self._quiet is not None and residence is Residence.TIERED:
            return self._quiet.tiered
        return super().in_residence(residence)

    def audit(self) -> None:
        if self._quiet is not None and self._quiet.committed:
            self._record_committed(self._quiet)
        super().audit()

    def _find_quiet_plans(self) -> _QuietPlans | None:
        """Returns the next plans, if these are quiet. When a plan in flight is committed, nothing may happen either."""
        queues, running, waiting = self._queues, self._queues.running, self._queues.waiting
        if not running or self._preemptor.pending or len(self._requests) != len(running) + len(waiting):
            return None  # nothing to compute, or a request changes its residence or has ended
        prompt, left, next_number = None, NEVER, self._plan_numbers.next
        decodes: list[Request] = []
        rows_of: list[int] = []
        for request in running:
            rows, steady_since = request.settled_scheduled, request.steady_since
            if request.phase is Phase.DECODE:
                if steady_since != NEVER:
                    rows += next_number - steady_since
                end = min(request.publish_at, request.max_length - 1)
                if end - rows < left:
                    left = end - rows
                rows_of.append(rows)
                decodes.append(request)
            elif request.num_unsampled or len(request.tokens) - rows == 1:
                return None  # its prompt ends
            elif prompt is None:
                prompt = request
            if left <= 0:
                return None  # its answer ends, or its pages enter the prefix cache
        commits_left, first, chunk = left - 1, 0, 0
        if prompt is not None:
            first, chunk = prompt.num_scheduled, max(self._max_num_batched_tokens - len(decodes), 1)
            left = min(left, (len(prompt.tokens) - first - 1) // chunk)
            if chunk == 1:
                return None  # rare, and `work_of` takes it for a decoding request
        elif waiting and queues.free_seats:
            return None  # every plan tries to admit a request
        tiered = super().in_residence(Residence.TIERED)
        if tiered and not waiting and self._preemptor.find_promotable() is not None:
            return None
        left = self._limit_by_pages(decodes, rows_of, left)
        if left == 0:
            return None
        return _QuietPlans(left, commits_left, decodes, tiered, sum(rows_of), prompt, first, chunk)

    def _limit_by_pages(self, decodes: Sequence[Request], rows: Sequence[int], plans: int) -> int:
        """Returns `plans`, or fewer if pages for one token of each request in each of them are not free. No cached page
        is evicted for them. `rows` are the numbers of scheduled rows."""
        ledger = self._ledger
        free_host = NEVER if ledger.host is None else ledger.host.free - ledger.host.unused
        while plans > 0:
            device = host = 0
            for request, first in zip(decodes, rows, strict=True):
                if first + plans > request.holding.capacity:
                    need = ledger.pages_needed(request.holding, request.holding.residence, first + plans)
                    device, host = device + need.device, host + need.host
            if device <= ledger.device.free and host <= free_host:
                break
            plans //= 2
        return plans

    def _end_quiet_plans(self) -> None:
        """Brings the scheduler to the state that it would have if all plans had been made. Those that are not committed
        yet are made now."""
        quiet = self._quiet
        if quiet is None:
            return
        if quiet.committed:
            self._record_committed(quiet)
        self._quiet = None
        for _ in range(quiet.planned):
            if super().plan() is None:
                raise InternalError("a quiet plan has no token")

    def _record_committed(self, quiet: _QuietPlans) -> None:
        """Records the tokens of all committed quiet plans, and grants the pages of their rows."""
        plans, quiet.committed = quiet.committed, 0
        quiet.planned -= plans
        self._plan_numbers.oldest += plans
        self._plan_numbers.next += plans  # the counts of steady requests follow from this
        self._next_plan.number += plans
        for request in quiet.decodes:
            if request.steady_since == NEVER:
                request.settled_scheduled += plans
            request.tokens += islice(self._tokens, plans)
            rows, holding = request.num_scheduled, request.holding
            if rows > holding.capacity and self._ledger.grow(holding, rows) is None:
                raise InternalError("pages were free when the quiet plans began")
        self.counters.tokens_generated += plans * len(quiet.decodes)
        if (prompt := quiet.prompt) is not None:
            prompt.num_scheduled += plans * quiet.chunk
            self.counters.tokens_prefilled += plans * quiet.chunk
            if prompt.num_scheduled >= prompt.publish_at:
                self._prefixes.publish(prompt, prompt.num_scheduled)
