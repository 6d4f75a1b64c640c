"""A scheduler with a prefix cache and a runner without tensors, for tests of prefix reuse."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from random import Random

import pytest
from schedule.list_runner import ListRunner, next_token

from hotset.base.config import TiersMode
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Plan, StepResult
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache

ROWS = 4  # of a page
GEOMETRY = Geometry(page_rows=ROWS, layers=2, layer_page_bytes=64 * ROWS, keys_per_block=8, slots=4, topk=2)
NO_STOP = -1
RANDOM = Random()  # seeded by `seed_tokens`


class CountingHasher(PageHasher):
    hashed = 0

    def extend(self, hashes: list[bytes], tokens: Sequence[int], salt: str, max_pages: int | None = None) -> None:
        known = len(hashes)
        super().extend(hashes, tokens, salt, max_pages)
        self.hashed += len(hashes) - known


class Loop:
    """A scheduler with a prefix cache and a runner without tensors, and records of what happened."""

    def __init__(
        self,
        depth: int = 1,
        mode: TiersMode = "auto",
        step_tokens: int = 64,
        seats: int = 8,
        device: int = 200,
        host: int = 200,
    ) -> None:
        self.hasher = CountingHasher("model", ROWS)
        self.host = PrefixCache(host)
        self.ledger = Ledger(GEOMETRY, PageAllocator(device), self.host)
        self.scheduler = Scheduler(self.ledger, seats, step_tokens, mode, hasher=self.hasher)
        self.runner = ListRunner(GEOMETRY)
        self.depth = depth
        self.in_flight: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.segments: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (first token, number) of each segment
        self.answers: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, str] = {}
        self.cached_tokens: list[tuple[str, int]] = []  # as reported
        self.order: list[str] = []  # requests in the order of their first segments

    def add(
        self,
        name: str,
        prompt: list[int],
        answer: int = 6,
        stop: int = NO_STOP,
        prompt_logprobs: int | None = None,
        salt: str = "",
    ) -> Request:
        """Adds a request with an answer of `answer` tokens, or fewer if one of them is `stop`."""
        params = SamplingParams(seed=0, prompt_logprobs=prompt_logprobs)
        spec = PromptSpec(tuple(prompt), params, frozenset({stop}), salt)
        self.requests[name] = Request(name, spec, len(prompt) + answer)
        self.scheduler.add(self.requests[name])
        return self.requests[name]

    def submit(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        requests = self.scheduler._in_flight[-1].requests
        for request, start, count in zip(requests, plan.starts, plan.counts, strict=True):
            if request.request_id not in self.segments:
                self.order.append(request.request_id)
            self.segments[request.request_id].append((start, count))
        self.in_flight.append(self.runner.submit(plan))
        return plan

    def commit(self) -> None:
        outputs = self.scheduler.commit(self.in_flight.popleft())
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            self.answers[name].append(token)
        self.cached_tokens += outputs.cached_tokens.items()
        self.finished |= outputs.finished
        self.scheduler.audit()

    def step(self) -> None:
        while len(self.in_flight) < self.depth and self.submit() is not None:
            pass
        if self.in_flight:
            self.commit()
        else:
            self.finished |= self.scheduler.take_outputs().finished

    def run(self) -> None:
        """Runs all requests to their end. Checks that every answer is the one of a request that runs alone."""
        for _ in range(2000):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle, "a request did not end within 2000 steps"
        assert self.ledger.device.held == 0 and self.host.held == 0
        for name, request in self.requests.items():
            context = list(request.prompt.token_ids)
            for token in self.answers[name]:
                assert token == next_token(tuple(context)), f"{name} got a wrong token"
                context.append(token)
            if self.finished[name] == "length":
                assert len(context) == request.max_length

    def start(self, name: str) -> int:
        """Returns the first token that a request computed."""
        return self.segments[name][0][0]

    def computed(self, name: str) -> Counter[int]:
        """Returns how often each token of a request was computed."""
        return Counter(token for start, count in self.segments[name] for token in range(start, start + count))


@pytest.fixture(autouse=True)
def seed_tokens(request: pytest.FixtureRequest) -> None:
    """Seeds `tokens` with the name of the test, so a test gets the same tokens whichever tests ran before it. A test
    file that uses `tokens` must import this fixture."""
    RANDOM.seed(request.node.name)


def tokens(count: int) -> list[int]:
    return [RANDOM.randrange(1000) for _ in range(count)]
