"""The Mooncake backend: TCP, or RDMA if configured. It connects to peers by address, without a metadata service."""

import json
import logging
import os
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hotset.base.errors import MissingDependency, StartupError, TransferError
from hotset.base.listeners import confined_to
from hotset.fleet.transfer.api import MemoryKind, Region, Writes, WriteState
from hotset.fleet.transfer.lanes import Limits
from hotset.fleet.transfer.regions import Regions

log = logging.getLogger(__name__)

SYSTEM_LIBRARIES = "libibverbs1 libnl-3-200 libnl-route-3-200"
NO_BATCH = (0, (1 << 64) - 1)  # results of transfer_submit_write that mean failure
DONE, IN_PROGRESS = 1, 0  # results of transfer_check_status; any other means failure


def load_module() -> Any:
    """Imports Mooncake. Raises MissingDependency, with advice on what to install, if that fails."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise Mooncake logs every connection to standard error
    try:
        from mooncake import engine
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; install it with pip install 'hotset[mooncake]', or with pip install "
            "mooncake-transfer-engine if KV is transferred from or to GPU memory"
        ) from error
    except ImportError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; it needs system libraries: apt-get install {SYSTEM_LIBRARIES}"
        ) from error
    return engine


@dataclass(slots=True, eq=False)
class _Engine:
    """A Mooncake engine. `peers` maps each address to the instance (a process) to which the engine has connected."""

    native: Any
    peers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Remote:
    """A peer, and the engine that is connected to it. Equal remotes share one queue of writes in Mooncake."""

    engine: _Engine
    address: str


@dataclass(slots=True)
class _Post:
    engine: _Engine
    batches: deque[int] = field(default_factory=deque)  # Mooncake's number for each write that has not ended
    failed: bool = False


class MooncakeBackend:
    """Implements `Backend` with Mooncake. Each write is submitted separately, because Mooncake can poll only single
    writes without blocking.

    A Mooncake engine caches the metadata of an address for its lifetime. If a restarted peer uses the address of its
    predecessor, another engine therefore connects to it, and is opened if necessary.
    """

    name = "mooncake"
    # If more than 2048 writes to one peer are queued, Mooncake refuses all later writes to that peer.
    limits = Limits(writes=512, nbytes=64 << 20, write_nbytes=16 << 20, in_flight=1024)

    def __init__(self, host: str, interface: str, protocol: str) -> None:
        self._module = load_module()
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise StartupError(
                "transfer engine mooncake cannot report the end of a write with MC_TCP_PROTO=1: unset that variable"
            )
        self._host = host
        self._interface = interface
        self._protocol = protocol
        self._instance = uuid.uuid4().hex
        self._regions: list[Region] = []
        self._engines = [self._open()]

    def register(self, region: Region) -> None:
        if region.memory is MemoryKind.DEVICE and not self._module.SUPPORT_CUDA:
            raise StartupError(
                "transfer engine mooncake: the installed build does not support GPU memory; pip install "
                "mooncake-transfer-engine instead of mooncake-transfer-engine-non-cuda"
            )
        for engine in self._engines:
            self._register(engine, region)
        self._regions.append(region)

    def describe(self) -> bytes:
        address = f"{self._host}:{self._engines[0].native.get_rpc_port()}"
        return json.dumps({"address": address, "instance": self._instance}).encode()

    def connect(self, native: bytes, regions: Regions) -> _Remote:
        try:
            fields = json.loads(native)
            address, instance = str(fields["address"]), str(fields["instance"])
        except (ValueError, TypeError, KeyError) as error:
            raise TransferError("the peer's description is not one of mooncake") from error
        engine = self._engine_for(address, instance)
        if engine.native.send_probe(address) != 0:
            raise TransferError(f"mooncake cannot reach {address}")
        # Fetches the peer's metadata now. Otherwise `post` would do this, under a lock that delays writes to all peers.
        if len(regions) and not engine.native.get_first_buffer_address(address):
            raise TransferError(f"mooncake cannot fetch the memory metadata of {address}")
        engine.peers[address] = instance
        return _Remote(engine, address)

    def disconnect(self, remote: _Remote) -> None:
        pass  # Mooncake has nothing to release

    def post(self, remote: _Remote, writes: Writes) -> _Post:
        post = _Post(remote.engine)
        for local, target, nbytes in writes.tolist():
            batch = remote.engine.native.transfer_submit_write(remote.address, local, target, nbytes)
            if batch in NO_BATCH:
                if not post.batches:
                    raise TransferError("mooncake refused the writes")
                post.failed = True
                break
            post.batches.append(batch)
        return post

    def check(self, handle: _Post) -> WriteState:
        while handle.batches:
            status = handle.engine.native.transfer_check_status(handle.batches[0])
            if status == IN_PROGRESS:
                return WriteState.PENDING
            handle.batches.popleft()  # Mooncake has freed this batch
            handle.failed |= status != DONE
        # The peer may still read bytes from its socket that were sent before the failure.
        return WriteState.FAILED_UNKNOWN if handle.failed else WriteState.DONE

    def transport(self) -> str:
        return f"Mooncake ({self._protocol}/{self._interface})"

    def close(self) -> None:
        for engine in self._engines:
            for region in self._regions:
                engine.native.unregister_memory(region.address)
            engine.native = None  # drops the last reference, which ends the engine's threads and closes its ports
        self._regions.clear()
        self._engines.clear()

    def _engine_for(self, address: str, instance: str) -> _Engine:
        for engine in self._engines:
            if engine.peers.get(address, instance) == instance:
                return engine
        try:
            engine = self._open()
            for region in self._regions:
                self._register(engine, region)
        except StartupError as error:
            raise TransferError(f"a second engine, needed to connect to {address}, cannot start: {error}") from error
        self._engines.append(engine)
        return engine

    def _open(self) -> _Engine:
        """Opens an engine. Mooncake listens on all addresses and has no setting for this, so its sockets are bound to
        the interface once they are open. No memory is registered before that."""
        native = self._module.TransferEngine()
        try:
            with confined_to(self._interface):
                if native.initialize(self._host, "P2PHANDSHAKE", self._protocol, "") != 0:
                    raise StartupError(f"mooncake does not start on {self._host} over {self._protocol}")
        except StartupError as error:
            raise StartupError(f"transfer engine mooncake: {error}; use --transfer nixl") from error
        return _Engine(native)

    def _register(self, engine: _Engine, region: Region) -> None:
        location = "*" if region.memory is MemoryKind.HOST else f"cuda:{region.device}"
        status = engine.native.register_memory(region.address, region.nbytes, location)
        if status != 0:
            raise StartupError(
                f"transfer engine mooncake: {region.nbytes} bytes of {region.memory.value} memory cannot be "
                f"registered: error {status}"
            )
