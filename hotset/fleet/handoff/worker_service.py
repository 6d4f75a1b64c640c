"""The service of a worker process for handoffs: it serves transfer endpoints for the memory that only it has mapped."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from hotset.base.listeners import LOOPBACK_INTERFACE, check_listeners, listeners
from hotset.base.processes import this_process
from hotset.engine.ports import Messages
from hotset.engine.workers.messages import THIS_MACHINE, RunningService, WorkerRank
from hotset.fleet.handoff.messages import PackedPiece
from hotset.fleet.handoff.packing import pack, unpack
from hotset.fleet.handoff.routes import PROBE_BYTES
from hotset.fleet.handoff.stores import (
    TransferMemory,
    WorkerMemory,
    host_spans,
    memory_devices,
    pool_spans,
    regions,
)
from hotset.fleet.transfer.api import MemoryKind, Transfer
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.workers import TransferServer
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore


@dataclass(frozen=True, slots=True)
class TransferService:
    """Implements `WorkerService`: opens transfer endpoints in a worker process when the engine's process asks for them.

    The endpoints register the worker's host store (if `start` receives it), its device pool (if `with_pool`), its probe
    memory and its staging memory.
    """

    settings: TransferSettings
    open_transfer: Callable[[TransferSettings], Transfer]
    with_pool: bool
    staging_bytes: int  # staging memory of each kind; workers on other nodes have none

    def start(
        self, rank: WorkerRank, pool: DevicePool, host: HostStore | None, connection: Messages
    ) -> RunningService[WorkerMemory]:
        served_pool = pool if self.with_pool else None
        on_this_machine = rank.node == THIS_MACHINE
        devices = memory_devices(served_pool, host=False)
        gpu = devices.get(MemoryKind.DEVICE)  # the engine's process has the probe in host memory
        probes = TransferMemory(PROBE_BYTES, {} if gpu is None else {MemoryKind.DEVICE: gpu}, zeroed=True)
        staging = TransferMemory(self.staging_bytes if on_this_machine else 0, devices)
        registered = [*regions([] if host is None else [host], served_pool), *probes.regions, *staging.regions]
        known = [] if on_this_machine else [listener.address for listener in listeners()]  # opened by Ray

        def open_endpoint() -> Transfer:
            opened = self.open_transfer(replace(self.settings, device=str(pool.device)))
            for region in registered:
                opened.register(region)
            interfaces = (LOOPBACK_INTERFACE, *self.settings.interface.split(","))
            check_listeners(rank.name, addresses=known, interfaces=interfaces)
            return opened

        def copy_piece(direction: str, piece: PackedPiece, process: int) -> None:
            (pack if direction == "pack" else unpack)(piece, process, pool.device)

        described = WorkerMemory(
            pool=None if served_pool is None else pool_spans(served_pool),
            host=None if host is None else host_spans(host),
            probes=probes.ranges,
            staging=staging.ranges,
            process=this_process(),
        )
        server = TransferServer(connection, open_endpoint, copy_piece)
        threading.Thread(target=server.serve, daemon=True).start()
        return RunningService(described, memory=(probes, staging))
