"""Measures how fast contexts land in another process, against the raw speed of the transfer engine.

    python benchmarks/landing.py --json landing.json

Two processes have stores as for a production model: fp8 rows of 656 bytes, fp8 index keys of 132 bytes, pages of 64
rows. The prefill side computes nothing and announces all chunks at once. Layout, state machines, control messages,
lanes and transfer engines are the real ones. As in the engine, rows and index keys are sent from the host store, rows
land in pages of the host store, and index keys land in pages of the device pool (here in ordinary memory). A device
page holds 318 keys and ends in 8 unused bytes, which the source does not have, so one write carries at most the keys of
one device page. With Mooncake, where each write is expensive, keys land in host pages instead and are merged like rows.
The time of a landing is taken at the decode side, from the request until the landing is complete. The bytes of the
first landing in each kind of pool, which is not timed, are compared with their source.

As in the engine, contexts pass through staging memory if that costs less than direct writes. Between GPU memories it
nearly always does.

--routes measures other memories: with `device to device`, contexts are read from GPU memory, in the layout of a host
store, and rows and index keys land in pages of the device pool. Without a GPU, the device is ordinary memory.

Columns (medians over the rounds):
  pool            fresh: the pages of a context are consecutive on both sides; shuffled: they are in random order
  ms              time of a landing
  writing ms      time in which a write of the landing was in flight; the remaining time is spent on control messages
  raw GB/s        speed of the transfer engine alone, in the same rounds: it writes one contiguous span, in writes of
                  the maximum size
  of raw          speed of the landing / raw speed
  of same writes  time of the writes of the landing, repeated without control messages / time of the landing
  writes          number of writes that were posted

Bars (required results): a landing on a fresh pool reaches 80 % of the raw speed, or 20 GB/s from device to device. The
exit code is 1 if a bar is missed. A run takes several minutes on two cores, --quick about one minute. Each row is
printed when it is measured, and the table at the end.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from landing_workers import DecodeWorker, LandingCase, prefill_process, query, reply
from report import Bar, make_parser, report, write_json

from hotset.base.config import EngineConfig
from hotset.base.errors import HotsetError
from hotset.base.units import GIB

Table = list[dict[str, Any]]

LAYERS = 61
POOLS = ("fresh", "shuffled")
ROUTES = ("host-host", "host-device", "device-host", "device-device")
MAX_RAW_BYTES = 128 << 20  # bytes of a raw write: enough for its full speed
LANDED_BAR = 0.8
DEVICE_BAR = 20  # GB/s, instead of a share of raw: a raw write within one GPU is faster than any network


@dataclass(frozen=True, slots=True)
class TimedLanding:
    """The times of one landing."""

    seconds: float
    writing_s: float  # seconds in which a write was in flight
    writes: int
    repeated_s: float  # seconds of the same writes, repeated without control messages


def land(worker: DecodeWorker, pipe: Connection, peer: str, pool: str) -> TimedLanding:
    before = query(pipe, "start")
    seconds = worker.land(peer, pool)
    after, writes, repeated_s = query(pipe, "writes")
    return TimedLanding(seconds, after - before, writes, repeated_s)


def measure(pipe: Connection, case: LandingCase, rounds: int) -> Table:
    """Alternates raw writes and landings. Returns one table row per kind of pool, and prints each when it is known.
    `pipe` leads to the prefill process."""
    pipe.send(case)  # both processes allocate and register their memory at the same time
    worker = DecodeWorker(case)
    peer: str = reply(pipe)
    nbytes = min(worker.memory.nbytes, query(pipe, "bytes"), MAX_RAW_BYTES)
    raw_write = (worker.hello, worker.memory.data_ptr(), nbytes)
    query(pipe, raw_write)  # connects
    table = []
    for pool in POOLS:
        worker.poison()
        worker.land(peer, pool)
        worker.check(pool)
        raw_speeds: list[float] = []
        landings: list[TimedLanding] = []
        for _ in range(rounds):
            raw_speeds.append(nbytes / query(pipe, raw_write) / 1e9)
            landings.append(land(worker, pipe, peer, pool))
        table.append(table_row(case, pool, landings, raw_speeds))
        shown = (value if isinstance(value, str) else f"{name} {value:.4g}" for name, value in table[-1].items())
        print(", ".join(shown), flush=True)
    worker.close()
    return table


def table_row(
    case: LandingCase, pool: str, landings: Sequence[TimedLanding], raw_speeds: Sequence[float]
) -> dict[str, Any]:
    speeds = [case.nbytes / landing.seconds / 1e9 for landing in landings]
    return {
        "engine": case.engine,
        "route": f"{case.source} to {case.target}",
        "context": case.tokens,
        "layers": case.layers,
        "pool": pool,
        "ms": statistics.median(landing.seconds for landing in landings) * 1e3,
        "writing ms": statistics.median(landing.writing_s for landing in landings) * 1e3,
        "GB/s": statistics.median(speeds),
        "raw GB/s": statistics.median(raw_speeds),
        "of raw": statistics.median(speed / raw for speed, raw in zip(speeds, raw_speeds, strict=True)),
        "of same writes": statistics.median(landing.repeated_s / landing.seconds for landing in landings),
        "writes": landings[0].writes,
    }


def bars(landings: Table) -> list[Bar]:
    results = []
    for engine, route in dict.fromkeys((row["engine"], row["route"]) for row in landings):
        fresh = [row for row in landings if (row["engine"], row["route"], row["pool"]) == (engine, route, "fresh")]
        column, bar = ("GB/s", DEVICE_BAR) if route == "device to device" else ("of raw", LANDED_BAR)
        lowest = min(row[column] for row in fresh)
        results.append(Bar(f"{engine}, {route}, fresh pool: lowest {column}", lowest, bar, at_least=True))
    return results


def default_keys(engine: str) -> str:
    """Returns where index keys land if rows land on the host. It is the same as in an engine on a CPU."""
    return "host" if engine == "mooncake" else "device"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--engines", nargs="+", default=["nixl", "mooncake"], choices=["nixl", "mooncake"], help="transfer engines"
    )
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536], help="context lengths in tokens"
    )
    parser.add_argument(
        "--chunk", type=int, default=EngineConfig().max_num_batched_tokens, help="tokens per chunk in the first table"
    )
    parser.add_argument("--keys", choices=["device", "host"], help="where index keys land; default: as in the engine")
    parser.add_argument(
        "--routes", nargs="+", default=["host-host"], choices=ROUTES, help="memory that is read, and memory to land in"
    )
    parser.add_argument("--store-gib", type=float, default=1.0, help="GiB of KV per side; limits the number of layers")
    parser.add_argument("--rounds", type=int, default=5, help="timed landings per kind of pool")
    parser.add_argument("--quick", action="store_true", help="two contexts, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.rounds, options.store_gib = [4096, 16384], 2, 0.4
    torch.set_num_threads(1)
    start, load_before = time.perf_counter(), os.getloadavg()[0]
    landings: Table = []
    cases = []
    for engine in options.engines:
        for tokens in options.contexts:
            for route in options.routes:
                source, target = route.split("-")
                keys = "device" if target == "device" else options.keys or default_keys(engine)
                one_layer = LandingCase(engine, tokens, 1, options.chunk, keys, source, target)
                max_layers = int(options.store_gib * GIB) // one_layer.nbytes
                cases.append(replace(one_layer, layers=min(LAYERS, max_layers)))
    try:
        with prefill_process() as pipe:
            for case in cases:
                landings += measure(pipe, case, options.rounds)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    where = ", ".join(f"{keys} ({engine})" for engine, keys in {case.engine: case.keys for case in cases}.items())
    notes = f"medians of {options.rounds} rounds; chunks of {options.chunk} tokens; index keys land on the {where}"
    if any(case.layers < LAYERS for case in cases):
        notes += f"; up to {LAYERS} layers, fewer if they exceed {options.store_gib:g} GiB"
    report("Contexts landing in another process", landings, None, notes)
    load = load_before, os.getloadavg()[0]
    duration = f"{time.perf_counter() - start:.0f} s; load average {load[0]:.1f} before, {load[1]:.1f} after"
    results = bars(landings)
    rows = [bar.row() for bar in results]
    report("Bars", rows, None, duration)
    if options.json is not None:
        tables = {"bars": rows, "landings": landings}
        write_json(options.json, "Landing", tables, **{"load average before and after": load})
    if not all(bar.met for bar in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
