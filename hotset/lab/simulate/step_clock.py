"""Simulated time: an executor that computes nothing, and a clock that moves by the step times of a cost model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from hotset.base.address import Address
from hotset.engine.workers.executor import HostShard, ServingWorker, Step, StepFuture
from hotset.engine.workers.messages import Description, WorkerService
from hotset.lab.plan.costs import RankCosts
from hotset.lab.plan.pipeline import SimulatedClock
from hotset.memory.device_pool import DevicePool
from hotset.schedule.handoffs import DeviceEvent
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import NO_TRAFFIC, Traffic

FIRST_ANSWER_TOKEN = 1 << 32  # the lowest token id of simulated answers; those of prompts are lower


class StepWork(NamedTuple):
    """What one replica computes in one step."""

    decodes: int = 0  # requests that decode one token
    context: float = 0.0  # their mean length
    tiered: int = 0  # how many of them are tiered
    chunks: Sequence[tuple[int, int]] = ()  # first and last position of each chunk of a prompt
    expert_share: float = 1.0  # prompt tokens of all replicas / (number of replicas * prompt tokens of this one)

    @property
    def prompt_tokens(self) -> int:
        return sum([last - first for first, last in self.chunks])


def work_of(plan: Plan, tiered: int) -> StepWork:
    """Returns the work of a plan. `tiered` is the number of tiered requests of its replica."""
    counts, starts = plan.counts, plan.starts
    chunks = [(first, first + tokens) for first, tokens in zip(starts, counts, strict=True) if tokens > 1]
    decodes = len(counts) - len(chunks)
    length = (sum(starts) - sum(first for first, _last in chunks)) / decodes if decodes else 0.0
    return StepWork(decodes, length, min(decodes, tiered), chunks)


StepCost = Callable[[StepWork], Sequence[float]]  # seconds on each pipeline stage


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Costs that were measured on a machine, like those of `hotset simulate --step-ms`."""

    step_s: float
    prompt_token_s: float = 0.0
    decode_token_s: float = 0.0
    tiered_token_s: float = 0.0  # in addition, for each decoding request that is tiered
    position_s: float = 0.0  # for each pair of a computed token and 1000 tokens of its context

    def __call__(self, work: StepWork) -> Sequence[float]:
        decodes = self.decode_token_s * work.decodes + self.tiered_token_s * work.tiered
        prompts = self.prompt_token_s * work.prompt_tokens
        return (self.step_s + prompts + decodes + self.position_s * positions(work),)


def positions(work: StepWork) -> float:
    """Returns the number of pairs of a computed token and a token of its context, in thousands."""
    of_prompts = sum((last - first) * (first + last) / 2 for first, last in work.chunks)
    return (of_prompts + work.decodes * work.context) / 1e3


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """Costs of GPUs, from the cost model of `hotset plan`."""

    stages: Sequence[RankCosts]

    def __call__(self, work: StepWork) -> Sequence[float]:
        return [_gpu_seconds(rank, work) for rank in self.stages]


def _gpu_seconds(rank: RankCosts, work: StepWork) -> float:
    """Returns the time of a step. Reading weights overlaps with the products of prompts: the longer one counts."""
    rates = rank.decode_rates(max(1, work.decodes))
    seconds = rates.fixed_s
    if work.chunks:
        seconds = rank.prompt_step_seconds(work.chunks, work.expert_share, work.decodes)
    return seconds + rates.seconds(work.context, work.tiered) if work.decodes else seconds


class SimulatedExecutor:
    """Implements `Executor` without a model. Waiting for the results of a step moves the clock to its end."""

    addresses: Sequence[Address] = ()
    maps_all_hosts = True

    def __init__(self, clock: SimulatedClock, cost: StepCost, works: Callable[[Step], list[StepWork]]) -> None:
        """`works(step)` returns the work of each replica that has a plan."""
        self._clock, self._cost, self._works = clock, cost, works
        self._tokens = count(FIRST_ANSWER_TOKEN)  # all different, so that answers share no prefix

    def submit(self, step: Step) -> StepFuture:
        works = self._works(step)
        prompt_tokens = [work.prompt_tokens for work in works]
        total = sum(prompt_tokens)
        for index, tokens in enumerate(prompt_tokens):
            if tokens:
                works[index] = works[index]._replace(expert_share=total / (len(step) * tokens))
        slowest = list(map(max, zip(*map(self._cost, works), strict=True)))
        results = [None if plan is None else self._result(plan) for plan in step]
        return _SimulatedStep(self._clock, self._clock.run(slowest), results)

    def _result(self, plan: Plan) -> StepResult:
        return StepResult(plan.number, list(islice(self._tokens, len(plan.sampled))))

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        pass

    def check(self) -> None:
        pass

    def mirrored_event(self) -> DeviceEvent | None:
        return None

    def hosts(self) -> Sequence[HostShard]:
        return ()

    @property
    def pool(self) -> DevicePool | None:
        return None

    def start_service(self, service: WorkerService[Description]) -> Sequence[ServingWorker[Description]]:
        return ()

    def traffic(self) -> Traffic:
        return NO_TRAFFIC

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        pass

    @property
    def pinned_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _SimulatedStep:
    clock: SimulatedClock
    ends: float
    step_results: Sequence[StepResult | None]

    def results(self) -> Sequence[StepResult | None]:
        self.clock.now = max(self.clock.now, self.ends)
        return self.step_results
