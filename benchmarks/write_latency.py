"""What lanes are for: the time of a small list of writes to one peer while another is slow, with 1 lane and with 4.

Peers are processes of their own. `alone`: nobody else is written to. `busy`: another peer is sent large lists without
pause. `stopped`: so it is, but its process does not run, and nothing that needs its help gets on.
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

from hotset.transfer.api import Region, Transfer, WriteState, WriteTicket
from hotset.transfer.engines import open_transfer

NBYTES = 64 << 20
SMALL, LARGE_WRITES = 16 << 10, 1024
LISTS_AHEAD = 3  # under way to the busy peer at any time


def serve(engine: str, pipe: Connection) -> None:
    memory = np.zeros(NBYTES, np.uint8)
    transfer = open_transfer(engine)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    pipe.send((transfer.describe(), memory.ctypes.data))
    pipe.recv()
    transfer.close()


@dataclass(frozen=True)
class Peer:
    name: str
    address: int
    process: Any


@contextmanager
def peers(engine: str, transfer: Transfer, names: list[str]) -> Iterator[list[Peer]]:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "nixl"])
    opened, pipes = [], []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(engine, theirs), daemon=True)
        process.start()
        description, address = ours.recv()
        transfer.connect(name, description)
        opened.append(Peer(name, address, process))
        pipes.append(ours)
    yield opened
    for pipe, peer in zip(pipes, opened, strict=True):
        os.kill(peer.process.pid, signal.SIGCONT)
        pipe.send(None)
        peer.process.join(10)


def ended(transfer: Transfer, ticket: WriteTicket) -> WriteState:
    while (state := transfer.poll(ticket)) is WriteState.PENDING:
        time.sleep(0.0001)
    return state


def latencies(transfer: Transfer, source: int, quick: Peer, busy: Peer | None, seconds: float) -> list[float]:
    """Seconds of one small list after another to `quick`, while `busy` always has several large ones under way."""
    spans = np.arange(LARGE_WRITES) * (NBYTES // LARGE_WRITES)
    length = np.full(LARGE_WRITES, NBYTES // LARGE_WRITES // 2)
    under_way: list[WriteTicket] = []
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        under_way = [ticket for ticket in under_way if transfer.poll(ticket) is WriteState.PENDING]
        while busy and len(under_way) < LISTS_AHEAD:
            large = np.stack([source + spans, busy.address + spans, length], axis=1)
            under_way.append(transfer.submit(busy.name, large))
        begun = time.perf_counter()
        state = ended(transfer, transfer.submit(quick.name, np.array([[source, quick.address, SMALL]])))
        found.append(time.perf_counter() - begun)
        assert state is WriteState.DONE, state
        time.sleep(0.005)
    return found


def measure(engine: str, lanes: int, case: str, seconds: float) -> dict[str, Any]:
    memory = np.ones(NBYTES, np.uint8)
    transfer = open_transfer(engine, lanes=lanes, deadline_s=2.0)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    with peers(engine, transfer, ["quick", "busy"]) as (quick, busy):
        for peer in (quick, busy):
            first = np.array([[memory.ctypes.data, peer.address, SMALL]])
            assert ended(transfer, transfer.submit(peer.name, first)) is WriteState.DONE
        if case == "stopped":
            os.kill(busy.process.pid, signal.SIGSTOP)
        before = transfer.throughput()
        times = latencies(transfer, memory.ctypes.data, quick, None if case == "alone" else busy, seconds)
        written = transfer.throughput().nbytes - before.nbytes - SMALL * len(times)
    transfer.close()
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {
        "engine": engine,
        "the other peer": case,
        "lanes": lanes,
        "lists": len(times),
        "p50 ms": float(p50),
        "p99 ms": float(p99),
        "worst ms": max(times) * 1e3,
        "to the other, GB/s": written / seconds / 1e9,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", nargs="+", default=["nixl", "mooncake"])
    parser.add_argument("--seconds", type=float, default=3.0)
    chosen = parser.parse_args()
    rows = [
        measure(engine, lanes, case, chosen.seconds)
        for engine in chosen.engines
        for case in ("alone", "busy", "stopped")
        for lanes in (1, 4)
    ]
    report(f"A list of {SMALL} bytes to one peer beside another peer", rows, chosen.json)


if __name__ == "__main__":
    main()
