"""The Mooncake backend: TCP, or RDMA if configured. Peers are found by address, without a metadata service."""

import json
import logging
import os
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hotset.base.errors import MissingDependency, StartupError, TransferError
from hotset.transfer.api import MemoryKind, Region, Writes, WriteState
from hotset.transfer.lanes import Limits
from hotset.transfer.regions import Regions

log = logging.getLogger(__name__)

SYSTEM_LIBRARIES = "libibverbs1 libnl-3-200 libnl-route-3-200"
NO_BATCH = (0, (1 << 64) - 1)
ENDED_WELL, UNDER_WAY = 1, 0


def load_module() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise it logs every connection to standard error
    try:
        from mooncake import engine
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; pip install 'hotset[mooncake]' adds it "
            "(mooncake-transfer-engine in its place, where KV travels from or to a GPU)"
        ) from error
    except ImportError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; it needs system libraries: apt-get install {SYSTEM_LIBRARIES}"
        ) from error
    return engine


@dataclass(slots=True, eq=False)
class _Engine:
    """A Mooncake engine, and the process that it has connected to at each address."""

    native: Any
    peers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Remote:
    """Two remotes are equal if they share one queue of an engine, which holds the writes of all connections to it."""

    engine: _Engine
    address: str


@dataclass(slots=True)
class _Post:
    engine: _Engine
    batches: deque[int] = field(default_factory=deque)  # one per write
    failed: bool = False


class MooncakeBackend:
    """Submits each write separately, because only such a submission can be polled without blocking.

    A Mooncake engine caches what it learns about an address for its lifetime. So an engine that has connected to
    another process at an address is not used for that address again: a second engine is opened.
    """

    name = "mooncake"
    # With more than 2048 queued writes Mooncake refuses further writes to this peer for good.
    limits = Limits(writes=512, nbytes=64 << 20, write_nbytes=16 << 20, in_flight=1024)

    def __init__(self, host: str, protocol: str) -> None:
        self._module = load_module()
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise StartupError("transfer engine mooncake: with MC_TCP_PROTO=1 the end of a write cannot be known")
        self._host = host
        self._protocol = protocol
        self._instance = uuid.uuid4().hex
        self._regions: list[Region] = []
        self._engines = [self._open()]

    def register(self, region: Region) -> None:
        if region.memory is MemoryKind.DEVICE and not self._module.SUPPORT_CUDA:
            raise StartupError(
                "transfer engine mooncake: this build of it cannot reach GPU memory; pip install "
                "mooncake-transfer-engine in place of mooncake-transfer-engine-non-cuda"
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
            raise TransferError("this is not a description of a mooncake peer") from error
        engine = self._engine_for(address, instance)
        if engine.native.send_probe(address) != 0:
            raise TransferError(f"mooncake cannot reach {address}")
        # Fetches the peer's metadata now: `post` would do so under a lock that writes to all peers need.
        if len(regions) and not engine.native.get_first_buffer_address(address):
            raise TransferError(f"mooncake cannot fetch the memory metadata of {address}")
        engine.peers[address] = instance
        return _Remote(engine, address)

    def disconnect(self, remote: _Remote) -> None:
        pass  # Mooncake has nothing to release

    def post(self, remote: _Remote, writes: Writes) -> _Post:
        post = _Post(remote.engine)
        for here, there, nbytes in writes.tolist():
            batch = remote.engine.native.transfer_submit_write(remote.address, here, there, nbytes)
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
            if status == UNDER_WAY:
                return WriteState.PENDING
            handle.batches.popleft()  # Mooncake has freed it
            handle.failed |= status != ENDED_WELL
        # The peer may not have read everything that was sent from its socket yet.
        return WriteState.FAILED_UNKNOWN if handle.failed else WriteState.DONE

    def transport(self) -> str:
        return self._protocol.upper()

    def close(self) -> None:
        for engine in self._engines:
            for region in self._regions:
                engine.native.unregister_memory(region.address)
            engine.native = None  # drops the last reference, which ends its threads and ports
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
            raise TransferError(f"a second engine, needed to connect to {address}, does not start: {error}") from error
        self._engines.append(engine)
        return engine

    def _open(self) -> _Engine:
        native = self._module.TransferEngine()
        if native.initialize(self._host, "P2PHANDSHAKE", self._protocol, "") != 0:
            raise StartupError(f"transfer engine mooncake does not start on {self._host} over {self._protocol}")
        return _Engine(native)

    def _register(self, engine: _Engine, region: Region) -> None:
        place = "*" if region.memory is MemoryKind.HOST else f"cuda:{region.device}"
        status = engine.native.register_memory(region.address, region.nbytes, place)
        if status != 0:
            raise StartupError(
                f"transfer engine mooncake: {region.nbytes} bytes of {region.memory.value} memory cannot be "
                f"registered: error {status}"
            )
