"""Runs a benchmark: probes the server, warms it up, and measures each load."""

import asyncio
import datetime
import platform
import shlex
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from random import Random, SystemRandom
from typing import Any

from hotset import __version__
from hotset.base.errors import ConfigError, RequestError
from hotset.lab.bench.config import BenchConfig, Load
from hotset.lab.bench.drafts import DraftFigures
from hotset.lab.bench.results import LoadResult, RequestRecord, Summary, summarize
from hotset.lab.bench.runner import LoadRun, Tally
from hotset.lab.bench.target import ServerReport, Target
from hotset.lab.bench.workload import PromptSource, Workload

WARMUP = -1  # the index of the load that is not measured
MAX_SEED = 1 << 32


@dataclass
class BenchReport:
    """The results of all loads that were measured."""

    server: ServerReport
    config: BenchConfig
    seed: int
    prompts_as_text: bool
    results: list[LoadResult] = field(default_factory=list)
    interrupted: bool = False
    date: str = field(default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds"))

    def summaries(self) -> list[Summary]:
        return [summarize(result, self.config.objectives) for result in self.results]

    def to_json(self) -> dict[str, Any]:
        """Returns settings, versions, figures, and all requests. Latencies are in milliseconds. The times of a request
        are in seconds since `began`, a Unix time."""
        settings = asdict(self.config)
        del settings["api_key"]
        return {
            "hotset": __version__,
            "python": platform.python_version(),
            "date": self.date,
            "command": shlex.join(["hotset", *sys.argv[1:]]),
            "server": asdict(self.server),
            "settings": {**settings, "seed": self.seed},
            "prompts": "text" if self.prompts_as_text else "ids",
            "interrupted": self.interrupted,
            "loads": [
                {
                    "load": result.load.label,
                    **asdict(result.load),
                    "began": result.began,
                    **summary.to_json(),
                    "requests": [_record_json(record) for record in result.records],
                }
                for result, summary in zip(self.results, self.summaries(), strict=True)
            ],
        }


def _record_json(record: RequestRecord) -> dict[str, Any]:
    def rounded(value: float | None, factor: float = 1.0) -> float | None:
        return None if value is None else round(value * factor, 6)

    return {
        "scheduled": rounded(record.scheduled),
        "sent": rounded(record.sent),
        "ended": rounded(record.ended),
        "chunk_times": [rounded(chunk) for chunk in record.chunk_times],
        "input_tokens": record.input_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "asked_output_tokens": record.asked_output_tokens,
        "ttft_ms": rounded(record.ttft, 1e3),
        "tpot_ms": rounded(record.tpot, 1e3),
        "e2e_ms": rounded(record.e2e, 1e3),
        "error": None if record.failure is None else asdict(record.failure),
    }


class Benchmark:
    """One run over all loads. `on_update` gets the progress, and `on_result` each finished load.

    Entering the context probes the server, and leaving it closes the connections. Raises StartupError or RequestError
    if the server cannot be measured. When `stop` is set, the run ends, and the report contains what was measured until
    then.
    """

    def __init__(
        self,
        url: str,
        config: BenchConfig,
        stop: asyncio.Event,
        on_update: Callable[[Tally], None] = lambda tally: None,
        on_result: Callable[[BenchReport], None] = lambda report: None,
    ) -> None:
        self._config = config
        self._stop = stop
        self._on_update = on_update
        self._on_result = on_result
        self._seed = SystemRandom().randrange(MAX_SEED) if config.seed is None else config.seed
        self._workload = Workload(config, self._seed)
        self._target = Target(url, config)

        self._source: PromptSource | None = None

    async def __aenter__(self) -> "Benchmark":
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._target)
            self._source = await self._target.probe()
            self._check_lengths(self._target.report)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def run(self) -> BenchReport:
        """Warms up the server and measures all loads. Raises RequestError if all requests of the warm-up fail."""
        assert self._source is not None, "run is called inside `async with`"
        report = BenchReport(self._target.report, self._config, self._seed, self._source.as_text)
        await self._warm_up(self._source)
        for index, load in enumerate(self._config.loads):
            if self._stop.is_set():
                break
            report.results.append(await self._measure(load, index, self._source, self._workload.num_requests))
            self._on_result(report)
        report.interrupted = self._stop.is_set()
        return report

    async def _measure(self, load: Load, index: int, source: PromptSource, total: int | None) -> LoadResult:
        on_update = self._on_update if index != WARMUP else lambda tally: None
        run = LoadRun(
            target=self._target,
            config=self._config,
            load=load,
            tally=Tally(load, total),
            random=Random(f"{self._seed}:{index}:times"),
            stop=self._stop,
            on_update=on_update,
        )
        before = await self._target.counters()
        result = await run.run(self._workload.requests(source, index))
        return replace(result, drafts=DraftFigures.between(before, await self._target.counters()))

    async def _warm_up(self, source: PromptSource) -> None:
        """Sends the requests of --warmup. Raises RequestError if all of them fail."""
        if self._config.warmup == 0:
            return
        concurrency = self._config.loads[0].concurrency or 1
        result = await self._measure(Load(concurrency=concurrency), WARMUP, source, self._config.warmup)
        if result.records and not result.completed:
            failure = result.records[0].failure
            assert failure is not None, "a record without a failure is completed"
            status = "" if failure.status is None else f" with {failure.status}"
            raise RequestError(f"all {len(result.records)} requests of the warm-up failed{status}: {failure.message}")

    def _check_lengths(self, server: ServerReport) -> None:
        longest, limit = self._workload.longest(), server.max_model_len
        if limit is not None and longest > limit:
            flag = "--scale-lengths" if self._config.trace is not None else "--input-tokens or --output-tokens"
            raise ConfigError(
                f"the longest request has {longest} tokens with its answer, and the context of {server.model} has "
                f"{limit}; lower {flag}"
            )
