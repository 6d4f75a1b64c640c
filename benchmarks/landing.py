"""How fast contexts land in another process, against what the transfer engine can do, and how early.

    python benchmarks/landing.py --json landing.json --png landing.png

Two processes with the stores of a production model (rows of 656 bytes and index keys of 132, both in fp8, pages of 64
rows). The engine on the prefill side is a stand-in: nothing is computed, and every chunk is announced at once. All else
is real: layout, state machines, control messages, lanes, transfer engine. Rows and index keys are sent from the host
store, as prefill workers do. Rows land in pages of the host store, index keys, as in the engine, in pages of the device
pool, which is ordinary memory here. Such a page holds 318 keys and leaves 8 bytes free, and the host store has no such
gaps: so one write carries one page of keys at most. Where writes are dear (Mooncake) they land in pages of the host
store instead, and are merged like rows. A landing is timed at the decode side, from the request for it until the engine
is told that all of it is there. The bytes of the first landing of each kind are compared with their source.

Raw: one long span of memory in the largest writes that the engine takes well, posted by the same engine from the same
process, in turns with the landings; `of raw` is the median over the rounds. `writing`: while any write was under way;
the rest is control messages. `pieces`: the writes if no page followed another; `writes`: those that were posted. `of
same writes`: the time that the engine alone takes for these very writes, posted right after, over that of the landing.
On a fresh pool a context's pages follow one another on both sides; on a fragmented one they are shuffled on both.

Then the demo model computes prompts for a decode engine in another process, over the first of the engines: the share of
bytes that have arrived when the forward pass of the last chunk ends.

Bars: landed at least 80 % of raw on a fresh pool; at least 60 % sent before prefill ends, from 5 chunks on. It exits
with 1 where one is missed.
"""

import asyncio
import datetime
import json
import os
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from landing_workers import Case, DecodeWorker, ask, prefill_process
from report import hardware, make_parser, report
from rich.progress import Progress

from hotset.base.config import EngineConfig
from hotset.base.errors import HotsetError
from hotset.base.sampling import SamplingParams
from hotset.base.units import GIB
from hotset.engine.build import build_engine
from hotset.engine.client import EngineClient
from hotset.engine.core import Engine
from hotset.engine.handoffs import HandoffEndpoint
from hotset.engine.workers.executor import Step
from hotset.handoff.agent import HandoffStats
from hotset.schedule.plan import RowsWritten
from hotset.transfer.engines import prefer_few_writes

Table = list[dict[str, Any]]

LAYERS = 61
POOLS = ("fresh", "shuffled")
CHUNK = 256  # of the demo model
LANDED_BAR, EARLY_BAR = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class Landing:
    seconds: float
    writing_s: float  # any write was under way
    writes: int
    again_s: float  # that the engine takes for the same writes


def land(worker: DecodeWorker, pipe: Connection, peer: str, pool: str) -> Landing:
    before = ask(pipe, "writing")
    seconds = worker.land(peer, pool)
    after, writes, again = ask(pipe, "written")
    return Landing(seconds, after - before, writes, again)


def measure(case: Case, rounds: int) -> Table:
    """Raw and landed, in turns: one row for each kind of pool."""
    with prefill_process(case) as pipe:
        worker = DecodeWorker(case)
        peer: str = pipe.recv()
        raw = (worker.hello, worker.rows.data_ptr(), worker.rows.nbytes)
        ask(pipe, raw)
        for pool in POOLS:
            worker.poison()
            worker.land(peer, pool)
            worker.check(pool)
        raw_speeds: list[float] = []
        landings: dict[str, list[Landing]] = {pool: [] for pool in POOLS}
        for _ in range(rounds):
            raw_speeds.append(worker.rows.nbytes / ask(pipe, raw) / 1e9)
            for pool in POOLS:
                landings[pool].append(land(worker, pipe, peer, pool))
        pieces = worker.unmerged()
        worker.close()
    return [row(case, pool, landings[pool], raw_speeds, pieces) for pool in POOLS]


def row(case: Case, pool: str, landings: Sequence[Landing], raw_speeds: Sequence[float], pieces: int) -> dict[str, Any]:
    speeds = [case.nbytes / landing.seconds / 1e9 for landing in landings]
    return {
        "engine": case.engine,
        "context": case.tokens,
        "layers": case.layers,
        "pool": pool,
        "ms": statistics.median(landing.seconds for landing in landings) * 1e3,
        "writing ms": statistics.median(landing.writing_s for landing in landings) * 1e3,
        "GB/s": statistics.median(speeds),
        "raw GB/s": statistics.median(raw_speeds),
        "of raw": statistics.median(mine / raw for mine, raw in zip(speeds, raw_speeds, strict=True)),
        "of same writes": statistics.median(landing.again_s / landing.seconds for landing in landings),
        "pieces": pieces,
        "writes": landings[0].writes,
    }


class Watched:
    """Wraps a prefill engine's endpoint. It records the bytes that had arrived when the last chunk was submitted."""

    def __init__(self, endpoint: HandoffEndpoint, prompt: int) -> None:
        self._endpoint, self._prompt = endpoint, prompt
        self.early: int | None = None

    def poll(self) -> None:
        self._endpoint.poll()

    def on_submitted(self, step: Step) -> None:
        arrived = self._endpoint.stats().nbytes
        sent = [each for plan in step if plan is not None for each in plan.announcements]
        if any(isinstance(each, RowsWritten) and each.last == self._prompt for each in sent):
            self.early = arrived
        self._endpoint.on_submitted(step)

    def stats(self) -> HandoffStats:
        return self._endpoint.stats()

    def audit(self) -> None:
        self._endpoint.audit()

    def close(self, drain_seconds: float) -> None:
        self._endpoint.close(drain_seconds)


def keep_stepping(engine: Engine, over: threading.Event) -> None:
    while not over.is_set():
        engine.step()
        if engine.waiting_for_peers:
            time.sleep(0.001)


async def early_bytes(model: str, engine: str, chunk: int, chunks: Sequence[int]) -> Table:
    """The demo model computes prompts of so many chunks, one after another, for another process."""
    longest = chunk * max(chunks) + 64
    sizes = {"max_model_len": longest, "device_kv_tokens": 2 * longest, "host_kv_tokens": 3 * longest}
    common: dict[str, Any] = {"model": model, "device": "cpu", "max_num_seqs": 4, "transfer": engine, **sizes}
    client = EngineClient.start(EngineConfig(role="decode", **common))
    prefill = build_engine(EngineConfig(role="prefill", max_num_batched_tokens=chunk, **common), show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    rows, port = [], prefill._endpoint
    assert port is not None
    for count in (1, *chunks):  # the first connects the two
        tokens = count * chunk
        prefill._endpoint = watched = Watched(port, tokens)
        before, over = port.stats().nbytes, threading.Event()
        stepping = threading.Thread(target=keep_stepping, args=(prefill, over))
        stepping.start()
        try:
            prompt = [7 + position % 1000 for position in range(tokens)]
            deltas = client.generate(str(count), prompt, params, prefill_at=prefill.card.control, landing="host")
            async for _ in deltas:
                pass
        finally:
            over.set()
            stepping.join()
        nbytes = port.stats().nbytes - before
        assert watched.early is not None, "the end of a prefill was not seen"
        early = watched.early - before
        rows.append(
            {"engine": engine, "prompt": tokens, "chunks": count, "MB": nbytes / 1e6, "sent early": early / nbytes}
        )
    prefill.close()
    await client.close(0.0)
    return rows[1:]


def draw(path: Path, landings: Table, early: Table) -> None:
    """Draws into `path`. ImportError without matplotlib, which is not needed for the figures in numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    (share, speed), (writes, sent) = axes
    for engine, colour in zip(dict.fromkeys(row["engine"] for row in landings), ("tab:red", "tab:blue"), strict=False):
        fresh, shuffled = ([r for r in landings if (r["engine"], r["pool"]) == (engine, pool)] for pool in POOLS)
        contexts = [row["context"] for row in fresh]
        for rows, line in ((fresh, "o-"), (shuffled, "s--")):
            label = f"{engine}, {rows[0]['pool']} pool"
            share.plot(contexts, [row["of raw"] for row in rows], line, color=colour, label=label)
            writes.plot(contexts, [row["writes"] for row in rows], line, color=colour, label=label)
        speed.plot(contexts, [row["GB/s"] for row in fresh], "o-", color=colour, label=f"{engine}, landed, fresh pool")
        speed.plot(contexts, [row["raw GB/s"] for row in fresh], "^:", color=colour, label=f"{engine}, raw")
    share.axhline(LANDED_BAR, color="black", linestyle=":", label="bar, fresh pool")
    share.set(title="Landed GB/s over raw GB/s", ylim=(0, 1.6))
    speed.set(title="GB/s", ylim=(0, 1.5 * max(row["raw GB/s"] for row in landings)))
    writes.set(title="Writes per request", yscale="log")
    for each in (share, speed, writes):
        each.set_xscale("log", base=2)
        each.set_xticks(contexts, [f"{context // 1024}k" for context in contexts], minor=False)
        each.set_xlabel("context, in tokens")
        each.legend(ncols=2, fontsize="small", loc="lower right" if each is writes else "upper center")
    sent.plot([row["chunks"] for row in early], [row["sent early"] for row in early], "o-", color="tab:red")
    sent.axhline(EARLY_BAR, color="black", linestyle=":", label="bar")
    sent.set(title="Share of bytes sent before prefill ends", xlabel="chunks of the prompt", ylim=(0, 1))
    sent.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def bars(landings: Table, early: Table) -> Table:
    found = []
    for engine in dict.fromkeys(row["engine"] for row in landings):
        worst = min(row["of raw"] for row in landings if (row["engine"], row["pool"]) == (engine, "fresh"))
        found.append((f"{engine}: least share of raw, fresh pool", worst, LANDED_BAR))
    found.append(("least share sent before prefill ends", min(row["sent early"] for row in early), EARLY_BAR))
    return [
        {"target": what, "measured": measured, "bar": f">= {bar}", "verdict": "met" if measured >= bar else "MISSED"}
        for what, measured, bar in found
    ]


def write_json(path: Path, parts: dict[str, Table], load: tuple[float, float]) -> None:
    context = {
        "title": "Landing",
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "load average before and after": load,
        "results": parts,
    }
    path.write_text(json.dumps(context, indent=2) + "\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results into this file (needs matplotlib)")
    parser.add_argument("--engines", nargs="+", default=["nixl", "mooncake"], choices=["nixl", "mooncake"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument(
        "--chunk", type=int, default=EngineConfig().max_num_batched_tokens, help="tokens announced at once"
    )
    parser.add_argument("--keys", choices=["device", "host"], help="where index keys land; default: as in the engine")
    parser.add_argument("--store-gib", type=float, default=1.0, help="memory on each side, for as many layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="models/demo-dsa", help="directory of the model that computes prompts")
    parser.add_argument("--quick", action="store_true", help="two contexts, two rounds, one prompt")
    options = parser.parse_args()
    chunks = [5, 8, 16]
    if options.quick:
        options.contexts, options.rounds, options.store_gib, chunks = [4096, 16384], 2, 0.4, [5]
    torch.set_num_threads(1)
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    landings: Table = []
    cases = []
    for engine in options.engines:
        for tokens in options.contexts:
            keys = options.keys or ("host" if prefer_few_writes(engine, None) else "device")
            fitting = int(options.store_gib * GIB) // Case(engine, tokens, 1, options.chunk, keys).nbytes
            cases.append(Case(engine, tokens, min(LAYERS, fitting), options.chunk, keys))
    try:
        with Progress(transient=True) as progress:
            for case in progress.track(cases, description="landing"):
                landings += measure(case, options.rounds)
        early = asyncio.run(early_bytes(options.model, options.engines[0], CHUNK, chunks))
    except HotsetError as error:
        sys.exit(f"error: {error}")
    where = ", ".join(f"{keys} ({engine})" for engine, keys in {case.engine: case.keys for case in cases}.items())
    notes = f"medians of {options.rounds} rounds; chunks of {options.chunk} tokens; index keys land on the {where}"
    if any(case.layers < LAYERS for case in cases):
        notes += f"; of {LAYERS} layers as many as fit {options.store_gib:g} GiB"
    report("Landing in another process", landings, None, notes)
    report(f"The demo model's prompts, in chunks of {CHUNK} tokens", early, None)
    load = load_before, os.getloadavg()[0]
    took = f"{time.perf_counter() - started:.0f} s; load average {load[0]:.1f} before, {load[1]:.1f} after"
    targets = bars(landings, early)
    report("Targets", targets, None, took)
    if options.json is not None:
        write_json(options.json, {"targets": targets, "landings": landings, "early": early}, load)
    if options.png is not None:
        try:
            draw(options.png, landings, early)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)
    if any(target["verdict"] == "MISSED" for target in targets):
        sys.exit(1)


if __name__ == "__main__":
    main()
