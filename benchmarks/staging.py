"""Handoffs between workers that divide heads differently: by writes into pages, and packed, by way of a ring.

    python benchmarks/staging.py --json staging.json

Two processes with the stores of a GQA model of 30 layers (8 KV heads of 128 in bf16, pages of 64 rows, in any order).
The engine on the prefill side is a stand-in: nothing is computed, and every chunk is announced at once. All else is
real: layout, state machines, control messages, packing, lanes, transfer engine. A landing is timed at the decode side,
from the request for it until the engine is told that all of it is there; its bytes are compared with their source.

First, one context at a time: without staging, with it, and between workers that divide alike, in turns. Then many at
once, of several lengths. (They come from the same pages and land in the same pages, with the same bytes: so memory need
not hold them all.) Last, a context of 16 times the ring.

Bars, for one context of 8k: at least 500 times fewer writes, and over Mooncake at least twice the speed.
"""

import datetime
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import hardware, make_parser, report
from rich.progress import Progress
from staging_workers import ROW_BYTES, Case, DecodeWorker, ask, prefill_process

from hotset.base.errors import HotsetError
from hotset.base.units import GIB, MIB

Table = list[dict[str, Any]]

LAYERS = 30
SPLITS = ((2, 4), (4, 2))
CONTEXT = 8192
RING_SHARE = 16
WRITES_BAR, SPEED_BAR = 500, 2.0


def measure(case: Case, requests: int, rounds: int) -> dict[str, Any]:
    """So many contexts at once, as often as that, after one that connects the two; without staging that is left out,
    since it takes minutes where connecting takes milliseconds."""
    with prefill_process(case) as pipe:
        worker = DecodeWorker(case)
        peer: str = pipe.recv()
        if case.staging_bytes:
            worker.land(peer)
            worker.check()
            worker.memory.poison()
            ask(pipe, "written")
        seconds = [worker.land(peer, requests) for _ in range(rounds)]
        writes = ask(pipe, "written") // (rounds * requests)
        worker.check()
        worker.close()
    took = statistics.median(seconds)
    return {
        "engine": case.engine,
        "split": f"TP{case.source_ranks} -> TP{case.target_ranks}",
        "context": case.tokens,
        "layers": case.layers,
        "at once": requests,
        "staging": f"{case.staging_bytes / MIB:g} MiB" if case.staging_bytes else "none",
        "ms": took * 1e3,
        "GB/s": requests * case.nbytes / took / 1e9,
        "writes": writes,
    }


def one_by_one(engine: str, staging: int, layers: int, chunk: int, rounds: int) -> Table:
    rows = []
    for here, there in SPLITS:
        rows.append(measure(Case(engine, CONTEXT, layers, here, there, 0, chunk), 1, 1))
        rows.append(measure(Case(engine, CONTEXT, layers, here, there, staging, chunk), 1, rounds))
        rows.append(measure(Case(engine, CONTEXT, layers, here, here, staging, chunk), 1, rounds))
    return rows


def many_at_once(case: Case, requests: int) -> dict[str, Any]:
    """Beside workers that divide alike."""
    staged = measure(case, requests, 1)
    alike = measure(
        Case(
            case.engine, case.tokens, case.layers, case.source_ranks, case.source_ranks, case.staging_bytes, case.chunk
        ),
        requests,
        1,
    )
    del staged["staging"]
    return {**staged, "alike GB/s": alike["GB/s"], "of alike": staged["GB/s"] / alike["GB/s"]}


def bars(alone: Table) -> Table:
    found: list[tuple[str, float, float]] = []
    for engine in dict.fromkeys(row["engine"] for row in alone):
        for here, there in SPLITS:
            split = f"TP{here} -> TP{there}"
            direct, staged = [row for row in alone if (row["engine"], row["split"]) == (engine, split)]
            fewer, faster = direct["writes"] / staged["writes"], staged["GB/s"] / direct["GB/s"]
            found.append((f"{engine}, {split}: times fewer writes", fewer, WRITES_BAR))
            if engine == "mooncake":
                found.append((f"{engine}, {split}: times the speed", faster, SPEED_BAR))
    return [
        {"target": what, "measured": measured, "bar": f">= {bar}", "met": measured >= bar}
        for what, measured, bar in found
    ]


def write_json(path: Path, parts: dict[str, Table]) -> None:
    context = {
        "title": "Staging",
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "results": parts,
    }
    path.write_text(json.dumps(context, indent=2) + "\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", nargs="+", default=["mooncake", "nixl"], choices=["nixl", "mooncake"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--staging-mib", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens announced at once")
    parser.add_argument("--store-gib", type=float, default=1.0, help="memory on each side, for as many layers")
    parser.add_argument("--many-gib", type=float, default=0.25, help="the same, where many contexts travel at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few layers, two contexts, 8 at once")
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.at_once, options.store_gib, options.many_gib = [8192, 16384], 8, 0.07, 0.07
    torch.set_num_threads(1)
    started, load = time.perf_counter(), os.getloadavg()[0]
    staging, chunk = options.staging_mib * MIB, options.chunk

    def layers(tokens: int, gib: float) -> int:
        return max(1, min(LAYERS, int(gib * GIB) // (tokens * ROW_BYTES)))

    alone: Table = []
    together: Table = []
    long: Table = []
    try:
        with Progress(transient=True) as progress:
            for engine in progress.track(options.engines, description="staging"):
                alone += one_by_one(engine, staging, layers(CONTEXT, options.store_gib), chunk, options.rounds)
                for tokens in options.contexts:
                    case = Case(engine, tokens, layers(tokens, options.many_gib), 2, 4, staging, chunk)
                    together.append(many_at_once(case, options.at_once))
                count = layers(CONTEXT, options.store_gib)
                whole = Case(engine, CONTEXT, count, 4, 2, CONTEXT * count * ROW_BYTES // RING_SHARE, chunk)
                long.append(measure(whole, 1, 1))
    except HotsetError as error:
        sys.exit(f"error: {error}")
    targets = bars(alone)
    note = f"of {LAYERS} layers as many as fit {options.store_gib:g} GiB; chunks of {chunk} tokens"
    report("One context at a time", alone, None, note)
    report(
        f"{options.at_once} contexts at once, staged", together, None, f"as many layers as fit {options.many_gib:g} GiB"
    )
    report(f"A context of {RING_SHARE} times the ring", long, None)
    took = f"{time.perf_counter() - started:.0f} s; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    report("Targets", targets, None, took)
    if options.json is not None:
        write_json(options.json, {"targets": targets, "one": alone, "at once": together, "of 16 rings": long})


if __name__ == "__main__":
    main()
