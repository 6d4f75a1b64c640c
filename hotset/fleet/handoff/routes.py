"""Measures routes: how fast writes from each kind of memory of this worker reach each kind of memory of a peer.

A transfer engine moves bytes in very different ways, and does not report which way it uses. Over UCX without RDMA, for
example, writes with GPU memory at one end are ten times slower than between host memories, and writes with GPU memory
at both ends are a hundred times faster. When a prefill worker connects to a decode worker, it therefore measures a few
short writes from and to probe memory, which is used for nothing else. The decode worker receives the result, and
chooses where contexts land.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hotset.base.errors import TransferError
from hotset.base.rdma import SYSFS, active_ports
from hotset.engine.ports import Route
from hotset.fleet.handoff.messages import MemoryRange
from hotset.fleet.transfer.api import Transfer, Writes, WriteState

LOGGER = logging.getLogger("hotset.fleet.handoff")

PROBE_BYTES = 16 << 20  # probe memory of each kind, and the size of a large probe, unless the link is slow
SMALL_BYTES, NUM_SMALL = 4096, 256  # the small probe: this many separate writes of this size
ROUNDS = 3  # the best round counts; the first ones may still set up connections
ROUTE_SECONDS = 1.0  # a route is not measured for longer than about this
POLL_SECONDS = 0.0002

# Contexts land in GPU memory if its route has at least this share of the speed of the route to host memory: loading
# them from host memory to the GPU later is much faster than a network. Contexts are kept in GPU memory and read there
# if the route from host memory has less than this share of the speed of the route from GPU memory.
DEVICE_SHARE = 0.8
# A write whose fixed cost is above this is avoided if an additional copy saves it.
EXPENSIVE_WRITE_SECONDS = 30e-6

Probes = Mapping[str, MemoryRange]  # by the value of MemoryKind


def measure_routes(
    transfer: Transfer,
    peer: str,
    local: Probes,
    remote: Probes,
    clock: Callable[[], float] = time.monotonic,
    sysfs: Path = SYSFS,
) -> tuple[Route, ...]:
    """Measures the route from every kind of `local` probe memory to every kind of `remote` probe memory, the peer's.
    Leaves out routes on which writes fail. Blocks for at most a few seconds. The peer must be connected.
    Warns if routes use TCP although this machine, whose devices are below `sysfs`, has active RDMA ports.

    Raises TransferError if both sides have probes, but no route between them works.
    """
    routes = []
    for source, from_memory in local.items():
        for target, to_memory in remote.items():
            route = _measure(transfer, peer, source, from_memory, target, to_memory, clock)
            if route is not None:
                routes.append(route)
    if local and remote and not routes:
        raise TransferError(
            f"none of its memory ({', '.join(remote)}) can be written from here over {transfer.name} "
            f"({transfer.transport()}); check that --transfer-interface names a network that connects both workers, "
            "that no firewall closes it, and that UCX_TLS, if it is set, is the same on both sides"
        )
    transport = transfer.transport()
    LOGGER.info("routes to %s over %s: %s", peer, transport, show_routes(routes) or "not measured")
    if uses_tcp(transport) and (ports := active_ports(sysfs=sysfs)):
        text = "KV travels to %s over TCP, %s, although this machine has active RDMA ports; %s, on both sides"
        LOGGER.warning(text, peer, transport, f"give --transfer-interface {','.join(ports)}")
    return tuple(routes)


def uses_tcp(transport: str) -> bool:
    """Returns whether the text of `Transfer.transport` names a kind of connection that has only TCP, and not on
    loopback."""
    kinds = [re.findall(r"(\w+)/([\w:.]+)", kind) for kind in transport.split(";")]
    return any(kind and all(name == "tcp" and device != "lo" for name, device in kind) for kind in kinds)


def show_routes(routes: Sequence[Route]) -> str:
    """Returns a text like `host to host 4.40 GB/s, host to device 0.38 GB/s`."""
    return ", ".join(f"{route.source} to {route.target} {route.gb_per_s:.2f} GB/s" for route in routes)


def find_route(routes: Sequence[Route], source: str, target: str) -> Route | None:
    """Returns the route between these kinds of memory, or None if there is none."""
    return next((route for route in routes if (route.source, route.target) == (source, target)), None)


def _measure(
    transfer: Transfer,
    peer: str,
    source: str,
    from_memory: MemoryRange,
    target: str,
    to_memory: MemoryRange,
    clock: Callable[[], float],
) -> Route | None:
    nbytes = min(from_memory.nbytes, to_memory.nbytes)
    large = np.array([[from_memory.address, to_memory.address, nbytes]], np.int64)
    # Every second block is written, so that the transfer engine cannot merge the writes.
    offsets = np.arange(min(NUM_SMALL, nbytes // (2 * SMALL_BYTES)), dtype=np.int64) * 2 * SMALL_BYTES
    sizes = np.full(len(offsets), min(SMALL_BYTES, nbytes), np.int64)
    small = np.stack([from_memory.address + offsets, to_memory.address + offsets, sizes], axis=1)
    until = clock() + ROUTE_SECONDS
    per_small = per_byte = float("inf")
    for _ in range(ROUNDS):
        taken = _time(transfer, peer, small, until, clock)
        if taken is None:
            return None
        per_small = min(per_small, taken / max(1, len(small)))
        # One large write takes at most as long as small ones of the same size: over a slow link it is made shorter.
        fitting = int(max(0.0, until + ROUTE_SECONDS / 2 - clock()) / per_small * SMALL_BYTES)
        large[0, 2] = size = min(nbytes, max(SMALL_BYTES, fitting))
        taken = _time(transfer, peer, large, until, clock)
        if taken is None:
            return None
        per_byte = min(per_byte, taken / size)
        if clock() >= until:
            break
    per_write = max(0.0, per_small - SMALL_BYTES * per_byte)
    return Route(source, target, 1e-9 / max(per_byte, 1e-15), per_write)


def _time(transfer: Transfer, peer: str, writes: Writes, until: float, clock: Callable[[], float]) -> float | None:
    """Returns the seconds that a list of writes takes. Returns None if it fails, or ROUTE_SECONDS after `until`.

    An unfinished list may still write, but only to probe memory.
    """
    began = clock()
    ticket = transfer.submit(peer, writes)
    while (state := transfer.poll(ticket)) is WriteState.PENDING:
        if clock() >= until + ROUTE_SECONDS:
            return None
        time.sleep(POLL_SECONDS)
    return max(clock() - began, 1e-9) if state is WriteState.DONE else None
