"""The NIXL and Mooncake backends over fake native engines, for faults that real ones do not produce on demand."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotset.base.errors import StartupError, TransferError
from hotset.transfer import mooncake_backend, nixl_backend
from hotset.transfer.api import Region, WriteState
from hotset.transfer.mooncake_backend import ENDED_WELL, UNDER_WAY, MooncakeBackend
from hotset.transfer.nixl_backend import NixlBackend
from hotset.transfer.regions import Regions

REGION = Region(1 << 20, 4096)


class Agent:
    """A fake NIXL agent. Connecting to `stuck` blocks until the test releases it; connecting to `nobody` fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.connecting: list[str] = []
        self.invalidated: list[str] = []
        self.registers = True

    def createBackend(self, name: str, parameters: dict[str, str]) -> str:
        return name

    def registerMem(self, entries: Any, backends: list[str]) -> None:
        if not self.registers:
            raise RuntimeError("NIXL_ERR_BACKEND")

    def deregisterMem(self, entries: Any, backends: list[str]) -> None: ...

    def loadRemoteMD(self, native: bytes) -> bytes:
        return native

    def makeConnection(self, name: str, backends: list[str]) -> None:
        self.connecting.append(name)
        if name == "nobody":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if name == "stuck":
            self.go.wait(10.0)

    def invalidateRemoteMD(self, name: str) -> None:
        self.invalidated.append(name)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    bindings = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda name, config: made,
        nixlRegDList=lambda kind, entries: entries,
        NIXL_THREAD_SYNC_RW=0,
        DRAM_SEG=0,
        VRAM_SEG=1,
    )
    monkeypatch.setattr(nixl_backend, "load_bindings", lambda: bindings)
    return made


def test_defect_12_nixl_reports_that_memory_was_not_registered(agent: Agent) -> None:
    wire = NixlBackend("127.0.0.1", 1)
    agent.registers = False
    with pytest.raises(StartupError, match="4096 bytes of host memory cannot be registered: NIXL_ERR_BACKEND"):
        wire.register(REGION)
    wire.close()


def test_a_peer_to_which_nixl_is_slow_to_connect_delays_no_other(agent: Agent) -> None:
    wire, made = NixlBackend("127.0.0.1", 1), list[Any]()
    slow = threading.Thread(target=lambda: made.append(wire.connect(b"stuck", Regions())), daemon=True)
    slow.start()
    while not agent.connecting:
        pass
    quick = threading.Thread(target=lambda: wire.disconnect(wire.connect(b"other", Regions())), daemon=True)
    quick.start()
    quick.join(5.0)
    assert not quick.is_alive() and agent.invalidated == ["other"]
    agent.go.set()
    slow.join(5.0)
    assert made[0].agent == "stuck"
    wire.close()


def test_nixl_releases_a_peer_that_it_cannot_reach(agent: Agent) -> None:
    wire = NixlBackend("127.0.0.1", 1)
    with pytest.raises(TransferError, match="nixl cannot connect: NIXL_ERR_REMOTE_DISCONNECT"):
        wire.connect(b"nobody", Regions())
    assert agent.invalidated == ["nobody"] and not wire._connections
    wire.close()


class Native:
    """A fake Mooncake engine."""

    def __init__(self) -> None:
        self.initialized = self.registered = 0  # status codes
        self.batch, self.status = 7, ENDED_WELL

    def initialize(self, *settings: str) -> int:
        return self.initialized

    def register_memory(self, address: int, nbytes: int, place: str) -> int:
        return self.registered

    def unregister_memory(self, address: int) -> None: ...

    def send_probe(self, address: str) -> int:
        return 0

    def get_first_buffer_address(self, address: str) -> int:
        return 1

    def transfer_submit_write(self, address: str, here: int, there: int, nbytes: int) -> int:
        return self.batch

    def transfer_check_status(self, batch: int) -> int:
        return self.status


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    made = Native()
    module = SimpleNamespace(TransferEngine=lambda: made, SUPPORT_CUDA=False)
    monkeypatch.setattr(mooncake_backend, "load_module", lambda: module)
    return made


def test_defect_12_mooncake_reports_that_memory_was_not_registered(native: Native) -> None:
    wire = MooncakeBackend("127.0.0.1", "tcp")
    native.registered = -101
    with pytest.raises(StartupError, match="4096 bytes of host memory cannot be registered: error -101"):
        wire.register(REGION)
    wire.close()


def test_mooncake_that_does_not_start_reports_it(native: Native) -> None:
    native.initialized = -1
    with pytest.raises(StartupError, match=r"does not start on 10\.0\.0\.1 over rdma"):
        MooncakeBackend("10.0.0.1", "rdma")


def described(instance: str) -> bytes:
    return json.dumps({"address": "10.0.0.1:1", "instance": instance}).encode()


def test_a_second_mooncake_engine_that_does_not_start_fails_one_connection(native: Native) -> None:
    wire = MooncakeBackend("127.0.0.1", "tcp")
    wire.register(REGION)
    first = wire.connect(described("a"), Regions([REGION]))
    native.registered = -101
    with pytest.raises(TransferError, match=r"second engine.*error -101"):
        wire.connect(described("b"), Regions([REGION]))
    assert wire.connect(described("a"), Regions([REGION])) == first, "one queue, counted as two"
    native.registered = 0
    assert wire.connect(described("b"), Regions([REGION])) != first
    wire.close()


@pytest.mark.parametrize("status", [-1, 2])
def test_defect_13_a_failed_mooncake_write_may_still_be_writing(native: Native, status: int) -> None:
    wire = MooncakeBackend("127.0.0.1", "tcp")
    remote = wire.connect(described("a"), Regions())
    post = wire.post(remote, np.array([[1, 2, 3], [4, 5, 6]]))
    native.status = UNDER_WAY
    assert wire.check(post) is WriteState.PENDING
    native.status = status
    assert wire.check(post) is WriteState.FAILED_UNKNOWN
    native.batch = 0
    with pytest.raises(TransferError, match="refused"):
        wire.post(remote, np.array([[1, 2, 3]]))
    wire.close()
