"""Tests of the NIXL and Mooncake backends over fakes of the native libraries.

The fakes produce faults that the real libraries do not produce on demand. The numbers in names like
`test_defect_12_…` refer to the defects in scripts/sabotage.d.
"""

import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotset.base.errors import ConfigError, StartupError, TransferError
from hotset.fleet.transfer import mooncake_backend, nixl_backend
from hotset.fleet.transfer.api import Region, WriteState
from hotset.fleet.transfer.mooncake_backend import DONE, IN_PROGRESS, MooncakeBackend
from hotset.fleet.transfer.nixl_backend import NixlBackend
from hotset.fleet.transfer.regions import Regions

REGION = Region(1 << 20, 4096)


class FakeNixlAgent:
    """A fake NIXL agent. Connecting to `slow` blocks until `may_connect` is set. Connecting to `unreachable` fails."""

    def __init__(self) -> None:
        self.may_connect = threading.Event()
        self.connecting: list[str] = []  # names of the peers for which a connection was begun
        self.invalidated: list[str] = []
        self.refuse_registration = False

    def createBackend(self, name: str, parameters: dict[str, str]) -> str:
        return name

    def registerMem(self, entries: Any, backends: list[str]) -> None:
        if self.refuse_registration:
            raise RuntimeError("NIXL_ERR_BACKEND")

    def deregisterMem(self, entries: Any, backends: list[str]) -> None: ...

    def loadRemoteMD(self, native: bytes) -> bytes:
        return native

    def makeConnection(self, name: str, backends: list[str]) -> None:
        self.connecting.append(name)
        if name == "unreachable":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if name == "slow":
            self.may_connect.wait(60.0)

    def invalidateRemoteMD(self, name: str) -> None:
        self.invalidated.append(name)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeNixlAgent:
    fake = FakeNixlAgent()
    bindings = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda name, config: fake,
        nixlRegDList=lambda kind, entries: entries,
        NIXL_THREAD_SYNC_RW=0,
        DRAM_SEG=0,
        VRAM_SEG=1,
    )
    monkeypatch.setattr(nixl_backend, "load_bindings", lambda: bindings)
    return fake


@pytest.mark.parametrize("earlier", [None, "lo"])
def test_defect_21_nixl_sets_the_devices_of_ucx_before_ucx_is_loaded(
    agent: FakeNixlAgent, monkeypatch: pytest.MonkeyPatch, earlier: str | None
) -> None:
    loaded_with: list[str | None] = []
    bindings = nixl_backend.load_bindings()

    def load_bindings() -> Any:
        loaded_with.append(os.environ.get("UCX_NET_DEVICES"))
        return bindings

    monkeypatch.setattr(nixl_backend, "load_bindings", load_bindings)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if earlier is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", earlier)
    NixlBackend("lo", 1).close()
    assert (loaded_with, os.environ["UCX_NET_DEVICES"]) == (["lo"], "lo")


def test_nixl_refuses_another_interface_than_the_environment_or_an_earlier_endpoint_has_chosen(
    agent: FakeNixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    NixlBackend("lo", 1).close()
    message = (
        "UCX_NET_DEVICES is 'lo', but the transfer engine should use 'eth0'; unset the variable, or set --transfer"
    )
    with pytest.raises(ConfigError, match=message):
        NixlBackend("eth0", 1)


def test_defect_12_nixl_raises_if_memory_cannot_be_registered(agent: FakeNixlAgent) -> None:
    backend = NixlBackend("lo", 1)
    agent.refuse_registration = True
    with pytest.raises(StartupError, match="4096 bytes of host memory cannot be registered: NIXL_ERR_BACKEND"):
        backend.register(REGION)
    backend.close()


def test_a_slow_nixl_connection_does_not_delay_other_peers(agent: FakeNixlAgent) -> None:
    backend, remotes = NixlBackend("lo", 1), list[Any]()
    slow = threading.Thread(target=lambda: remotes.append(backend.connect(b"slow", Regions())), daemon=True)
    slow.start()
    while not agent.connecting:
        pass
    quick = threading.Thread(target=lambda: backend.disconnect(backend.connect(b"other", Regions())), daemon=True)
    quick.start()
    quick.join(60.0)
    assert not quick.is_alive() and agent.invalidated == ["other"]
    agent.may_connect.set()
    slow.join(60.0)
    assert remotes[0].agent == "slow"
    backend.close()


def test_nixl_releases_a_peer_that_it_cannot_reach(agent: FakeNixlAgent) -> None:
    backend = NixlBackend("lo", 1)
    with pytest.raises(TransferError, match="nixl cannot connect: NIXL_ERR_REMOTE_DISCONNECT"):
        backend.connect(b"unreachable", Regions())
    assert agent.invalidated == ["unreachable"] and not backend._connections
    backend.close()


class FakeMooncakeEngine:
    """A fake of Mooncake's `TransferEngine`. The test sets what its methods return."""

    def __init__(self) -> None:
        self.initialize_status = self.register_status = 0  # 0 is success
        self.batch = 7  # identifies a submitted write; 0 means that the write was refused
        self.status = DONE

    def initialize(self, *settings: str) -> int:
        return self.initialize_status

    def register_memory(self, address: int, nbytes: int, location: str) -> int:
        return self.register_status

    def unregister_memory(self, address: int) -> None: ...

    def send_probe(self, address: str) -> int:
        return 0

    def get_first_buffer_address(self, address: str) -> int:
        return 1

    def transfer_submit_write(self, address: str, local: int, remote: int, nbytes: int) -> int:
        return self.batch

    def transfer_check_status(self, batch: int) -> int:
        return self.status


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeMooncakeEngine:
    fake = FakeMooncakeEngine()
    module = SimpleNamespace(TransferEngine=lambda: fake, SUPPORT_CUDA=False)
    monkeypatch.setattr(mooncake_backend, "load_module", lambda: module)
    return fake


def test_defect_12_mooncake_raises_if_memory_cannot_be_registered(mooncake: FakeMooncakeEngine) -> None:
    backend = MooncakeBackend("127.0.0.1", "lo", "tcp")
    mooncake.register_status = -101
    with pytest.raises(StartupError, match="4096 bytes of host memory cannot be registered: error -101"):
        backend.register(REGION)
    backend.close()


def test_a_mooncake_backend_that_does_not_start_raises(mooncake: FakeMooncakeEngine) -> None:
    mooncake.initialize_status = -1
    with pytest.raises(StartupError, match=r"does not start on 10\.0\.0\.1 over rdma"):
        MooncakeBackend("10.0.0.1", "lo", "rdma")


def native_description(instance: str) -> bytes:
    """Returns a description of a Mooncake backend for its peers. A restarted process has another `instance`."""
    return json.dumps({"address": "10.0.0.1:1", "instance": instance}).encode()


def test_if_a_second_mooncake_backend_does_not_start_only_the_new_connection_fails(
    mooncake: FakeMooncakeEngine,
) -> None:
    backend = MooncakeBackend("127.0.0.1", "lo", "tcp")
    backend.register(REGION)
    first = backend.connect(native_description("a"), Regions([REGION]))
    mooncake.register_status = -101
    with pytest.raises(TransferError, match=r"second engine.*error -101"):
        backend.connect(native_description("b"), Regions([REGION]))
    again = backend.connect(native_description("a"), Regions([REGION]))
    assert again == first, "two connections to one process must have equal handles"
    mooncake.register_status = 0
    assert backend.connect(native_description("b"), Regions([REGION])) != first
    backend.close()


@pytest.mark.parametrize("status", [-1, 2])
def test_defect_13_a_failed_mooncake_write_is_reported_as_unknown(mooncake: FakeMooncakeEngine, status: int) -> None:
    backend = MooncakeBackend("127.0.0.1", "lo", "tcp")
    remote = backend.connect(native_description("a"), Regions())
    post = backend.post(remote, np.array([[1, 2, 3], [4, 5, 6]]))
    mooncake.status = IN_PROGRESS
    assert backend.check(post) is WriteState.PENDING
    mooncake.status = status
    assert backend.check(post) is WriteState.FAILED_UNKNOWN
    mooncake.batch = 0
    with pytest.raises(TransferError, match="refused"):
        backend.post(remote, np.array([[1, 2, 3]]))
    backend.close()
