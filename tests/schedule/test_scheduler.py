"""The scheduler under random arrivals, aborts and several plans in flight, with a runner that uses no tensors.

`ListRunner` checks every row that attention could read in each plan. A page with two owners, or a row that was computed
from wrong tokens, fails a check.
"""

from collections import Counter, deque
from collections.abc import Callable
from random import Random

import pytest
from imposed_drafts import ImposedDrafter
from random_rules import RandomMachine, rule, run_example
from schedule.list_runner import ListRunner, answer_alone, execute_next, next_token

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import IllegalTransition
from hotset.base.request_options import LandingChoice, RequestOptions, TiersChoice
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.drafts.speculation import Speculation
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.handoffs import CancelFetch, FirstTokenSampled, HandoffKey, Reservation, RowsComputed
from hotset.schedule.plan import Plan, StepResult, TokenOutputs
from hotset.schedule.request import Phase, Request
from hotset.schedule.scheduler import MAX_ATTEMPTS, Scheduler
from hotset.tiers.ledger import LAND_ANYWHERE, LandingPolicy, Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache
from hotset.tiers.residence import Residence

STOP = 7
POLICIES = [LAND_ANYWHERE, LAND_ANYWHERE, LandingPolicy(keys_on_host=True), LandingPolicy(False, keys_on_host=True)]
LANDINGS = ("landings after a prefix", "landings with keys on the host", "landings beside a device without writers")


class SchedulerMachine(RandomMachine):
    """Random requests and events. If `for_peers`, the scheduler is that of a prefill worker."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        pages, page_rows = random.randint(3, 40), random.randint(1, 4)
        host_pages, slots = random.choice([None, 0, 5, 20, 60]), random.choice([0, 2, 3, 5])
        mode: TiersMode = random.choice(["auto", "auto", "always"])
        policy = random.choice(POLICIES)
        self.for_peers = host_pages is not None and random.random() < 0.3
        keys_per_block = 5 if slots else 0
        max_drafts = random.choice([0, 0, 1, 2, 3, 5])
        geometry = Geometry(
            page_rows, 2, 64 * page_rows, keys_per_block, slots, topk=min(2, slots), max_drafts=max_drafts
        )
        host = None if host_pages is None else PrefixCache(pages + host_pages)
        self.ledger = Ledger(geometry, PageAllocator(pages), host, policy)
        self.mode: TiersMode = mode if self.ledger.tiers else "auto"
        self.resident = longest(geometry.resident_pages, pages)
        tiered = longest(geometry.streamed_pages, pages) if self.ledger.tiers else 0
        self.capacity = tiered if self.mode == "always" else max(self.resident, tiered)
        if host is not None:
            self.capacity = min(self.capacity, host.capacity * page_rows)
        seats, step_tokens = random.randint(1, 4), random.randint(1, 9)
        speculation: Speculation | None = None
        if max_drafts:
            config = EngineConfig(
                max_num_seqs=seats, max_num_batched_tokens=step_tokens, speculate=max_drafts, speculate_by="lookup"
            )
            drafter = ImposedDrafter(lambda _name, tokens: next_token(tuple(tokens)), 23, random)
            speculation = Speculation(DraftSettings.of(config), self.ledger, drafter=drafter)
        self.scheduler = Scheduler(
            self.ledger,
            seats=seats,
            max_num_batched_tokens=step_tokens,
            tiers=self.mode,
            promote_after_plans=random.randint(0, 3),
            hasher=PageHasher("model", page_rows) if random.random() < 0.7 else None,
            extend_locally=random.choice([0, 4]),
            speculation=speculation,
        )
        if speculation is not None and random.random() < 0.5:
            speculation.choice.choose = lambda requests: random.choice([0, max_drafts])  # type: ignore[method-assign]
        self.runner = ListRunner(geometry, policy)
        self.depth = random.randint(1, 3)
        self.in_flight: deque[StepResult] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.reserved: list[Reservation] = []  # received by peers, for landings that have not ended
        self.given_up: list[Reservation] = []  # reservations of failed landings whose peers may still write
        self.quarantine = False  # whether pages were ever quarantined
        self.lost: set[str] = set()  # requests with a failed landing that is not retried
        self.cancelled: set[HandoffKey] = set()
        # Prompts that are sent to peers from the device: number of announced rows, pages of rows and of index keys.
        self.on_device: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self.announced: dict[str, int] = {}  # number of announced rows of each prompt computed for a peer
        self.first_tokens: dict[str, int] = {}  # first token announced for each of those prompts
        self.scored: dict[str, int] = {}  # log-probabilities reported for each prompt that asks for them
        self.prompt_only: set[str] = set()  # requests with max_tokens 0

    @rule(lambda self: not self.for_peers)
    def add(self) -> None:
        name = f"r{len(self.prompts)}"
        choices = ["auto", "tiered"] if self.ledger.tiers else ["auto"]
        tiers: TiersChoice = self.random.choice(choices if self.mode == "always" else [*choices, "resident"])
        capacity = min(self.capacity, self.resident) if tiers == "resident" else self.capacity
        if tiers == "tiered":
            capacity = min(capacity, longest(self.ledger.geometry.streamed_pages, self.ledger.device.capacity))
        if capacity < 1:
            return
        self.prompts[name] = self.make_prompt(self.random.randint(1, min(capacity, 40)))
        length = len(self.prompts[name])
        limit = self.random.randint(length + 1, min(capacity, 60) + 1)
        self.limits[name] = limit
        self.answers[name] = []
        landing: LandingChoice = "auto"
        on_device, on_host = self.ledger.landing.on_device, self.ledger.host is not None
        prefill_at = self.random.choice([None, "peer"]) if on_device or on_host else None
        if prefill_at is not None:
            resident = tiers != "tiered" and self.mode != "always" and limit <= self.resident + 1
            possible = ["auto"] + ["host"] * on_host + ["device"] * (on_device and resident)
            landing = self.random.choice(possible)
        params = SamplingParams(seed=0)
        if prefill_at is None and self.flip():
            self.scored[name] = 0
            if limit == length + 1 and length % 2:
                self.prompt_only.add(name)
            params = SamplingParams(seed=0, prompt_logprobs=0, max_tokens=0 if name in self.prompt_only else None)
        prompt = PromptSpec(tuple(self.prompts[name]), params, frozenset({STOP}), self.random.choice(SALTS))
        self.scheduler.add(Request(name, prompt, limit, RequestOptions(tiers, landing, prefill_at=prefill_at)))

    def make_prompt(self, length: int) -> list[int]:
        """Returns a prompt of at most `length` tokens. Most begin like an earlier conversation."""
        earlier = [[*prompt, *self.answers.get(name, [])] for name, prompt in self.prompts.items()]
        known = self.random.choice([[], *earlier])
        prompt = known[: self.random.randint(0, min(len(known), length))]
        unknown = self.random.randint(not prompt, length - len(prompt))
        return prompt + [self.random.randint(0, 22) for _ in range(unknown)]

    @rule(lambda self: self.for_peers)
    def add_for_peer(self) -> None:
        """Adds a prompt that a decode worker has requested."""
        length = self.random.randint(1, max(1, min(self.capacity, 40)))
        if length > self.capacity:
            return
        name = f"peer{len(self.announced)}"
        self.announced[name] = 0
        self.prompts[name] = self.make_prompt(length)
        length = len(self.prompts[name])
        prompt = PromptSpec(tuple(self.prompts[name]), SamplingParams(seed=0), cache_salt=self.random.choice(SALTS))
        stays = self.random.random() < 0.5
        self.scheduler.add(
            Request(name, prompt, length + 1, for_peer=("127.0.0.1:1", HandoffKey(name, 0)), stays_on_device=stays)
        )

    @rule(lambda self: self.announced)
    def drop(self) -> None:
        self.drop_prompt(self.random.choice([*self.announced]))

    def drop_prompt(self, name: str) -> None:
        self.on_device.pop(name, None)
        self.scheduler.drop_prompt(name)

    @rule(lambda self: self.reserved)
    def end_landing(self) -> None:
        """Completes a landing or lets it fail. The scheduler receives the report twice."""
        reservation = self.random.choice(self.reserved)
        self.reserved.remove(reservation)
        name, attempt = reservation.key.request_id, reservation.key.attempt
        if self.random.random() < 0.7:
            self.land(reservation)
            return
        quiesced, retry = self.flip(), self.flip()
        if not quiesced:
            self.given_up.append(reservation)
            self.quarantine = True
        if not retry or attempt == MAX_ATTEMPTS:
            self.lost.add(name)
        for _ in range(2):
            self.scheduler.fail_landing(name, attempt, quiesced=quiesced, retry=retry)

    @rule(lambda self: self.given_up)
    def write_late(self) -> None:
        """Lets the peer of a failed landing write to the quarantined pages. In some examples, the peer then stops."""
        late = self.random.choice(self.given_up)
        self.runner.write_late(late)
        if self.flip():
            self.given_up.remove(late)
            self.scheduler.end_quarantine(late.key.request_id, late.key.attempt)

    def land(self, reservation: Reservation) -> None:
        self.runner.land(reservation)
        SEEN["landings with keys on the host"] += self.runner.keys_on_host(reservation)
        SEEN["landings beside a device without writers"] += not self.ledger.landing.on_device
        for _ in range(2):
            first_token = next_token(reservation.prompt.token_ids)
            self.scheduler.complete_landing(reservation.key.request_id, reservation.key.attempt, first_token, None)
        if reservation.key in self.cancelled:
            self.runner.landed -= self.runner.device_pages(reservation)

    @rule(lambda self: self.prompts)
    def abort(self) -> None:
        name = self.random.choice([*self.prompts])
        self.aborted.add(name)
        self.on_device.pop(name, None)
        self.scheduler.abort(name)

    @rule()
    def submit(self) -> None:
        if len(self.in_flight) < self.depth and (plan := self.scheduler.plan()) is not None:
            self.in_flight.append(self.runner.submit(plan))
            self.check_announcements(plan)
        for outgoing in self.scheduler.take_landing_updates():
            if isinstance(outgoing, CancelFetch):
                self.cancelled.add(outgoing.key)
            else:
                self.check_reservation(outgoing)
                self.reserved.append(outgoing)

    def check_reservation(self, reservation: Reservation) -> None:
        """Checks that the peer gets pages for all rows that it writes, and none that is in the prefix cache."""
        unknown = len(reservation.prompt) - reservation.first
        SEEN["landings after a prefix"] += reservation.first > 0
        assert len(reservation.row_pages) == self.ledger.geometry.row_pages(unknown)
        if self.ledger.host is not None and not reservation.on_device:
            assert not {*reservation.row_pages} & self.ledger.host.users().keys(), "a peer can write to a shared page"

    def check_announcements(self, plan: Plan) -> None:
        """Checks that rows are announced in order, are on the host, and precede the announcement of the first token."""
        for announcement in plan.announcements:
            name = announcement.key.request_id
            prompt = self.prompts[name]
            match announcement:
                case RowsComputed(first=first, last=last, pages=pages, device_pages=device_pages):
                    assert first == self.announced[name], "rows were announced twice or out of order"
                    self.announced[name] = last
                    for position in range(first, last):
                        assert self.runner.host_row(pages, position) == tuple(prompt[: position + 1])
                    if device_pages is not None:
                        self.on_device[name] = last, device_pages.rows, device_pages.keys
                        SEEN["prompts on the device"] += 1
                case FirstTokenSampled(token_id=token):
                    assert self.announced[name] == len(prompt) and name not in self.first_tokens
                    assert token == next_token(tuple(prompt))
                    self.first_tokens[name] = token

    @rule()
    def commit(self) -> None:
        if self.in_flight:
            self.record(self.scheduler.commit(self.in_flight.popleft()))
        else:
            self.record(self.scheduler.take_outputs())

    @rule()
    def run(self) -> None:
        for _ in range(self.random.randint(2, 25)):
            self.submit()
            self.commit()
            self.scheduler.audit()

    def record(self, outputs: TokenOutputs) -> None:
        for name, columns in outputs.prompt_logprobs:
            first = self.scored[name] + 1
            assert [*columns.ranks] == [*range(first, first + len(columns))], "a log-probability came twice or never"
            assert name not in self.reasons and not self.answers[name], (
                "a log-probability came after a token or the end"
            )
            self.scored[name] += len(columns)
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert name not in self.reasons, "a request got a token after its end"
            assert self.scored.get(name) in (None, len(self.prompts[name]) - 1), "a token came before log-probabilities"
            self.answers[name].append(token)
        for name, reason in outputs.finished.items():
            assert name not in self.reasons, "a request ended twice"
            self.reasons[name] = reason

    def check(self) -> None:
        """Checks the invariants, and that prompts stay on the device until they are dropped."""
        self.scheduler.audit()
        for name, (last, row_pages, key_pages) in self.on_device.items():
            for position in range(last):
                expected = tuple(self.prompts[name][: position + 1])
                assert self.runner.device_row(row_pages, position) == expected, "a row for a peer has changed"
                for key in self.runner._keys_at(key_pages, position):
                    assert self.runner.keys[key] == expected, "an index key for a peer has changed"

    def finish(self) -> None:
        """Runs all requests to their end. Checks their answers, and that no page is held afterwards."""
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.submit()
            self.commit()
            while self.reserved:
                self.land(self.reserved.pop())
            for name in self.first_tokens:
                self.drop_prompt(name)
        assert self.scheduler.idle, "a request did not end within 5000 steps"
        for late in self.given_up:
            self.scheduler.end_quarantine(late.key.request_id, late.key.attempt)
        self.scheduler.audit()
        assert self.ledger.device.held == 0
        assert self.ledger.host is None or self.ledger.host.held == 0
        counters = self.scheduler.counters
        for change in CHANGES:
            SEEN[change] += getattr(counters, change)
        for name, prompt in self.prompts.items():
            if name in self.announced:
                continue
            expected = [] if name in self.prompt_only else answer_alone(prompt, self.limits[name], STOP)
            if self.reasons[name] == "abort":
                assert name in self.aborted
                assert self.answers[name] == expected[: len(self.answers[name])]
            elif self.reasons[name] in ("lost", "no_room"):
                justified = name in self.lost if self.reasons[name] == "lost" else self.quarantine
                assert justified, "a request ended as lost or no_room without a failed landing or quarantined pages"
                assert self.answers[name] == expected[: len(self.answers[name])]
            else:
                assert self.answers[name] == expected
                assert self.reasons[name] == ("stop" if expected[-1:] == [STOP] else "length")
                assert self.scored.get(name) in (None, len(prompt) - 1)


def longest(pages_of: Callable[[int], int], pages: int) -> int:
    """Returns the largest number of tokens that need at most `pages` pages."""
    tokens = 0
    while pages_of(tokens + 1) <= pages:
        tokens += 1
    return tokens


# Promotions are too rare in random examples; a separate test covers them.
CHANGES = ("demotions", "parks", "resumes", "recomputes", "landed", "lost", "handed_off", "tokens_reused", "extended")
SALTS = ("", "", "salt")
SEEN: Counter[str] = Counter()  # how often each change has happened in all examples


@pytest.mark.parametrize("examples", [120, pytest.param(5000, marks=pytest.mark.slow)])
def test_requests_get_their_answers_and_no_page_is_lost_in_any_order_of_events(examples: int) -> None:
    SEEN.clear()
    for seed in range(examples):
        run_example(SchedulerMachine, seed, rules=40)
    missing = [change for change in (*CHANGES, *LANDINGS, "prompts on the device") if not SEEN[change]]
    assert not missing, f"changes that never happened: {missing}"


def make(pages: int = 4, page_rows: int = 2, seats: int = 4, step_tokens: int = 64) -> tuple[Scheduler, ListRunner]:
    geometry = Geometry(page_rows, 1, 16 * page_rows)
    return Scheduler(Ledger(geometry, PageAllocator(pages), None), seats, step_tokens), ListRunner(geometry)


def request(name: str, length: int, limit: int) -> Request:
    return Request(name, PromptSpec(tuple(range(8, 8 + length)), SamplingParams(seed=0)), limit)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_request_is_demoted_during_a_burst_and_promoted_after_it(depth: int) -> None:
    geometry = Geometry(2, 2, 64, keys_per_block=8, slots=4, topk=2)
    ledger = Ledger(geometry, PageAllocator(44), PrefixCache(80))
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
        if scheduler.queues.count(Residence.TIERED):
            residences.append("tiered")
        elif residences:
            residences.append("resident")
    assert finished == ["burst", "long"]
    assert residences[0] == "tiered" and residences[-1] == "resident", "the request was not demoted and promoted"
    assert (scheduler.counters.demotions, scheduler.counters.promotions) == (1, 1)
    assert scheduler.counters.parks == scheduler.counters.recomputes == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_youngest_request_is_preempted_and_the_oldest_is_in_almost_every_plan(depth: int) -> None:
    scheduler, runner = make(pages=11, page_rows=2)
    scheduler.add(request("old", 4, 20))
    scheduler.add(request("young", 2, 20))
    in_flight: deque[StepResult] = deque()
    order: list[str] = []
    left_out, max_left_out, old_seat = 0, 0, None  # `left_out`: consecutive plans without the old request
    while not scheduler.idle:
        while len(in_flight) < depth and (plan := scheduler.plan()) is not None:
            if old_seat is None:
                old_seat = plan.seats[0]
            left_out = 0 if old_seat in plan.seats else left_out + 1
            max_left_out = max(max_left_out, left_out if not order else 0)
            in_flight.append(runner.submit(plan))
        order += scheduler.commit(in_flight.popleft()).finished
        scheduler.audit()
    assert order == ["old", "young"]
    assert scheduler.counters.recomputes > 0
    assert max_left_out <= depth, f"the oldest request was left out of {max_left_out} consecutive plans"


def test_the_token_budget_limits_prompts_but_not_decoding_requests() -> None:
    scheduler, runner = make(pages=400, page_rows=2, seats=8, step_tokens=3)
    for number in range(5):
        scheduler.add(request(f"r{number}", 4, 100))
    counts = []
    for _ in range(30):
        counts.append(list(execute_next(scheduler, runner).counts))
    assert max(sum(count for count in plan_counts if count > 1) for plan_counts in counts) <= 3
    assert counts[-1] == [1] * 5, "the budget of three tokens limits decoding requests"


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler, runner = make(pages=64, page_rows=2, seats=2, step_tokens=5)
    scheduler.add(request("short", 2, 40))
    execute_next(scheduler, runner)
    scheduler.add(request("long", 12, 20))
    counts = []
    for _ in range(4):
        counts.append(list(execute_next(scheduler, runner).counts))
    assert counts == [[1, 4], [1, 4], [1, 4], [1, 1]]


def test_log_probabilities_of_a_prompt_are_in_the_plans_that_compute_their_logits() -> None:
    scheduler, runner = make(pages=20, step_tokens=4)
    params = SamplingParams(seed=0, prompt_logprobs=2, max_tokens=1)
    scheduler.add(Request("scored", PromptSpec(tuple(range(10)), params), 11))
    ranges = []
    while not scheduler.idle:
        plan = execute_next(scheduler, runner)
        ranges.append([(scored.first, scored.last, scored.alternatives) for scored in plan.prompt_ranges])
    assert ranges == [[(1, 5, 2)], [(5, 9, 2)], [(9, 10, 2)]], "the logits of token 3 give that of token 4"


def test_a_phase_change_outside_the_table_is_refused() -> None:
    waiting = request("r", 1, 2)
    with pytest.raises(IllegalTransition):
        waiting.move(Phase.HANDOFF)


def test_with_several_stages_a_decoding_request_is_in_only_one_plan_in_flight() -> None:
    """The first stage can compute a sampled token only after the last stage has sampled it.

    Decoding requests therefore alternate between two plans. Chunks of one prompt can be in both.
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
    shared_seats, decoding = 0, []
    for _ in range(30):
        while len(in_flight) < 2 and (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        if len(in_flight) == 2 and len(scheduler.queues.running) == 5:
            shared_seats += len(set(in_flight[0].seats) & set(in_flight[1].seats))
            decoding.append(len(in_flight[1].seats))
        if in_flight:
            scheduler.commit(runner.submit(in_flight.popleft()))
    assert not shared_seats and len(decoding) > 8
    assert set(decoding[4:]) <= {2, 3}, decoding
