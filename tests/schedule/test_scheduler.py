"""The scheduler under random arrivals, aborts and several plans in flight, against a runner of plain lists.

The runner model checks every plan as it is carried out: rows of a request are computed once, in order, in pages that
it alone owns, and the token fed at each position is the one that the request really has there.
"""

from collections import Counter, deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule.list_runner import ListRunner, next_token

from hotset.base.config import LandingChoice, TiersChoice, TiersMode
from hotset.base.errors import IllegalTransition
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Plan, PromptComputed, Reservation, RowsWritten, StepResult, TokenOutputs, Withdrawal
from hotset.schedule.request import Phase, Request
from hotset.schedule.scheduler import MAX_ATTEMPTS, Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence

STOP = 7


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(3, 40),
        page_rows=st.integers(1, 4),
        seats=st.integers(1, 4),
        step_tokens=st.integers(1, 9),
        depth=st.integers(1, 3),
        host_pages=st.sampled_from([None, 0, 5, 20, 60]),
        slots=st.sampled_from([0, 2, 3, 5]),
        mode=st.sampled_from(["auto", "auto", "always"]),
        promote_after_plans=st.integers(0, 3),
        for_peers=st.sampled_from([False, False, True]),
    )
    def start(
        self, pages: int, page_rows: int, seats: int, step_tokens: int, depth: int, host_pages: int | None, slots: int,
        mode: TiersMode, promote_after_plans: int, for_peers: bool,
    ) -> None:  # fmt: skip
        self.for_peers = for_peers and host_pages is not None
        keys_per_page = 5 if slots else 0
        geometry = Geometry(page_rows, 2, 64 * page_rows, keys_per_page, slots, topk=min(2, slots))
        host = None if host_pages is None else PageAllocator(pages + host_pages)
        self.ledger = Ledger(geometry, PageAllocator(pages), host)
        self.mode: TiersMode = mode if self.ledger.tiers else "auto"
        self.resident = longest(geometry.resident_pages, pages)
        tiered = longest(geometry.streamed_pages, pages) if self.ledger.tiers else 0
        self.capacity = tiered if self.mode == "always" else max(self.resident, tiered)
        if host is not None:
            self.capacity = min(self.capacity, host.capacity * page_rows)
        self.scheduler = Scheduler(self.ledger, seats, step_tokens, self.mode, promote_after_plans)
        self.runner = ListRunner(geometry)
        self.depth = depth
        self.in_flight: deque[StepResult] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.fetched: list[Reservation] = []  # prompts that peers are computing
        self.given_up: list[Reservation] = []  # reservations whose peers may still write
        self.quarantine = False  # whether pages were ever quarantined
        self.lost: set[str] = set()
        self.withdrawn: set[tuple[str, int]] = set()
        self.sent: dict[str, int] = {}  # announced rows of each prompt computed for a peer
        self.handed: dict[str, int] = {}  # first tokens of those prompts

    @rule(data=st.data())
    @precondition(lambda self: not self.for_peers)
    def add(self, data: st.DataObject) -> None:
        name = f"r{len(self.prompts)}"
        choices = ["auto", "tiered"] if self.ledger.tiers else ["auto"]
        tiers: TiersChoice = data.draw(st.sampled_from(choices if self.mode == "always" else [*choices, "resident"]))
        capacity = min(self.capacity, self.resident) if tiers == "resident" else self.capacity
        if tiers == "tiered":
            capacity = min(capacity, longest(self.ledger.geometry.streamed_pages, self.ledger.device.capacity))
        if capacity < 1:
            return
        length = data.draw(st.integers(1, min(capacity, 40)))
        limit = data.draw(st.integers(length + 1, min(capacity, 60) + 1))
        self.prompts[name] = data.draw(st.lists(st.integers(0, 22), min_size=length, max_size=length))
        self.limits[name] = limit
        self.answers[name] = []
        landing: LandingChoice = "auto"
        elsewhere = data.draw(st.sampled_from([None, "peer"]))
        if elsewhere is not None:
            possible = ["auto"] + ["host"] * (self.ledger.host is not None)
            possible += ["device"] * (tiers != "tiered" and self.mode != "always" and limit <= self.resident + 1)
            landing = data.draw(st.sampled_from(possible))
        prompt = PromptSpec(tuple(self.prompts[name]), SamplingParams(seed=0), frozenset({STOP}))
        self.scheduler.add(Request(name, prompt, limit, tiers, elsewhere, landing))

    @rule(data=st.data())
    @precondition(lambda self: self.for_peers)
    def add_for_peer(self, data: st.DataObject) -> None:
        """A decode worker requests a prompt."""
        length = data.draw(st.integers(1, max(1, min(self.capacity, 40))))
        if length > self.capacity:
            return
        name = f"peer{len(self.sent)}"
        self.sent[name] = 0
        self.prompts[name] = data.draw(st.lists(st.integers(0, 22), min_size=length, max_size=length))
        prompt = PromptSpec(tuple(self.prompts[name]), SamplingParams(seed=0))
        self.scheduler.add(Request(name, prompt, length + 1, for_peer=True))

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def drop(self, data: st.DataObject) -> None:
        self.scheduler.drop_prompt(data.draw(st.sampled_from(sorted(self.sent))))

    @rule(data=st.data())
    @precondition(lambda self: self.fetched)
    def arrive(self, data: st.DataObject) -> None:
        """A peer has finished or failed. Its report of the attempt arrives twice."""
        fetched = data.draw(st.sampled_from(self.fetched))
        self.fetched.remove(fetched)
        name, attempt = fetched.request_id, fetched.attempt
        if data.draw(st.integers(0, 2)):
            self.land(fetched)
            return
        quiesced, retry = data.draw(st.booleans()), data.draw(st.booleans())
        if not quiesced:
            self.given_up.append(fetched)
            self.quarantine = True
        if not retry or attempt == MAX_ATTEMPTS:
            self.lost.add(name)
        for _ in range(2):
            self.scheduler.fail_landing(name, attempt, quiesced=quiesced, retry=retry)

    @rule(data=st.data())
    @precondition(lambda self: self.given_up)
    def write_late(self, data: st.DataObject) -> None:
        late = data.draw(st.sampled_from(self.given_up))
        self.runner.scribble(late)
        if data.draw(st.booleans()):
            self.given_up.remove(late)
            self.scheduler.end_quarantine(late.request_id, late.attempt)

    def land(self, fetched: Reservation) -> None:
        self.runner.land(fetched)
        for _ in range(2):
            self.scheduler.complete_landing(
                fetched.request_id, fetched.attempt, next_token(fetched.prompt.token_ids), None
            )
        if (fetched.request_id, fetched.attempt) in self.withdrawn:
            self.runner.landed -= self.runner.device_pages(fetched)

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
            self.check_sent(plan)
        for outgoing in self.scheduler.take_landing_updates():
            if isinstance(outgoing, Withdrawal):
                self.withdrawn.add((outgoing.request_id, outgoing.attempt))
            else:
                self.fetched.append(outgoing)

    def check_sent(self, plan: Plan) -> None:
        """Announced rows are on the host, continue the rows announced before, and end with the first token."""
        for sent in plan.announcements:
            prompt = self.prompts[sent.request_id]
            match sent:
                case RowsWritten(name, first, last, pages):
                    assert first == self.sent[name], "rows are announced once, in order"
                    self.sent[name] = last
                    for position in range(first, last):
                        assert self.runner.on_host(pages, position) == tuple(prompt[: position + 1])
                case PromptComputed(name, token, _):
                    assert self.sent[name] == len(prompt) and name not in self.handed
                    assert token == next_token(tuple(prompt))
                    self.handed[name] = token

    @rule()
    def commit(self) -> None:
        if self.in_flight:
            self.take(self.scheduler.commit(self.in_flight.popleft()))
        else:
            self.take(self.scheduler.take_outputs())

    @rule(rounds=st.integers(2, 25))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.submit()
            self.commit()
            self.scheduler.audit()

    def take(self, news: TokenOutputs) -> None:
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
        """Every request ends with the tokens that the model computes for it alone, and all pages are released."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.submit()
            self.commit()
            while self.fetched:
                self.land(self.fetched.pop())
            for name in self.handed:
                self.scheduler.drop_prompt(name)
        assert self.scheduler.idle, "a request never ends"
        for late in self.given_up:
            self.scheduler.end_quarantine(late.request_id, late.attempt)
        self.scheduler.audit()
        assert self.ledger.device.held == 0
        assert self.ledger.host is None or self.ledger.host.held == 0
        counters = self.scheduler.counters
        for change in ("demotions", "promotions", "parks", "resumes", "recomputes", "landed", "lost", "handed_off"):
            SEEN[change] += getattr(counters, change)
        for name, prompt in self.prompts.items():
            if name in self.sent:
                continue
            expected = alone(prompt, self.limits[name])
            if self.reasons[name] == "abort":
                assert name in self.aborted
                assert self.answers[name] == expected[: len(self.answers[name])]
            elif self.reasons[name] in ("lost", "no_room"):
                known = name in self.lost if self.reasons[name] == "lost" else self.quarantine
                assert known, "no landing was lost, or pages were not quarantined"
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


def longest(pages_of: Callable[[int], int], pages: int) -> int:
    tokens = 0
    while pages_of(tokens + 1) <= pages:
        tokens += 1
    return tokens


CHANGES = ("demotions", "parks", "resumes", "recomputes", "landed", "lost", "handed_off")
SEEN: Counter[str] = Counter()
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)


def test_every_change_of_residence_happened_above() -> None:
    """Runs after the state machine, in the same process: its examples must have covered every change."""
    assert not SEEN or all(SEEN[change] for change in CHANGES), SEEN


def make(pages: int = 4, page_rows: int = 2, seats: int = 4, step_tokens: int = 64) -> tuple[Scheduler, ListRunner]:
    geometry = Geometry(page_rows, 1, 16 * page_rows)
    return Scheduler(Ledger(geometry, PageAllocator(pages), None), seats, step_tokens), ListRunner(geometry)


def request(name: str, length: int, limit: int) -> Request:
    return Request(name, PromptSpec(tuple(range(8, 8 + length)), SamplingParams(seed=0)), limit)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_burst_demotes_and_its_end_promotes(depth: int) -> None:
    geometry = Geometry(2, 2, 64, keys_per_page=8, slots=4, topk=2)
    ledger = Ledger(geometry, PageAllocator(44), PageAllocator(80))
    scheduler, runner = Scheduler(ledger, 4, 64), ListRunner(geometry)
    scheduler.add(request("long", 40, 64))
    in_flight: deque[StepResult] = deque()
    residences, finished = [], []
    for step in range(200):
        if step == 3:
            scheduler.add(request("burst", 30, 34))
        while len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            in_flight.append(runner.submit(plan))
        finished += list(scheduler.commit(in_flight.popleft()).finished)
        scheduler.audit()
        if scheduler.idle:
            break
        if scheduler.in_residence(Residence.TIERED):
            residences.append("tiered")
        elif residences:
            residences.append("resident")
    assert finished == ["burst", "long"]
    assert residences[0] == "tiered" and residences[-1] == "resident", "the long request is demoted, then promoted"
    assert (scheduler.counters.demotions, scheduler.counters.promotions) == (1, 1)
    assert scheduler.counters.parks == scheduler.counters.recomputes == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_youngest_is_preempted_and_the_oldest_hardly_waits(depth: int) -> None:
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
    assert scheduler.counters.recomputes > 0
    assert worst <= depth, f"the oldest was left out of {worst} plans in a row"


def test_the_token_budget_limits_prompts_but_never_decoding() -> None:
    scheduler, runner = make(pages=400, page_rows=2, seats=8, step_tokens=3)
    for number in range(5):
        scheduler.add(request(f"r{number}", 4, 100))
    counts = []
    for _ in range(30):
        plan = scheduler.plan()
        assert plan is not None
        counts.append(list(plan.counts))
        scheduler.commit(runner.submit(plan))
    assert max(sum(count for count in each if count > 1) for each in counts) <= 3
    assert counts[-1] == [1] * 5, "all five decode in the end, though a step has only three tokens"


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler, runner = make(pages=64, page_rows=2, seats=2, step_tokens=5)
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


def test_no_token_is_computed_past_the_maximal_length() -> None:
    scheduler, runner = make(pages=64, page_rows=2)
    scheduler.add(request("r", 3, 6))
    plans = []
    while (plan := scheduler.plan()) is not None:  # all in flight at once
        plans.append(runner.submit(plan))
    assert len(plans) == 3
    for result in plans:
        news = scheduler.commit(result)
    assert news.finished == {"r": "length"}


def test_a_phase_change_outside_the_table_is_refused() -> None:
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


def test_with_several_stages_plans_in_flight_share_no_token() -> None:
    """The first stage needs a token before it computes the next, so decoding requests alternate between two plans.

    Chunks of one prompt follow each other without waiting.
    """
    geometry = Geometry(2, 1, 32)
    scheduler = Scheduler(Ledger(geometry, PageAllocator(200), None), 5, 4, stages=2)
    runner = ListRunner(geometry)
    scheduler.add(request("long", 12, 20))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None and second is not None
    assert (first.starts, first.counts, second.starts, second.counts) == ([0], [4], [4], [4])
    for plan in (first, second):
        scheduler.commit(runner.submit(plan))
    for name in "abcd":
        scheduler.add(request(name, 1, 20))
    in_flight: deque[Plan] = deque()
    shared, decoding = 0, []
    for _ in range(30):
        while len(in_flight) < 2 and (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        if len(in_flight) == 2 and len(scheduler._queues.running) == 5:
            shared += len(set(in_flight[0].seats) & set(in_flight[1].seats))
            decoding.append(len(in_flight[1].seats))
        if in_flight:
            scheduler.commit(runner.submit(in_flight.popleft()))
    assert not shared and len(decoding) > 8
    assert set(decoding[4:]) <= {2, 3}, decoding
