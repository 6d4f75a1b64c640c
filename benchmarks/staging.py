"""Measures handoffs between unequal tensor-parallel splits: packed through a staging ring against direct writes.

    python benchmarks/staging.py --json staging.json

Two processes have the stores of a GQA model: 30 layers, 8 KV heads of 128 in bf16, shuffled pages of 64 rows. The
prefill side computes nothing and announces all chunks at once. Layout, state machines, control messages, packing,
writer threads and transfer engines are the real ones. The time of a landing is taken at the decode side, from the
request until the landing is complete. The landed bytes are compared with their source.

In the first table, one context of 8192 tokens lands at a time: without staging memory, with it, and between equal
splits (for comparison). From 2 to 4 ranks, rows are packed in the order of the target pages and written directly into
them; from 4 to 2 ranks, they pass through the ring. In the second table, many contexts land at once. They all use the
same source and target pages, so the memory of one context is enough. In the third table, the context is 16 times as
large as the ring.

With --device cuda, rows and staging memory are in GPU memory, and kernels pack and unpack.

Bars (required results), for one context of 8192 tokens: 500 times fewer writes than without staging, and over Mooncake
twice the speed of direct writes (in GPU memory three times). Bar for many contexts over NIXL: 50 % of the speed between
equal splits (in GPU memory 70 %). On two cores, a run takes several minutes, of which direct writes over Mooncake take
more than two.
"""

import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from report import Bar, make_parser, report, write_json
from rich.progress import Progress
from staging_workers import ROW_BYTES, DecodeWorker, StagingCase, count_writes, prefill_process

from hotset.base.engine_settings import DEFAULT_STAGING_MIB
from hotset.base.errors import HotsetError
from hotset.base.units import GIB, MIB

Table = list[dict[str, Any]]

LAYERS = 30
SPLITS = ((2, 4), (4, 2))
CONTEXT = 8192
RINGS_PER_CONTEXT = 16  # size of the context in the third table / size of the ring
WRITES_BAR, SPEED_BAR, GPU_SPEED_BAR = 500, 2.0, 3.0
CPU_SHARE_BAR, GPU_SHARE_BAR = 0.5, 0.7


def measure(case: StagingCase, requests: int, rounds: int) -> dict[str, Any]:
    """Lands `requests` contexts at once, `rounds` times.

    With staging memory, the processes connect in a first landing that is not timed. Without staging memory, they
    connect in the timed landing: another landing would take minutes, while connecting takes milliseconds.
    """
    with prefill_process(case) as pipe:
        worker = DecodeWorker(case)
        peer: str = pipe.recv()
        if case.staging_bytes:
            worker.land(peer)
            worker.check()
            worker.memory.poison()
            count_writes(pipe)
        seconds = [worker.land(peer, requests) for _ in range(rounds)]
        writes = count_writes(pipe) // (rounds * requests)
        worker.check()
        worker.close()
    median_s = statistics.median(seconds)
    return {
        "engine": case.engine,
        "split": f"TP{case.source_ranks} -> TP{case.target_ranks}",
        "context": case.tokens,
        "layers": case.layers,
        "at once": requests,
        "staging": f"{case.staging_bytes / MIB:g} MiB" if case.staging_bytes else "none",
        "ms": median_s * 1e3,
        "GB/s": requests * case.nbytes / median_s / 1e9,
        "writes": writes,
    }


def one_by_one(engine: str, staging: int, layers: int, chunk: int, rounds: int, device: str) -> Table:
    """Lands one context at a time for each of SPLITS: by direct writes, staged, and between equal splits.

    On a GPU, only one layer lands by direct writes, because their speed does not depend on the number of layers.
    """
    rows = []
    for source_ranks, target_ranks in SPLITS:
        staged = StagingCase(engine, CONTEXT, layers, source_ranks, target_ranks, staging, chunk, device)
        rows.append(measure(replace(staged, staging_bytes=0, layers=layers if device == "cpu" else 1), 1, 1))
        rows.append(measure(staged, 1, rounds))
        rows.append(measure(replace(staged, target_ranks=source_ranks), 1, rounds))
    return rows


def many_at_once(case: StagingCase, requests: int) -> dict[str, Any]:
    """Lands `requests` contexts at once, first between the splits of `case`, then between equal splits."""
    staged = measure(case, requests, 1)
    equal = measure(replace(case, target_ranks=case.source_ranks), requests, 1)
    del staged["staging"]
    return {**staged, "equal splits GB/s": equal["GB/s"], "of equal splits": staged["GB/s"] / equal["GB/s"]}


def bars(single: Table, many: Table, device: str) -> list[Bar]:
    results = []
    for engine in dict.fromkeys(row["engine"] for row in single):
        for source_ranks, target_ranks in SPLITS:
            split = f"TP{source_ranks} -> TP{target_ranks}"
            direct, staged = [row for row in single if (row["engine"], row["split"]) == (engine, split)]
            per_layer = direct["writes"] / direct["layers"], staged["writes"] / staged["layers"]
            fewer, faster = per_layer[0] / per_layer[1], staged["GB/s"] / direct["GB/s"]
            results.append(Bar(f"{engine}, {split}: times fewer writes", fewer, WRITES_BAR, at_least=True))
            if engine == "mooncake" or device == "cuda":
                bar = SPEED_BAR if device == "cpu" else GPU_SPEED_BAR
                results.append(Bar(f"{engine}, {split}: times the speed", faster, bar, at_least=True))
    share = CPU_SHARE_BAR if device == "cpu" else GPU_SHARE_BAR
    for row in many:
        if row["engine"] == "nixl":
            name = f"nixl, {row['at once']} contexts of {row['context']}: of equal splits"
            results.append(Bar(name, row["of equal splits"], share, at_least=True))
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--engines", nargs="+", default=["mooncake", "nixl"], choices=["nixl", "mooncake"], help="transfer engines"
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        default=[8192, 16384, 32768, 65536],
        help="context lengths of the second table",
    )
    parser.add_argument("--at-once", type=int, default=32, help="contexts that land at once in the second table")
    parser.add_argument(
        "--staging-mib", type=int, default=DEFAULT_STAGING_MIB, help="size of the staging ring and of the send buffers"
    )
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk")
    parser.add_argument("--store-gib", type=float, default=1.0, help="GiB of KV per side; limits the number of layers")
    parser.add_argument("--many-gib", type=float, default=0.25, help="--store-gib for the second table")
    parser.add_argument("--rounds", type=int, default=3, help="landings per row of the first table that uses staging")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="memory of the rows, and of staging")
    parser.add_argument("--quick", action="store_true", help="few layers; 8 contexts at once, of two lengths")
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.at_once, options.store_gib, options.many_gib = [8192, 16384], 8, 0.07, 0.07
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    staging, chunk = options.staging_mib * MIB, options.chunk

    def layers(tokens: int, gib: float) -> int:
        return max(1, min(LAYERS, int(gib * GIB) // (tokens * ROW_BYTES)))

    single: Table = []
    many: Table = []
    long: Table = []
    try:
        with Progress(transient=True) as progress:
            for engine in progress.track(options.engines, description="staging"):
                count, device = layers(CONTEXT, options.store_gib), options.device
                single += one_by_one(engine, staging, count, chunk, options.rounds, device)
                for tokens in options.contexts:
                    case = StagingCase(engine, tokens, layers(tokens, options.many_gib), 2, 4, staging, chunk, device)
                    many.append(many_at_once(case, options.at_once))
                ring_bytes = CONTEXT * count * ROW_BYTES // RINGS_PER_CONTEXT
                long.append(measure(StagingCase(engine, CONTEXT, count, 4, 2, ring_bytes, chunk, device), 1, 1))
    except HotsetError as error:
        sys.exit(f"error: {error}")
    rows = [bar.row() for bar in bars(single, many, options.device)]
    note = f"up to {LAYERS} layers, fewer if they exceed {options.store_gib:g} GiB; chunks of {chunk} tokens"
    report("One context at a time", single, None, note)
    note = f"up to {LAYERS} layers, fewer if they exceed {options.many_gib:g} GiB"
    report(f"{options.at_once} contexts at once, staged", many, None, note)
    report(f"A context of {RINGS_PER_CONTEXT} times the ring's size", long, None)
    duration = f"{time.perf_counter() - start:.0f} s; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    report("Bars", rows, None, duration)
    if options.json is not None:
        tables = {"bars": rows, "one at a time": single, "many at once": many, "longer than the ring": long}
        write_json(options.json, "Staging", tables)


if __name__ == "__main__":
    main()
