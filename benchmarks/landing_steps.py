"""Measures the time between tokens of running requests while contexts land, against the time without landings.

    python benchmarks/landing_steps.py --json landing_steps.json

A decode engine of the demo model generates tokens for some requests. Meanwhile, contexts of 4096 tokens land in it. A
process without a model sends them: it announces all rows of a prompt at once, so no prefill competes for the device. A
landed request ends with its first token. Quiet and busy stretches of steps alternate.

    one by one       a context begins to land when the one before has landed: many times as often as a prefill engine
                     could compute them
    at prefill rate  a context begins to land at most as often as this engine computes such a prompt

Bar (required result): steps take at most 1.05 times as long while contexts land: the median step if they land one by
one, and the mean step if they land at prefill rate.
"""

import itertools
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from landing_workers import GPU, HOST, PAGE_ROWS, child_process
from report import Bar, make_parser, report, write_json

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import DEFAULT_STAGING_MIB
from hotset.base.request_options import LandingChoice, RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.units import MIB, ceil_div
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.workers.executor import HostShard
from hotset.fleet.handoff.agent import open_channel
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.endpoints import DecodeEndpoint
from hotset.fleet.handoff.messages import Hello, ModelIdentity, StartPrefill
from hotset.fleet.handoff.packing import EngineCopies
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.stores import (
    ProbeMemory,
    Staging,
    host_shards,
    landing_stores,
    memory_devices,
    pool_shards,
    regions,
)
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.workers import WorkerTransfers
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.schedule.handoffs import ContextPages, FirstTokenSampled, RowsComputed

BAR = 1.05
LANDING_TOKENS = 4096
STAGING_BYTES = DEFAULT_STAGING_MIB * MIB
MAX_STEPS = LANDING_TOKENS - 600  # steps of a stretch, counted or not
STRETCH = 40  # steps of one kind before the other kind follows


@dataclass(frozen=True, slots=True)
class SenderCase:
    """What the sending process needs to be accepted by the decode engine."""

    engine: str
    model: ModelIdentity
    shape: KvShape


def serve_contexts(case: SenderCase, pipe: Connection) -> None:
    """Runs the sending process until it receives a message. Its rows are never computed."""
    pages = ceil_div(LANDING_TOKENS, PAGE_ROWS)
    host = HostStore(case.shape, pages, PAGE_ROWS, GPU)
    shards = [HostShard(0, 0, case.shape, 1, host)]
    host.rows.view(torch.uint8).zero_()
    geometry = case.shape.geometry(PAGE_ROWS)
    key_pages = geometry.key_pages(LANDING_TOKENS)
    pool = DevicePool(case.shape, geometry, pages + key_pages, GPU) if GPU.type == "cuda" else None
    probes, registered = ProbeMemory(pool), TransferSettings(case.engine).open()
    staging = Staging(STAGING_BYTES, memory_devices(pool, host=True))
    for region in (*regions([host], pool), *probes.regions, *staging.regions):
        registered.register(region)
    transfer = WorkerTransfers([registered])
    stores = landing_stores(host_shards(shards, (), staging), pool_shards(pool, (), staging))
    channel, woken = open_channel(f"{HOST}:0"), threading.Event()
    hello = Hello(channel.address, case.model, stores, transfer.name, transfer.describe(), probes=probes.ranges)
    sender, copies = Sender(Sources(stores["host"], stores.get("device"))), EngineCopies(GPU, ())
    agent = PrefillAgent(sender, hello, channel, transfer, wake=woken.set, copies=copies)
    on_host = tuple(range(pages))
    on_device = None if pool is None else ContextPages(on_host, tuple(range(pages, pages + key_pages)))
    agent.start()
    pipe.send(channel.address)
    while not pipe.poll():
        woken.wait(0.1)
        woken.clear()
        for event in agent.take_events():
            if isinstance(event, StartPrefill):
                rows = len(event.prompt)
                device_pages = on_device if event.from_device else None
                agent.put(RowsComputed(event.peer, event.key, 0, rows, on_host, None, device_pages))
                agent.put(FirstTokenSampled(event.peer, event.key, 5, None))
    agent.close(1.0)
    transfer.close()
    host.close()


class Load:
    """Runs the steps of a decode engine with `requests` running requests, and with or without landing contexts."""

    def __init__(self, engine: Engine, peer: str, requests: int) -> None:
        self._engine, self._peer, self._requests = engine, peer, requests
        self._processor, self._names = InputProcessor(engine.card, seed=0), itertools.count()
        self._running: set[str] = set()
        self._landing: set[str] = set()
        self._next_landing = 0.0
        self.num_landed = 0

    def _add(self, prompt: list[int], tokens: int, peer: str | None, landing: LandingChoice) -> str:
        name = str(next(self._names))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for choice in self._processor.accept(name, prompt, params, RequestOptions(landing=landing, prefill_at=peer)):
            self._engine.add(choice)
        return f"{name}/0"

    def prefill_seconds(self) -> float:
        """Returns how long this engine takes to compute a prompt of LANDING_TOKENS tokens."""
        start = time.perf_counter()
        name = self._add([5] * LANDING_TOKENS, 1, None, "auto")
        while name not in self._engine.step().finished:
            pass
        return time.perf_counter() - start

    def steps(self, count: int, landing: LandingChoice | None, every: float = 0.0) -> list[float]:
        """Returns the seconds between the outputs of `count` steps, of requests that begin with these steps. A context
        begins to land when the one before has landed, and `every` seconds after it at the earliest."""
        self._running = {self._add([7 + n] * 500, MAX_STEPS, None, "auto") for n in range(self._requests)}
        started: set[str] = set()
        while started != self._running:
            started |= self._running & set(self._engine.step().request_ids)
        seconds, before = [], None
        while len(seconds) < count:
            if landing is not None and not self._landing and time.perf_counter() >= self._next_landing:
                self._next_landing = time.perf_counter() + every
                salt = next(self._names)
                prompt = [3 + salt % 150] * LANDING_TOKENS
                self._landing.add(self._add(prompt, 1, self._peer, landing))
            outputs = self._engine.step()
            ended = set(outputs.finished)
            self.num_landed += len(ended & self._landing)
            self._landing -= ended
            assert not ended & self._running, f"a running request has ended after {MAX_STEPS} steps"
            if self._running & set(outputs.request_ids):
                now = time.perf_counter()
                if before is not None:
                    seconds.append(now - before)
                before = now
        for name in self._running:
            self._engine.abort(name)
        while not self._engine.idle:  # the next stretch must be quiet
            self._landing -= set(self._engine.step().finished)
        return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", default="nixl", choices=["nixl", "mooncake"])
    parser.add_argument("--model", default="models/demo-dsa")
    parser.add_argument("--requests", type=int, default=8, help="running requests")
    parser.add_argument("--stretches", type=int, default=5, help="of 40 steps, of each kind")
    parser.add_argument("--quick", action="store_true", help="one stretch")
    options = parser.parse_args()
    stretches = 1 if options.quick else options.stretches
    config = EngineConfig(
        model=options.model,
        role="decode",
        transfer=options.engine,
        speculate=0,
        max_num_seqs=options.requests + 4,
        max_model_len=LANDING_TOKENS + 64,
        device_kv_tokens=65536,
        host_kv_tokens=131072,
        prefix_cache=False,
    )
    engine = build_engine(config)
    endpoint = engine._endpoint
    assert isinstance(endpoint, DecodeEndpoint) and engine.executor.pool is not None
    case = SenderCase(options.engine, endpoint._agent._hello.model, engine.executor.pool.shape)
    rows: list[dict[str, Any]] = []
    bars = []
    with child_process(serve_contexts, case, 20.0) as pipe:
        load = Load(engine, pipe.recv(), options.requests)
        load.steps(STRETCH, "host")  # connects
        prefill = statistics.median(load.prefill_seconds() for _ in range(5))
        landings: tuple[LandingChoice, ...] = ("host", "device")
        for landing, every in itertools.product(landings, (0.0, prefill)):
            quiet, busy, landed = list[float](), list[float](), load.num_landed
            for _ in range(stretches):
                quiet += load.steps(STRETCH, None)
                busy += load.steps(STRETCH, landing, every)
            ratio = statistics.median(busy) / statistics.median(quiet)
            of_means = statistics.mean(busy) / statistics.mean(quiet)
            how = "at prefill rate" if every else "one by one"
            rows.append(
                {
                    "landing on": landing,
                    "how": how,
                    "quiet ms": statistics.median(quiet) * 1e3,
                    "landing ms": statistics.median(busy) * 1e3,
                    "ratio": ratio,
                    "ratio of means": of_means,
                    "contexts": load.num_landed - landed,
                }
            )
            measured = ("mean", of_means) if every else ("median", ratio)
            what = f"{measured[0]} step while contexts land on the {landing}, {how}"
            bars.append(Bar(what, measured[1], BAR, at_least=False).row())
        pipe.send(None)
    engine.close()
    note = f"{options.requests} requests; {stretches * STRETCH} steps of each kind; prompts take {prefill * 1e3:.1f} ms"
    report(f"Time between tokens while contexts of {LANDING_TOKENS} tokens land", rows, None, note)
    report("Bars", bars, None)
    if options.json is not None:
        write_json(options.json, "Steps while contexts land", {"bars": bars, "steps": rows})


if __name__ == "__main__":
    main()
