"""The endpoints of several processes behave like one: bytes arrive from and in the memory of every process.

The processes are threads of the test. They serve endpoints as worker processes do, over pipes.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe

import numpy as np
import pytest
from far_end import wait_for_end
from loopback import Hub, Loopback
from waiting import ManualEvent

from hotset.base.errors import EngineStopped, StartupError, TransferError
from hotset.fleet.transfer.api import Region, Transfer, WriteState
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.workers import (
    RemoteTransfer,
    TransferServer,
    WorkerConnection,
    WorkerTransfers,
    engine_address,
    process_and_address,
)

NBYTES = 1 << 16
DEADLINE_S = 10.0
POISON = 0xAB


@dataclass
class EngineProcesses:
    """The memory of each process of an engine, and its endpoints."""

    hub: Hub
    engine: str
    count: int
    memory: list[np.ndarray] = field(init=False)
    transfer: WorkerTransfers = field(init=False)
    connections: list[WorkerConnection] = field(default_factory=list)
    served: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [np.full(NBYTES, POISON, np.uint8) for _ in range(self.count)]
        endpoints: list[Transfer] = [self.open_endpoint(0)]
        for process in range(1, self.count):
            ours, theirs = Pipe()
            thread = threading.Thread(target=TransferServer(theirs, partial(self.open_endpoint, process)).serve)
            thread.start()
            self.served.append(thread)
            self.connections.append(WorkerConnection(ours))
            endpoints.append(RemoteTransfer(self.connections[-1], DEADLINE_S))
        self.transfer = WorkerTransfers(endpoints)

    def open_endpoint(self, process: int) -> Transfer:
        opened = Loopback(self.hub) if self.engine == "loopback" else TransferSettings(self.engine, lanes=1).open()
        opened.register(Region(self.memory[process].ctypes.data, NBYTES))
        return opened

    def address(self, process: int, offset: int) -> int:
        return engine_address(process, self.memory[process].ctypes.data + offset)

    def close(self) -> None:
        assert self.transfer.close()
        for connection in self.connections:
            connection.close()
        for thread in self.served:
            thread.join(30)
            assert not thread.is_alive(), "a worker serves endpoints although its connection is closed"


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.slow)])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[EngineProcesses, EngineProcesses]]:
    """Yields an engine of three processes, which is connected to one of two."""
    with ExitStack() as stack:
        hub = Hub(threaded=True)
        stack.callback(hub.close)
        source, target = (EngineProcesses(hub, request.param, count) for count in (3, 2))
        stack.callback(target.close)
        stack.callback(source.close)
        source.transfer.connect("peer", target.transfer.describe())
        yield source, target


def test_addresses_of_processes_are_told_apart() -> None:
    assert process_and_address(engine_address(7, 0x7FFF_1234_5678)) == (7, 0x7FFF_1234_5678)
    assert engine_address(0, 4096) == 4096


def test_a_list_of_writes_between_all_processes_arrives(engines: tuple[EngineProcesses, EngineProcesses]) -> None:
    source, target = engines
    random = np.random.default_rng(3)
    for memory in source.memory:
        memory[:] = random.integers(0, 256, NBYTES, np.uint8)
    expected = [memory.copy() for memory in target.memory]
    writes = []
    for slot in range(200):
        nbytes = int(random.integers(1, 300))
        source_process, target_process = int(random.integers(3)), int(random.integers(2))
        source_offset, target_offset = int(random.integers(NBYTES - 300)), slot * 310
        writes.append(
            [source.address(source_process, source_offset), target.address(target_process, target_offset), nbytes]
        )
        sent = source.memory[source_process][source_offset : source_offset + nbytes]
        expected[target_process][target_offset : target_offset + nbytes] = sent
    ticket = source.transfer.submit("peer", np.array(writes, np.int64))
    assert wait_for_end(source.transfer, ticket, DEADLINE_S) is WriteState.DONE
    assert ticket.nbytes == sum(nbytes for _, _, nbytes in writes) == source.transfer.throughput().nbytes
    for found, wanted in zip(target.memory, expected, strict=True):
        assert np.array_equal(found, wanted)


def test_a_list_waits_for_its_event_in_every_process(engines: tuple[EngineProcesses, EngineProcesses]) -> None:
    source, target = engines
    writes = np.array([[source.address(n, 0), target.address(1, 64 * n), 8] for n in range(3)], np.int64)
    for number, memory in enumerate(source.memory):
        memory[:8] = number
    event = ManualEvent()
    ticket = source.transfer.submit("peer", writes, event)
    time.sleep(0.05)
    assert source.transfer.poll(ticket) is WriteState.PENDING and (target.memory[1] == POISON).all()
    event.happened = True
    assert wait_for_end(source.transfer, ticket, DEADLINE_S) is WriteState.DONE
    assert [target.memory[1][64 * n] for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("near", "far", "offset"), [(0, 2, 0), (3, 0, 0), (2, 1, NBYTES - 4)])
def test_writes_outside_registered_memory_are_refused(
    engines: tuple[EngineProcesses, EngineProcesses], near: int, far: int, offset: int
) -> None:
    """The peer has no process 2, this engine no process 3, and the last write leaves the memory of its process."""
    source, target = engines
    local = engine_address(near, source.memory[near % 3].ctypes.data)
    remote = engine_address(far, target.memory[far % 2].ctypes.data + offset)
    ticket = source.transfer.submit("peer", np.array([[local, remote, 8]], np.int64))
    assert wait_for_end(source.transfer, ticket, DEADLINE_S) is WriteState.FAILED_QUIESCED
    assert all((memory == POISON).all() for memory in target.memory)


def test_a_forgotten_peer_gets_no_more_bytes(engines: tuple[EngineProcesses, EngineProcesses]) -> None:
    source, target = engines
    source.transfer.forget("peer")
    writes = np.array([[source.address(n, 0), target.address(0, 64 * n), 8] for n in range(3)], np.int64)
    source.memory[0][:8] = 1
    ticket = source.transfer.submit("peer", writes)
    assert wait_for_end(source.transfer, ticket, DEADLINE_S) is WriteState.FAILED_QUIESCED
    assert (target.memory[0] == POISON).all()


@pytest.mark.parametrize("description", [b"", b"7", b'["no base64!"]', b"[]", b'{"a": 1}'])
def test_invalid_descriptions_are_refused(engines: tuple[EngineProcesses, EngineProcesses], description: bytes) -> None:
    with pytest.raises(TransferError):
        engines[0].transfer.connect("other", description)


def test_an_endpoint_that_cannot_be_opened_and_a_worker_that_has_ended_are_errors() -> None:
    ours, theirs = Pipe()

    def open_endpoint() -> Transfer:
        raise StartupError("no locked memory is left")

    thread = threading.Thread(target=TransferServer(theirs, open_endpoint).serve)
    thread.start()
    connection = WorkerConnection(ours)
    with pytest.raises(StartupError, match="no locked memory is left"):
        RemoteTransfer(connection, DEADLINE_S)
    connection.close()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(EngineStopped):
        RemoteTransfer(connection, DEADLINE_S)
