"""The scheduler's life under random arrivals, aborts and several plans in flight, against a runner of plain lists.

The runner model checks every plan as it is carried out: rows of a request are computed once, in order, in pages that
it alone owns, and the token fed at each position is the one that the request really has there.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotset.base.errors import IllegalTransition
from hotset.base.sampling import SamplingParams
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Committed, Plan, StepResult
from hotset.schedule.request import Phase, Request
from hotset.schedule.scheduler import Scheduler

STOP = 7


def next_token(context: tuple[int, ...]) -> int:
    """A deterministic model: the token depends on the whole context."""
    return hash(context) % 23


class ListRunner:
    """Carries out plans on plain lists: what is in which row, and which seat has which pages."""

    def __init__(self, page_rows: int) -> None:
        self.page_rows = page_rows
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.memory: dict[int, tuple[int, ...]] = {}  # device row -> the context up to it, which stands for its KV
        self.number = -1

    def submit(self, plan: Plan) -> StepResult:
        assert plan.number == self.number + 1, "plans are numbered in order"
        self.number = plan.number
        for admission in plan.admissions:
            self.tokens[admission.seat] = list(admission.token_ids)
            self.pages[admission.seat] = []
        for growth in plan.growth:
            assert growth.first == len(self.pages[growth.seat])
            self.pages[growth.seat] += growth.pages
        results = []
        for at, (seat, start, count) in enumerate(zip(plan.seats, plan.starts, plan.counts, strict=True)):
            context = self._compute(seat, start, count)
            if at in plan.sampled:
                results.append(next_token(context))
                self.tokens[seat].append(results[-1])
        assert len(plan.seats) == len(set(plan.seats)), "a seat stands twice in one plan"
        return StepResult(plan.number, results)

    def _compute(self, seat: int, start: int, count: int) -> tuple[int, ...]:
        def row(position: int) -> int:
            return self.pages[seat][position // self.page_rows] * self.page_rows + position % self.page_rows

        for position in range(start, start + count):
            self.memory[row(position)] = tuple(self.tokens[seat][: position + 1])
        for position in range(start + count):
            assert self.memory[row(position)] == tuple(self.tokens[seat][: position + 1]), (
                "a row was overwritten or lost"
            )
        return tuple(self.tokens[seat][: start + count])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(3, 12),
        page_rows=st.integers(1, 4),
        seats=st.integers(1, 4),
        step_rows=st.integers(1, 9),
        depth=st.integers(1, 3),
    )
    def start(self, pages: int, page_rows: int, seats: int, step_rows: int, depth: int) -> None:
        self.capacity = pages * page_rows
        self.scheduler = Scheduler(PageAllocator(pages), page_rows, seats, step_rows)
        self.runner = ListRunner(page_rows)
        self.depth = depth
        self.in_flight: deque[StepResult] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = f"r{len(self.prompts)}"
        length = data.draw(st.integers(1, self.capacity))
        limit = data.draw(st.integers(length + 1, self.capacity + 1))
        self.prompts[name] = data.draw(st.lists(st.integers(0, 22), min_size=length, max_size=length))
        self.limits[name] = limit
        self.answers[name] = []
        self.scheduler.add(Request(name, self.prompts[name], SamplingParams(seed=0), frozenset({STOP}), limit))

    @rule(data=st.data())
    @precondition(lambda self: self.prompts)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.aborted.add(name)
        self.scheduler.abort(name)

    @rule()
    def submit(self) -> None:
        if len(self.in_flight) < self.depth and (plan := self.scheduler.plan()) is not None:
            self.in_flight.append(self.runner.submit(plan))

    @rule()
    def commit(self) -> None:
        if self.in_flight:
            self.take(self.scheduler.commit(self.in_flight.popleft()))
        else:
            self.take(Committed(finished=self.scheduler.take_ended()))

    def take(self, news: Committed) -> None:
        for name, token in zip(news.request_ids, news.token_ids, strict=True):
            assert name not in self.reasons, "a token after the end"
            self.answers[name].append(token)
        for name, reason in news.finished.items():
            assert name not in self.reasons, "ended twice"
            self.reasons[name] = reason

    @invariant()
    def audits(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.audit()

    def teardown(self) -> None:
        """Everything that was begun ends, with the tokens of the model run alone, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.submit()
            self.commit()
        assert self.scheduler.idle, "a request never ends"
        assert self.scheduler._pages.held == 0
        for name, prompt in self.prompts.items():
            expected = alone(prompt, self.limits[name])
            if self.reasons[name] == "abort":
                assert name in self.aborted
                assert self.answers[name] == expected[: len(self.answers[name])]
            else:
                assert self.answers[name] == expected
                assert self.reasons[name] == ("stop" if expected[-1] == STOP else "length")


def alone(prompt: list[int], limit: int) -> list[int]:
    context = list(prompt)
    while len(context) < limit:
        context.append(next_token(tuple(context)))
        if context[-1] == STOP:
            break
    return context[len(prompt) :]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=60, deadline=None, derandomize=True)


def make(pages: int = 4, page_rows: int = 2, seats: int = 4, step_rows: int = 64) -> tuple[Scheduler, ListRunner]:
    return Scheduler(PageAllocator(pages), page_rows, seats, step_rows), ListRunner(page_rows)


def request(name: str, length: int, limit: int) -> Request:
    return Request(name, list(range(8, 8 + length)), SamplingParams(seed=0), frozenset(), limit)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_youngest_gives_way_and_the_oldest_hardly_waits(depth: int) -> None:
    scheduler, runner = make(pages=11, page_rows=2)
    scheduler.add(request("old", 4, 20))
    scheduler.add(request("young", 2, 20))
    in_flight: deque[StepResult] = deque()
    order: list[str] = []
    left_out, worst, old_seat = 0, 0, None
    while not scheduler.idle:
        while len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            if old_seat is None:
                old_seat = plan.seats[0]
            left_out = 0 if old_seat in plan.seats else left_out + 1
            worst = max(worst, left_out if not order else 0)
            in_flight.append(runner.submit(plan))
        order += scheduler.commit(in_flight.popleft()).finished
        scheduler.audit()
    assert order == ["old", "young"]
    assert scheduler.counters.preemptions > 0
    assert worst <= depth, f"the oldest was left out of {worst} plans in a row"


def test_a_small_step_bounds_prompts_but_never_decoding() -> None:
    scheduler, runner = make(pages=400, page_rows=2, seats=8, step_rows=3)
    for number in range(5):
        scheduler.add(request(f"r{number}", 4, 100))
    counts = []
    for _ in range(30):
        plan = scheduler.plan()
        assert plan is not None
        counts.append(list(plan.counts))
        scheduler.commit(runner.submit(plan))
    assert max(sum(count for count in each if count > 1) for each in counts) <= 3
    assert counts[-1] == [1] * 5, "all five decode in the end, though a step has only three rows"


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    scheduler, runner = make(pages=64, page_rows=2, seats=2, step_rows=5)
    scheduler.add(request("short", 2, 40))
    first = scheduler.plan()
    assert first is not None
    scheduler.commit(runner.submit(first))
    scheduler.add(request("long", 12, 20))
    shapes = []
    for _ in range(4):
        plan = scheduler.plan()
        assert plan is not None
        shapes.append(list(plan.counts))
        scheduler.commit(runner.submit(plan))
    assert shapes == [[1, 4], [1, 4], [1, 4], [1, 1]]


def test_no_row_is_computed_past_the_longest_length() -> None:
    scheduler, runner = make(pages=64, page_rows=2)
    scheduler.add(request("r", 3, 6))
    plans = []
    while (plan := scheduler.plan()) is not None:  # all in flight at once
        plans.append(runner.submit(plan))
    assert len(plans) == 3
    for result in plans:
        news = scheduler.commit(result)
    assert news.finished == {"r": "length"}


def test_a_phase_change_that_no_table_joins_is_refused() -> None:
    moving = request("r", 1, 2)
    with pytest.raises(IllegalTransition):
        moving.move(Phase.DECODE)


def test_plans_commit_in_order() -> None:
    scheduler, runner = make(pages=64)
    scheduler.add(request("r", 3, 8))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and second is not None
    results = [runner.submit(first), runner.submit(second)]
    with pytest.raises(AssertionError, match="before"):
        scheduler.commit(results[1])
