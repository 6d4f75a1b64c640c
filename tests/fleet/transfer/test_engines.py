"""Tests of opening a transfer engine, and of properties that only NIXL or only Mooncake has.

The numbers in names like `test_defect_13_…` refer to the defects in scripts/sabotage.d.
"""

import builtins
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_end import NBYTES, POISON, FarProcess, wait_for_end
from processes import fork_server

from hotset.base.errors import ConfigError, MissingDependency, StartupError
from hotset.fleet.transfer.api import MemoryKind, Region, Transfer, WriteState
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.regions import decode_description

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.default_rng(4).integers(0, POISON, NBYTES).astype(np.uint8)


@pytest.fixture
def mooncake(memory: np.ndarray) -> Iterator[Transfer]:
    transfer = TransferSettings("mooncake", deadline_s=60.0, lanes=2).open()
    transfer.register(Region(memory.ctypes.data, NBYTES))
    yield transfer
    transfer.close()


@pytest.fixture
def far() -> Iterator[FarProcess]:
    far = FarProcess("mooncake")
    yield far
    far.close()


def test_an_unknown_engine_and_zero_lanes_are_refused() -> None:
    with pytest.raises(ConfigError, match="nixl, mooncake"):
        TransferSettings("loopback").open()
    with pytest.raises(ConfigError, match="lane"):
        TransferSettings("nixl", lanes=0).open()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nixl", ModuleNotFoundError("No module named 'nixl'"), r"pip install 'hotset\[transfer\]'"),
        ("mooncake", ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'hotset\[mooncake\]'"),
        ("mooncake", ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
    ],
)
def test_the_error_about_a_missing_package_or_library_contains_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, error: ImportError, message: str
) -> None:
    real_import: Any = builtins.__import__

    def failing_import(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.partition(".")[0] == name:
            raise error
        return real_import(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", failing_import)
    with pytest.raises(MissingDependency, match=message):
        TransferSettings(name).open()


def report_transports(pipe: Connection) -> None:
    """Writes from one endpoint of NIXL to another, and sends what the first and the log say about the transports."""
    log, memory = io.StringIO(), np.zeros(200, np.uint8)
    logging.basicConfig(level=logging.INFO, stream=log, force=True)
    near, far = TransferSettings("nixl").open(), TransferSettings("nixl").open()
    near.register(Region(memory.ctypes.data, 100))
    far.register(Region(memory.ctypes.data + 100, 100))
    near.connect("far", far.describe())
    ticket = near.submit("far", np.array([[memory.ctypes.data, memory.ctypes.data + 100, 100]]))
    assert wait_for_end(near, ticket) is WriteState.DONE
    transport = near.transport()
    near.close()
    far.close()
    pipe.send((transport, log.getvalue()))


def test_nixl_reports_the_transports_that_it_uses() -> None:
    """The test uses a separate process, because UCX reads its log settings only once, when UCX is loaded."""
    pipe, far_end = Pipe()
    process = fork_server().Process(target=report_transports, args=(far_end,))
    process.start()
    far_end.close()
    transport, log = pipe.recv()
    process.join()
    assert "UCX (" in transport and "tcp/lo" in transport
    assert "nixl reaches far over UCX (" in log and "nixl wrote 100 bytes" in log


def test_mooncake_without_cuda_refuses_gpu_memory(mooncake: Transfer) -> None:
    with pytest.raises(StartupError, match="mooncake-transfer-engine"):
        mooncake.register(Region(1 << 30, 4096, MemoryKind.DEVICE))


def test_closing_mooncake_releases_its_ports(mooncake: Transfer, far: FarProcess, memory: np.ndarray) -> None:
    """The ports are released even while the caller still holds a ticket."""
    mooncake.connect("far", far.description)
    ticket = mooncake.submit("far", np.array([[memory.ctypes.data, far.address, 8]]))
    assert wait_for_end(mooncake, ticket) is WriteState.DONE
    port = int(json.loads(decode_description(mooncake.describe(), "mooncake").native)["address"].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    mooncake.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert mooncake.poll(ticket) is WriteState.DONE


def test_mooncake_refuses_the_setting_with_which_the_end_of_a_write_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(StartupError, match="MC_TCP_PROTO"):
        TransferSettings("mooncake").open()


def test_defect_13_a_write_that_failed_at_its_deadline_may_still_arrive(
    mooncake: Transfer, far: FarProcess, memory: np.ndarray
) -> None:
    """FAILED_UNKNOWN exists for this case: the peer was only paused. Meanwhile, a write to another peer ends."""
    other = FarProcess("mooncake")
    mooncake.connect("slow", far.description)
    mooncake.connect("other", other.description)
    far.pause()
    slow = mooncake.submit("slow", np.array([[memory.ctypes.data, far.address, NBYTES]]))
    quick = mooncake.submit("other", np.array([[memory.ctypes.data, other.address, NBYTES]]))
    assert wait_for_end(mooncake, quick) is WriteState.DONE
    until = time.monotonic() + 60
    while not slow.handle.posting and time.monotonic() < until:
        time.sleep(0.001)
    assert mooncake.poll(slow) is WriteState.PENDING
    slow.handle.deadline = 0.0
    assert mooncake.poll(slow) is WriteState.FAILED_UNKNOWN
    far.resume()
    while not np.array_equal(far.read(), memory) and time.monotonic() < until:
        time.sleep(0.01)
    assert np.array_equal(far.read(), memory)
    assert mooncake.poll(slow) is WriteState.FAILED_UNKNOWN
    other.close()


def test_mooncake_connects_to_a_new_process_at_a_known_address(
    mooncake: Transfer, far: FarProcess, memory: np.ndarray
) -> None:
    """The second description has another instance, as after a restart: Mooncake's cached metadata must not be used."""
    mooncake.connect("far", far.description)
    assert (
        wait_for_end(mooncake, mooncake.submit("far", np.array([[memory.ctypes.data, far.address, 8]])))
        is WriteState.DONE
    )
    found = decode_description(far.description, "mooncake")
    native = json.dumps(json.loads(found.native) | {"instance": "another"}).encode()
    mooncake.connect("far", replace(found, native=native).encode())
    writes = np.array([[memory.ctypes.data, far.address, NBYTES]])
    assert wait_for_end(mooncake, mooncake.submit("far", writes)) is WriteState.DONE
    assert np.array_equal(far.read(), memory)


@pytest.mark.slow
def test_the_contract_holds_for_nixl_over_tcp() -> None:
    """UCX can copy memory directly between processes of one machine. Between machines without RDMA it uses TCP."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/fleet/transfer/test_contract.py", "-k", "nixl"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "UCX_TLS": "tcp"},
        check=False,
    )
    assert done.returncode == 0, done.stdout


def write_to_a_peer_that_has_released_the_writer(pipe: Connection) -> None:
    """Sends what a writer at another machine can write before and after the target releases it, and after it closes."""
    os.environ["UCX_TLS"] = "tcp"
    memory = np.zeros(400, np.uint8)
    memory[300:] = 7
    address = memory.ctypes.data
    target, writer = (TransferSettings("nixl", deadline_s=5.0, lanes=1).open() for _ in range(2))
    target.register(Region(address, 300))
    writer.register(Region(address + 300, 100))

    def write(offset: int) -> tuple[WriteState, int]:
        ticket = writer.submit("target", np.array([[address + 300, address + offset, 100]]))
        return wait_for_end(writer, ticket), int(memory[offset : offset + 100].sum())

    writer.connect("target", target.describe())
    target.connect("writer", writer.describe())
    results = [write(0)]
    (released,) = [lane.peers[0] for lane in target._lanes]  # type: ignore[attr-defined]
    target.forget("writer")
    assert released.disconnected.wait(60.0)
    results.append(write(100))
    target.close()
    results.append(write(200))
    writer.close()
    pipe.send(results)


def test_nixl_cannot_cut_off_one_writer_but_closing_the_endpoint_cuts_off_all() -> None:
    """This is why a decode worker has an endpoint for each prefill worker. If the second write fails one day, one
    endpoint for all is enough (links.py)."""
    pipe, far_end = Pipe()
    process = fork_server().Process(target=write_to_a_peer_that_has_released_the_writer, args=(far_end,))
    process.start()
    far_end.close()
    before, released, closed = pipe.recv()
    process.join()
    assert before == released == (WriteState.DONE, 700)
    assert closed[0] is not WriteState.DONE and closed[1] == 0
