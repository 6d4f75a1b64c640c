"""Measures the latency of a small write to one peer while another peer is idle, busy or stopped, with 1 and 4 lanes.

    python benchmarks/write_latency.py --json write_latency.json

A lane is a thread of the transfer layer, and every peer belongs to one lane (hotset/fleet/transfer/lanes.py). Both
peers are separate processes. The column "the other peer" is one of
  alone    nothing is written to the other peer
  busy     large lists of writes are sent to the other peer without a pause
  stopped  lists are sent as with "busy", but the other peer's process is stopped (SIGSTOP), so writes that need its CPU
           do not progress

There is no required result. A run takes about a minute with both transfer engines.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from report import make_parser, report

from hotset.fleet.transfer.api import Region, Transfer, WriteState, WriteTicket
from hotset.fleet.transfer.engines import open_transfer

NBYTES = 64 << 20
SMALL_BYTES = 16 << 10
WRITES_PER_LIST = 1024  # writes in one list to the busy peer
LISTS_IN_FLIGHT = 3  # lists to the busy peer that are in flight at the same time


def serve_peer(engine: str, pipe: Connection) -> None:
    memory = np.zeros(NBYTES, np.uint8)
    transfer = open_transfer(engine)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    pipe.send((transfer.describe(), memory.ctypes.data))
    pipe.recv()
    transfer.close()


@dataclass(frozen=True)
class Peer:
    """A process whose memory can be written to."""

    name: str
    address: int
    process: Any


@contextmanager
def peers(engine: str, transfer: Transfer, names: list[str]) -> Iterator[list[Peer]]:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "nixl"])
    started, pipes = [], []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_peer, args=(engine, theirs), daemon=True)
        process.start()
        description, address = ours.recv()
        transfer.connect(name, description)
        started.append(Peer(name, address, process))
        pipes.append(ours)
    yield started
    for pipe, peer in zip(pipes, started, strict=True):
        os.kill(peer.process.pid, signal.SIGCONT)
        pipe.send(None)
        peer.process.join(10)


def wait(transfer: Transfer, ticket: WriteTicket) -> WriteState:
    while (state := transfer.poll(ticket)) is WriteState.PENDING:
        time.sleep(0.0001)
    return state


def latencies(transfer: Transfer, source: int, quick: Peer, busy: Peer | None, seconds: float) -> list[float]:
    """Makes small writes to `quick`, one after another, while large lists to `busy` (unless it is None) are in flight.
    Returns the seconds of each small write."""
    offsets = np.arange(WRITES_PER_LIST) * (NBYTES // WRITES_PER_LIST)
    length = np.full(WRITES_PER_LIST, NBYTES // WRITES_PER_LIST // 2)
    in_flight: list[WriteTicket] = []
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        in_flight = [ticket for ticket in in_flight if transfer.poll(ticket) is WriteState.PENDING]
        while busy and len(in_flight) < LISTS_IN_FLIGHT:
            large = np.stack([source + offsets, busy.address + offsets, length], axis=1)
            in_flight.append(transfer.submit(busy.name, large))
        start = time.perf_counter()
        state = wait(transfer, transfer.submit(quick.name, np.array([[source, quick.address, SMALL_BYTES]])))
        times.append(time.perf_counter() - start)
        assert state is WriteState.DONE, state
        time.sleep(0.005)
    return times


def measure(engine: str, lanes: int, case: str, seconds: float) -> dict[str, Any]:
    memory = np.ones(NBYTES, np.uint8)
    transfer = open_transfer(engine, lanes=lanes, deadline_s=2.0)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    with peers(engine, transfer, ["quick", "busy"]) as (quick, busy):
        for peer in (quick, busy):
            first = np.array([[memory.ctypes.data, peer.address, SMALL_BYTES]])
            assert wait(transfer, transfer.submit(peer.name, first)) is WriteState.DONE
        if case == "stopped":
            os.kill(busy.process.pid, signal.SIGSTOP)
        before = transfer.throughput()
        times = latencies(transfer, memory.ctypes.data, quick, None if case == "alone" else busy, seconds)
        written = transfer.throughput().nbytes - before.nbytes - SMALL_BYTES * len(times)
    transfer.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {
        "engine": engine,
        "the other peer": case,
        "lanes": lanes,
        "writes": len(times),
        "p50 ms": float(p50),
        "p99 ms": float(p99),
        "max ms": max(times) * 1e3,
        "to the other peer, GB/s": written / seconds / 1e9,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--engines", nargs="+", default=["nixl", "mooncake"], choices=["nixl", "mooncake"], help="transfer engines"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    options = parser.parse_args()
    rows = [
        measure(engine, lanes, case, options.seconds)
        for engine in options.engines
        for case in ("alone", "busy", "stopped")
        for lanes in (1, 4)
    ]
    report(f"Latency of a write of {SMALL_BYTES >> 10} KiB to one peer", rows, options.json)


if __name__ == "__main__":
    main()
