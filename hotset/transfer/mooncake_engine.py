"""Mooncake: TCP, or RDMA where it is asked for. Peers are found by address alone, without a metadata service."""

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
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it tells standard error about every connection otherwise
    try:
        from mooncake import engine
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; pip install 'hotset[mooncake]' adds it "
            "(mooncake-transfer-engine in its place, where KV travels from or to a GPU)"
        ) from error
    except ImportError as error:
        raise MissingDependency(
            f"transfer engine mooncake: {error}; it needs libraries of the system: apt-get install {SYSTEM_LIBRARIES}"
        ) from error
    return engine


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine of Mooncake's, and which process it has met at which address."""

    native: Any
    met: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Remote:
    """Equal where an engine has one queue: it holds the writes of all who are connected there, or were."""

    engine: _Engine
    address: str


@dataclass(slots=True)
class _Post:
    engine: _Engine
    batches: deque[int] = field(default_factory=deque)  # one to a write
    failed: bool = False


class MooncakeBackend:
    """Each write is submitted by itself: of Mooncake's calls these alone can be asked how they stand without waiting.

    An engine remembers for good what it learnt about an address. So one that has met another process at an address is
    not asked to connect there again: a second engine is.
    """

    name = "mooncake"
    # More than 2048 queued writes would make it refuse those to this peer, and go on refusing.
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
            found = json.loads(native)
            address, instance = str(found["address"]), str(found["instance"])
        except (ValueError, TypeError, KeyError) as error:
            raise TransferError("this is no description of a peer of mooncake's") from error
        engine = self._engine_for(address, instance)
        if engine.native.send_probe(address) != 0:
            raise TransferError(f"mooncake cannot reach {address}")
        # Learns about the peer here, since `post` would do so under a lock that writes to all peers need.
        if len(regions) and not engine.native.get_first_buffer_address(address):
            raise TransferError(f"mooncake cannot learn about the memory of {address}")
        engine.met[address] = instance
        return _Remote(engine, address)

    def disconnect(self, remote: _Remote) -> None:
        pass  # there is nothing to give back

    def post(self, remote: _Remote, writes: Writes) -> _Post:
        post = _Post(remote.engine)
        for here, there, nbytes in writes.tolist():
            batch = remote.engine.native.transfer_submit_write(remote.address, here, there, nbytes)
            if batch in NO_BATCH:
                if not post.batches:
                    raise TransferError("mooncake refused them")
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
        # The peer may not have taken all that was sent from its socket yet.
        return WriteState.FAILED_UNKNOWN if handle.failed else WriteState.DONE

    def transport(self) -> str:
        return self._protocol.upper()

    def close(self) -> None:
        for engine in self._engines:
            for region in self._regions:
                engine.native.unregister_memory(region.address)
            engine.native = None  # the last reference: its threads and ports end here
        self._regions.clear()
        self._engines.clear()

    def _engine_for(self, address: str, instance: str) -> _Engine:
        for engine in self._engines:
            if engine.met.get(address, instance) == instance:
                return engine
        try:
            engine = self._open()
            for region in self._regions:
                self._register(engine, region)
        except StartupError as error:
            raise TransferError(f"it takes a second engine to connect to {address}: {error}") from error
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
