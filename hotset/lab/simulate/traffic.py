"""Runs the requests of a trace through the engine's own scheduler and ledger, in simulated time.

Nothing is computed: a step takes as long as the cost model says, and every answer has as many tokens as in the trace.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, InternalError
from hotset.engine.build import assemble, model_card
from hotset.engine.core import Engine
from hotset.engine.loading import choose_dtype
from hotset.engine.model_checks import kv_storage
from hotset.engine.workers.executor import Step
from hotset.lab.plan.capacity import Capacity, plan_capacity
from hotset.lab.plan.gpus import Machine
from hotset.lab.plan.pipeline import SimulatedClock
from hotset.lab.plan.planner import make_plan
from hotset.lab.simulate.prompts import Arrival, choice_of
from hotset.lab.simulate.step_clock import SimulatedExecutor, StepCost, StepWork, work_of
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.decoder import worker_kv_shape
from hotset.tiers.residence import Residence

SAMPLES = 400  # points in time that are kept for a picture


@dataclass(slots=True)
class RequestTimes:
    """When a request arrived, and when its first and last tokens were sampled."""

    arrived: float
    first_token: float | None = None
    ended: float | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of requests in each state, at one point in time."""

    seconds: float
    running: int
    tiered: int
    waiting: int
    parked: int


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """The result of a simulation. Mean numbers of requests are weighted by time."""

    requests: int
    refused: int  # requests that are longer than --max-model-len
    seconds: float  # simulated
    steps: int
    mean_running: float
    max_running: int
    mean_waiting: float
    max_tiered: int
    parks: int
    demotions: int
    reused: float  # share of the prompts' tokens that were in the prefix cache
    tokens_per_s: float
    times: Sequence[RequestTimes] = field(repr=False)
    samples: Sequence[Sample] = field(repr=False)

    @property
    def first_token_s(self) -> list[float]:
        """The times from arrival to the first token, ascending."""
        return sorted(times.first_token - times.arrived for times in self.times if times.first_token is not None)

    @property
    def token_s(self) -> list[float]:
        """The mean time between two tokens of each request, ascending."""
        return sorted(
            (times.ended - times.first_token) / (times.tokens - 1)
            for times in self.times
            if times.ended is not None and times.first_token is not None and times.tokens > 1
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"first_token_s": self.first_token_s, "token_s": self.token_s}


def simulated_engine(
    capacity: Capacity,
    files: ModelFiles,
    on_gpu: bool,
    clock: SimulatedClock,
    cost: StepCost,
) -> Engine:
    """Returns an engine with the planned memory, whose steps take simulated time."""
    config, device = capacity.config, torch.device("cuda" if on_gpu else "cpu")
    dtype = choose_dtype(config.dtype, files.spec, device)
    shape = worker_kv_shape(files.spec, dtype, kv_storage(config, files.spec))
    card = model_card(config, files.spec, capacity.budget, device, dtype)

    def works(step: Step) -> list[StepWork]:
        return [
            work_of(plan, scheduler.queues.count(Residence.TIERED))
            for scheduler, plan in zip(engine.schedulers, step, strict=True)
            if plan is not None
        ]

    engine = assemble(config, card, shape, capacity.budget, SimulatedExecutor(clock, cost, works))
    return engine


def planned_split(model: str, files: ModelFiles, machine: Machine, config: EngineConfig) -> Capacity:
    """Returns the memory of the split in `config` if it has several workers, else of the best split of `hotset plan`.

    Raises ConfigError if nothing fits.
    """
    plan = make_plan(model, files, machine, config, (config.max_model_len or files.spec.context,))
    if plan.best is None:
        raise ConfigError(plan.splits[0].reason or "the model does not fit")
    return plan_capacity(plan.best.config, files, machine)


def run_traffic(
    engine: Engine,
    clock: SimulatedClock,
    requests: Sequence[Arrival],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TrafficResult:
    """Runs all requests to their end. Each arrives at its time. `progress(done, total)` counts finished requests.

    Raises ConfigError if no request fits into the model's context.
    """
    longest = engine.card.max_model_len
    fitting = [request for request in requests if len(request.prompt) + request.answer_tokens <= longest]
    if not fitting:
        raise ConfigError(f"no request of the trace fits into a context of {longest} tokens; use --scale-lengths")
    recorder = _Recorder(engine, clock, fitting)
    coming, stalled, steps = deque(enumerate(fitting)), 0, 0
    hasher = engine.card.page_hasher
    # An engine with several replicas hashes every prompt when it is added. With one replica, the scheduler hashes it
    # later, a limited number of pages in each plan.
    hashed_page_rows = hasher.page_rows if hasher is not None and len(engine.schedulers) > 1 else None
    with _garbage_collection_off():
        while not (idle := engine.idle) or coming:
            if idle:
                clock.now = max(clock.now, coming[0][1].seconds)
            while coming and coming[0][1].seconds <= clock.now:
                engine.add(choice_of(*coming.popleft(), hashed_page_rows))
            before = clock.now
            outputs = engine.step()
            if outputs or clock.now > before:
                stalled = 0
            else:
                stalled = stalled + 1 if engine.steps == steps else 0
                steps = engine.steps
                if stalled > engine.open_requests + 1:  # each request can be preempted before one is planned
                    raise InternalError("the scheduler plans nothing although requests are open")
            recorder.add(before, outputs.request_ids, outputs.finished)
            progress(recorder.finished, len(fitting))
    return recorder.result(len(requests) - len(fitting))


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Requests leave no reference cycles, and each collection would visit the tokens of all open requests."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Recorder:
    """Collects the result while the traffic runs."""

    def __init__(self, engine: Engine, clock: SimulatedClock, requests: Sequence[Arrival]) -> None:
        self._engine, self._clock = engine, clock
        self._times = [RequestTimes(request.seconds, tokens=request.answer_tokens) for request in requests]
        self._started = clock.now
        self._running_s = self._waiting_s = 0.0
        self._max_running = self._max_tiered = self.finished = 0
        self._samples: list[Sample] = []
        self._unstarted = {str(number) for number in range(len(requests))}

    def add(self, before: float, sampled: Sequence[str], finished: Sequence[str] | dict[str, Any]) -> None:
        """Records one step, which began at `before`."""
        now = self._clock.now
        for request_id in self._unstarted.intersection(sampled) if sampled else ():
            self._times[int(request_id)].first_token = now
            self._unstarted.discard(request_id)
        for request_id in finished:
            self._times[int(request_id)].ended = now
        self.finished += len(finished)
        schedulers = [scheduler for scheduler in self._engine.schedulers if scheduler.open_requests]
        running, waiting, tiered = len(finished), 0, 0  # those that have finished ran during the step
        for scheduler in schedulers:
            still_running = len(scheduler.queues.running)
            running += still_running
            waiting += scheduler.open_requests - still_running
            tiered += scheduler.queues.count(Residence.TIERED)
        self._running_s += running * (now - before)
        self._waiting_s += waiting * (now - before)
        self._max_running, self._max_tiered = max(self._max_running, running), max(self._max_tiered, tiered)
        parked = sum(scheduler.queues.num_parked for scheduler in schedulers) if waiting else 0
        self._samples.append(Sample(now, running, tiered, waiting, parked))

    def result(self, refused: int) -> TrafficResult:
        stats, seconds = self._engine.stats(), self._clock.now - self._started
        step = max(1, len(self._samples) // SAMPLES)
        return TrafficResult(
            requests=len(self._times),
            refused=refused,
            seconds=seconds,
            steps=stats.steps,
            mean_running=self._running_s / seconds if seconds else 0.0,
            max_running=self._max_running,
            mean_waiting=self._waiting_s / seconds if seconds else 0.0,
            max_tiered=self._max_tiered,
            parks=stats.parks,
            demotions=stats.demotions,
            reused=stats.tokens_reused / max(1, stats.tokens_queried),
            tokens_per_s=stats.tokens_generated / seconds if seconds else 0.0,
            times=self._times,
            samples=self._samples[::step],
        )
