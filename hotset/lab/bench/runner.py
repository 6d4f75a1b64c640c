"""Sends the requests of one load, and records when their answers arrive."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from random import Random

from hotset.lab.bench.config import BenchConfig, Load
from hotset.lab.bench.results import GeneratorHealth, LoadResult, RequestRecord, percentile
from hotset.lab.bench.target import Target
from hotset.lab.bench.workload import PlannedRequest

TICK_SECONDS = 0.02  # the interval in which the generator checks whether its event loop is late
TICKS_PER_UPDATE = 25
PREPARED_REQUESTS = 1024  # bodies that are made before the clock starts
PREPARED_BYTES = 64 << 20  # the limit of their total size


@dataclass(slots=True)
class Tally:
    """The counts of a load so far, for a progress display."""

    load: Load
    total: int | None  # None if only time limits the requests
    started: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def running(self) -> int:
        return self.started - self.completed - self.failed


@dataclass(frozen=True, slots=True)
class Body:
    """A request that is ready to be sent."""

    payload: bytes
    output_tokens: int
    offset: float | None


@dataclass
class LoadRun:
    """One measurement. `run` may be called once.

    When `stop` is set, running requests are cancelled, and the result contains only the requests that had ended.
    """

    target: Target
    config: BenchConfig
    load: Load
    tally: Tally
    random: Random
    stop: asyncio.Event
    on_update: Callable[[Tally], None] = lambda tally: None
    records: list[RequestRecord] = field(default_factory=list)
    _delays: list[float] = field(default_factory=list)
    _began: float = 0.0

    async def run(self, requests: Iterable[PlannedRequest]) -> LoadResult:
        bodies = self._prepared(islice(requests, self.tally.total))
        cpu_began, time_of_day = time.process_time(), time.time()
        self._began = time.perf_counter()
        sending = asyncio.create_task(self._closed_loop(bodies) if self.load.concurrency else self._open_loop(bodies))
        stopping = asyncio.create_task(self.stop.wait())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, stopping, watching):
                task.cancel()
            outcomes = await asyncio.gather(sending, stopping, watching, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        self.tally.seconds = self._now()
        self.on_update(self.tally)
        seconds = max((record.ended for record in self.records), default=0.0)
        cpu_share = (time.process_time() - cpu_began) / max(self._now(), 1e-9)
        return LoadResult(
            load=self.load,
            began=time_of_day,
            seconds=seconds,
            records=tuple(self.records),
            unfinished=self.tally.running,
            generator=self._health(cpu_share),
        )

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _prepared(self, requests: Iterator[PlannedRequest]) -> Iterator[Body]:
        """Yields the bodies. The first ones are made before the clock starts, so that they do not delay a burst."""
        ready: list[Body] = []
        room = PREPARED_BYTES
        for request in islice(requests, PREPARED_REQUESTS):
            ready.append(self._body(request))
            room -= len(ready[-1].payload)
            if room <= 0:
                break
        return chain(ready, map(self._body, requests))

    def _body(self, request: PlannedRequest) -> Body:
        return Body(self.target.payload(request), request.output_tokens, request.offset)

    async def _closed_loop(self, bodies: Iterator[Body]) -> None:
        async def work() -> None:
            for body in bodies:  # all workers share the iterator
                if self._now() >= (self.config.duration or math.inf):
                    return
                await self._send(body, scheduled=None)

        assert self.load.concurrency is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(work())

    async def _open_loop(self, bodies: Iterator[Body]) -> None:
        times = None if self.load.rate is None else arrival_times(self.load.rate, self.config.burstiness, self.random)
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                scheduled = next(times) if times is not None else body.offset or 0.0
                if scheduled >= (self.config.duration or math.inf):
                    return
                # Also yields to the tasks that were just created, so that they send their requests.
                await asyncio.sleep(max(0.0, scheduled - self._now()))
                group.create_task(self._send(body, scheduled))

    async def _send(self, body: Body, scheduled: float | None) -> None:
        self.tally.started += 1
        sent = self._now()
        answer = await self.target.send(body.payload, self._now)
        record = RequestRecord(
            scheduled=scheduled,
            sent=sent,
            ended=self._now(),
            chunk_times=answer.chunk_times,
            asked_output_tokens=body.output_tokens,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            failure=answer.failure,
            cached_tokens=answer.cached_tokens,
        )
        self.records.append(record)
        if record.failure is None:
            self.tally.completed += 1
            self.tally.output_tokens += record.output_tokens
        else:
            self.tally.failed += 1

    async def _watch(self) -> None:
        """Measures how late the event loop is, and reports progress."""
        ticks = 0
        while True:
            expected = self._now() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.tally.seconds = self._now()
            self._delays.append(max(0.0, self.tally.seconds - expected))
            ticks += 1
            if ticks % TICKS_PER_UPDATE == 0:
                self.on_update(self.tally)

    def _health(self, cpu_share: float) -> GeneratorHealth:
        delays = sorted(self._delays) or [0.0]
        lags = sorted(record.lag for record in self.records) or [0.0]
        return GeneratorHealth(
            cpu_share=cpu_share,
            delay_p99=percentile(delays, 99),
            delay_max=delays[-1],
            lag_p99=percentile(lags, 99),
            lag_max=lags[-1],
        )


def arrival_times(rate: float, burstiness: float, random: Random) -> Iterator[float]:
    """Yields the times of requests in seconds, beginning with 0, without end.

    The gaps follow a gamma distribution with mean 1 / `rate` and shape `burstiness`. Shape 1 is the exponential
    distribution of a Poisson process; as the shape grows, the gaps approach their mean.
    """
    now = 0.0
    while True:
        yield now
        now += _gap(rate, burstiness, random)


def _gap(rate: float, burstiness: float, random: Random) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1.0 / rate
    return random.gammavariate(burstiness, 1.0 / (rate * burstiness))
