"""Opening engines, and properties of single engines."""

import builtins
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_end import NBYTES, POISON, FarProcess

from hotset.base.errors import ConfigError, MissingDependency, StartupError
from hotset.transfer.api import MemoryKind, Region, Transfer, WriteState, WriteTicket
from hotset.transfer.engines import open_transfer
from hotset.transfer.regions import decode_description

ROOT = Path(__file__).resolve().parents[2]


def ended(transfer: Transfer, ticket: WriteTicket, seconds: float = 10.0) -> WriteState:
    until = time.monotonic() + seconds
    while (state := transfer.poll(ticket)) is WriteState.PENDING and time.monotonic() < until:
        time.sleep(0.001)
    return state


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.default_rng(4).integers(0, POISON, NBYTES).astype(np.uint8)


@pytest.fixture
def mooncake(memory: np.ndarray) -> Iterator[Transfer]:
    transfer = open_transfer("mooncake", deadline_s=1.0, lanes=2)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    yield transfer
    transfer.close()


@pytest.fixture
def far() -> Iterator[FarProcess]:
    far = FarProcess("mooncake")
    yield far
    far.close()


@pytest.mark.parametrize(("name", "message"), [("pigeons", "nixl, mooncake, loopback"), ("loopback", "one process")])
def test_an_unusable_engine_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_transfer(name)
    with pytest.raises(ConfigError, match="lane"):
        open_transfer(name, lanes=0)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nixl", ModuleNotFoundError("No module named 'nixl'"), r"pip install 'hotset\[transfer\]'"),
        ("mooncake", ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'hotset\[mooncake\]'"),
        ("mooncake", ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
    ],
)
def test_a_missing_package_or_library_is_named_with_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch, name: str, error: ImportError, message: str
) -> None:
    real: Any = builtins.__import__

    def failing(module: str, *rest: Any, **named: Any) -> Any:
        if module.partition(".")[0] == name:
            raise error
        return real(module, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", failing)
    with pytest.raises(MissingDependency, match=message):
        open_transfer(name)


TELL_TRANSPORTS = f"""
import logging, time
import numpy as np
from hotset.transfer.api import Region, WriteState
from hotset.transfer.engines import open_transfer
logging.basicConfig(level=logging.INFO)
near, far, memory = open_transfer("nixl"), open_transfer("nixl"), np.zeros({NBYTES}, np.uint8)
near.register(Region(memory.ctypes.data, 100))
far.register(Region(memory.ctypes.data + 100, 100))
near.connect("far", far.describe())
ticket = near.submit("far", np.array([[memory.ctypes.data, memory.ctypes.data + 100, 100]]))
while near.poll(ticket) is WriteState.PENDING:
    time.sleep(0.001)
print(near.transport())
near.close()
far.close()
"""


def test_nixl_reports_the_transports_that_it_uses() -> None:
    """Runs in its own process, because UCX reads its log settings once, when it is loaded."""
    command = [sys.executable, "-c", TELL_TRANSPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "UCX (" in done.stdout and "tcp/lo" in done.stdout
    assert "nixl reaches far over UCX (" in done.stderr
    assert "nixl wrote 100 bytes" in done.stderr


def test_mooncake_without_cuda_refuses_gpu_memory(mooncake: Transfer) -> None:
    with pytest.raises(StartupError, match="mooncake-transfer-engine"):
        mooncake.register(Region(1 << 30, 4096, MemoryKind.DEVICE))


def test_closing_mooncake_releases_its_ports(mooncake: Transfer, far: FarProcess, memory: np.ndarray) -> None:
    """This also holds while a ticket still exists."""
    mooncake.connect("far", far.description)
    ticket = mooncake.submit("far", np.array([[memory.ctypes.data, far.address, 8]]))
    assert ended(mooncake, ticket) is WriteState.DONE
    port = int(json.loads(decode_description(mooncake.describe(), "mooncake").native)["address"].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    mooncake.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert mooncake.poll(ticket) is WriteState.DONE


def test_mooncake_refuses_a_protocol_without_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(StartupError, match="MC_TCP_PROTO"):
        open_transfer("mooncake")


def test_defect_13_a_write_that_failed_by_deadline_still_lands(
    mooncake: Transfer, far: FarProcess, memory: np.ndarray
) -> None:
    """Shows why FAILED_UNKNOWN exists: the peer was only slow. Writes to other peers continue."""
    other = FarProcess("mooncake")
    mooncake.connect("slow", far.description)
    mooncake.connect("other", other.description)
    far.pause()
    slow = mooncake.submit("slow", np.array([[memory.ctypes.data, far.address, NBYTES]]))
    quick = mooncake.submit("other", np.array([[memory.ctypes.data, other.address, NBYTES]]))
    assert ended(mooncake, quick) is WriteState.DONE
    assert ended(mooncake, slow) is WriteState.FAILED_UNKNOWN
    far.resume()
    until = time.monotonic() + 10
    while not np.array_equal(far.read(), memory) and time.monotonic() < until:
        time.sleep(0.01)
    assert np.array_equal(far.read(), memory)
    assert mooncake.poll(slow) is WriteState.FAILED_UNKNOWN
    other.close()


def test_mooncake_connects_to_a_new_process_at_a_known_address(
    mooncake: Transfer, far: FarProcess, memory: np.ndarray
) -> None:
    """The description is changed as if it came from another process: the engine's cache must not be used."""
    mooncake.connect("far", far.description)
    assert ended(mooncake, mooncake.submit("far", np.array([[memory.ctypes.data, far.address, 8]]))) is WriteState.DONE
    found = decode_description(far.description, "mooncake")
    native = json.dumps(json.loads(found.native) | {"instance": "another"}).encode()
    mooncake.connect("far", replace(found, native=native).encode())
    writes = np.array([[memory.ctypes.data, far.address, NBYTES]])
    assert ended(mooncake, mooncake.submit("far", writes)) is WriteState.DONE
    assert np.array_equal(far.read(), memory)


@pytest.mark.slow
def test_the_contract_holds_for_nixl_over_tcp() -> None:
    """Between processes of one machine UCX would copy memory directly; between machines without RDMA it uses TCP."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/transfer/test_contract.py", "-k", "nixl"]
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
