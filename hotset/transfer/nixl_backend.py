"""The NIXL backend, over UCX: shared memory, TCP or RDMA, whichever reaches the peer fastest."""

import ctypes
import logging
import os
import re
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from hotset.base.address import is_loopback
from hotset.base.errors import MissingDependency, StartupError, TransferError
from hotset.transfer.api import MemoryKind, Region, Writes, WriteState
from hotset.transfer.lanes import Limits
from hotset.transfer.regions import Regions

log = logging.getLogger(__name__)

# The progress thread sleeps until UCX has work for it. With 0, the default of the package's own agent, it spins.
PROGRESS_DELAY_US = 20_000

CHOSEN = re.compile(r" UCX +INFO +\S+ (?:intra|inter)-node cfg#\d+ (.*)")
TRANSPORT = re.compile(r"\w+/[\w:.]+")
COMPLAINT = re.compile(r" UCX +(?:WARN|ERROR|FATAL) +(.*)")


def load_bindings() -> Any:
    try:
        from nixl import _bindings
    except ImportError as error:
        raise MissingDependency(f"transfer engine nixl: {error}; pip install 'hotset[transfer]' adds it") from error
    return _bindings


class UcxLog:
    """Reads which transports UCX chose, which it reports only in its log, from a log file of our own.

    Create it before UCX is loaded, because UCX reads its settings from the environment once. If the environment already
    configures UCX's log, the settings are left alone and no transports are known here.
    """

    def __init__(self) -> None:
        self.transports: tuple[str, ...] = ()  # of the connections so far
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        if not {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys():
            handle, path = tempfile.mkstemp(prefix="hotset-ucx-", suffix=".log")
            self._file = os.fdopen(handle)
            self._path = path
            os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"] = path, "info"

    def loaded(self) -> None:
        """Removes the file's name and the settings, once UCX has opened the file."""
        if self._file:
            os.unlink(self._path)
            del os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"]

    def read(self) -> None:
        """Reads the new lines. UCX's warnings and errors go to our log."""
        with self._lock:
            if self._file is None:
                return
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library and never flushes it
            lines = self._file.readlines()
            for found in filter(None, map(CHOSEN.search, lines)):
                self.transports = tuple(dict.fromkeys([*self.transports, *TRANSPORT.findall(found[1])]))
        for found in filter(None, map(COMPLAINT.search, lines)):
            log.warning("UCX: %s", found[1].strip())

    def close(self) -> None:
        self.read()
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None


@dataclass(slots=True, eq=False)
class _Remote:
    agent: str
    regions: Regions


@dataclass(slots=True)
class _Post:
    requests: list[int] = field(default_factory=list)  # not known to have ended
    failed: bool = False


class NixlBackend:
    """One NIXL agent. Its name is new for each process, so a restarted peer is a different agent."""

    name = "nixl"
    limits = Limits(writes=4096, nbytes=32 << 20, write_nbytes=32 << 20, in_flight=1 << 16)

    def __init__(self, host: str, lanes: int) -> None:
        self._nixl = load_bindings()
        self._log = UcxLog()
        self._agent_name = uuid.uuid4().hex
        self._regions = Regions()
        self._registered: list[Any] = []
        self._lock = threading.Lock()
        # By agent: a peer may be connected again before its old connection is released.
        self._connections: Counter[str] = Counter()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.pthrDelay = True, False, PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        parameters = {"num_workers": str(lanes)} | ({"ucx_devices": "lo"} if is_loopback(host) else {})
        try:
            self._agent: Any = self._nixl.nixlAgent(self._agent_name, config)
            self._ucx = self._agent.createBackend("UCX", parameters)
        except Exception as error:
            raise StartupError(f"transfer engine nixl: its UCX backend does not start: {error}") from error
        finally:
            self._log.loaded()

    def register(self, region: Region) -> None:
        entries = self._nixl.nixlRegDList(
            self._kind(region.memory), [(region.address, region.nbytes, region.device, "")]
        )
        try:
            self._agent.registerMem(entries, [self._ucx])
        except Exception as error:
            raise StartupError(
                f"transfer engine nixl: {region.nbytes} bytes of {region.memory.value} memory cannot be registered: "
                f"{error}"
            ) from error
        self._registered.append(entries)
        self._regions.add(region)

    def describe(self) -> bytes:
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def connect(self, native: bytes, regions: Regions) -> _Remote:
        try:
            with self._lock:
                remote = _Remote(self._agent.loadRemoteMD(native).decode(), regions)
                self._connections[remote.agent] += 1
        except Exception as error:
            raise TransferError(f"nixl cannot connect: {error}") from error
        try:
            # This may wait for the network. Other peers are connected and released in the meantime.
            self._agent.makeConnection(remote.agent, [self._ucx])
        except Exception as error:
            self.disconnect(remote)
            raise TransferError(f"nixl cannot connect: {error}") from error
        return remote

    def disconnect(self, remote: _Remote) -> None:
        with self._lock:
            self._connections[remote.agent] -= 1
            if not self._connections[remote.agent]:
                del self._connections[remote.agent]
                self._agent.invalidateRemoteMD(remote.agent)
        self._log.read()

    def post(self, remote: _Remote, writes: Writes) -> _Post:
        requests: list[int] = []
        try:
            for here, there in self._lists(remote, writes):
                requests.append(
                    self._agent.createXferReq(self._nixl.NIXL_WRITE, here, there, remote.agent, b"", [self._ucx])
                )
        except Exception as error:
            self._release(requests)
            raise TransferError(f"nixl refused the writes: {error}") from error
        post = _Post()
        for request in requests:
            if post.failed:
                self._release([request])
            else:
                self._advance(post, request, begin=True)
        return post

    def check(self, handle: _Post) -> WriteState:
        requests, handle.requests = handle.requests, []
        for request in requests:
            self._advance(handle, request, begin=False)
        if handle.requests:
            return WriteState.PENDING
        # An error means that the connection is lost, not that the peer has written everything that it had received.
        return WriteState.FAILED_UNKNOWN if handle.failed else WriteState.DONE

    def transport(self) -> str:
        self._log.read()
        return f"UCX ({', '.join(self._log.transports) or 'transports not known yet'})"

    def close(self) -> None:
        if self._agent is None:
            return
        for entries in self._registered:
            self._agent.deregisterMem(entries, [self._ucx])
        self._registered.clear()
        self._agent = None  # drops the last reference, which ends the agent and its threads
        self._log.close()

    def _advance(self, post: _Post, request: int, *, begin: bool) -> None:
        try:
            status = self._agent.postXferReq(request, b"") if begin else self._agent.getXferStatus(request)
        except Exception as error:
            log.warning("nixl: a write failed: %s", error)
            status = None
        if status == self._nixl.NIXL_IN_PROG:
            post.requests.append(request)
            return
        post.failed |= status != self._nixl.NIXL_SUCCESS
        self._release([request])

    def _release(self, requests: list[int]) -> None:
        for request in requests:
            try:
                self._agent.releaseXferReq(request)
            except Exception as error:
                log.debug("nixl did not release a request: %s", error)

    def _kind(self, memory: MemoryKind) -> Any:
        return self._nixl.DRAM_SEG if memory is MemoryKind.HOST else self._nixl.VRAM_SEG

    def _lists(self, remote: _Remote, writes: Writes) -> Iterator[tuple[Any, Any]]:
        """Yields pairs of NIXL lists, each with one kind of memory on either side."""
        here = _Side(self._regions, writes[:, 0], writes[:, 2])
        there = _Side(remote.regions, writes[:, 1], writes[:, 2])
        for memory in MemoryKind:
            for peer_memory in MemoryKind:
                chosen = here.of(memory) & there.of(peer_memory)
                if chosen.any():
                    yield (
                        self._nixl.nixlXferDList(self._kind(memory), here.entries[chosen]),
                        self._nixl.nixlXferDList(self._kind(peer_memory), there.entries[chosen]),
                    )


class _Side:
    """One side of each write: address, bytes and device in NIXL's format, and the kind of memory."""

    def __init__(self, regions: Regions, addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        at = regions.locate(addresses, nbytes)
        devices = np.array([region.device for region in regions], np.int64)
        self._on_device = np.array([region.memory is MemoryKind.DEVICE for region in regions], np.bool_)[at]
        self.entries = np.stack([addresses, nbytes, devices[at]], axis=1).astype(np.uint64)

    def of(self, memory: MemoryKind) -> NDArray[np.bool_]:
        return self._on_device if memory is MemoryKind.DEVICE else ~self._on_device
