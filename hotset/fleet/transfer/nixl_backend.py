"""The NIXL backend, over UCX, which chooses the fastest transport to each peer: shared memory, TCP or RDMA."""

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

from hotset.base.errors import ConfigError, MissingDependency, StartupError, TransferError
from hotset.fleet.transfer.api import MemoryKind, Region, Writes, WriteState
from hotset.fleet.transfer.lanes import Limits
from hotset.fleet.transfer.regions import Regions

log = logging.getLogger(__name__)

# Maximum sleep of NIXL's progress thread. The thread wakes earlier if UCX reports work. With transports of UCX that do
# not, a peer that writes may wait this long. NIXL rounds up to milliseconds. With 0, its default, the thread spins.
# An endpoint that writes makes progress by polling its writes, and the thread only competes for the same locks: staged
# handoffs of 32 contexts run at 1.9 instead of 1.6 GB/s with the longer sleep (two Xeon cores, 2026-11-17).
READER_DELAY_US, WRITER_DELAY_US = 2_000, 20_000

# Lines of UCX's log: the transports that it chose, and its warnings.
CHOSEN = re.compile(r" UCX +INFO +\S+ (intra-node|inter-node) cfg#\d+ (.*)")
TRANSPORT = re.compile(r"\w+/[\w:.]+")
WARNING = re.compile(r" UCX +(?:WARN|ERROR|FATAL) +(.*)")
DEVICES_VARIABLE = "UCX_NET_DEVICES"


def load_bindings() -> Any:
    """Imports NIXL. Raises MissingDependency, with advice on what to install, if that fails."""
    try:
        from nixl import _bindings
    except ImportError as error:
        raise MissingDependency(
            f"transfer engine nixl: {error}; install it with pip install 'hotset[transfer]'"
        ) from error
    return _bindings


def choose_devices(interface: str) -> None:
    """Makes UCX use this interface only. Call it before UCX is loaded.

    UCX opens a listening socket on every interface that it uses. NIXL's parameter `ucx_devices` does not prevent
    sockets on other interfaces (NIXL 1.5.1). The variable stays set, because UCX may read it again. Raises ConfigError
    if the environment, or an earlier endpoint of this process, has chosen another interface.
    """
    chosen = os.environ.setdefault(DEVICES_VARIABLE, interface)
    if chosen != interface:
        raise ConfigError(
            f"the environment variable {DEVICES_VARIABLE} is {chosen!r}, but the transfer engine should use "
            f"{interface!r}; unset the variable, or set --transfer-interface {chosen}"
        )


class UcxLog:
    """Finds out which transports UCX has chosen. UCX reports them only in its log. This class directs the log to a
    temporary file and reads it.

    Create it before UCX is loaded, because UCX reads its settings from the environment once. If the environment already
    configures UCX's log, this class changes nothing, and the transports are not known.
    """

    def __init__(self) -> None:
        # The transports of each kind of connection so far. UCX does not say which peers have which kind.
        self.kinds: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        if not {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys():
            handle, path = tempfile.mkstemp(prefix="hotset-ucx-", suffix=".log")
            self._file = os.fdopen(handle)
            self._path = path
            os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"] = path, "info"

    def loaded(self) -> None:
        """Unlinks the file, and removes the settings. Call it when UCX has opened the file."""
        if self._file:
            os.unlink(self._path)
            del os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"]

    def read(self) -> None:
        """Reads the new lines, and copies UCX's warnings and errors to the log of this module."""
        with self._lock:
            if self._file is None:
                return
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library and never flushes it
            lines = self._file.readlines()
            for match in filter(None, map(CHOSEN.search, lines)):
                kind = f"{match[1]} {', '.join(dict.fromkeys(TRANSPORT.findall(match[2])))}"
                self.kinds = tuple(dict.fromkeys([*self.kinds, kind]))
        for match in filter(None, map(WARNING.search, lines)):
            log.warning("UCX: %s", match[1].strip())

    def close(self) -> None:
        self.read()
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None


@dataclass(slots=True, eq=False)
class _Remote:
    agent: str  # the name of the peer's NIXL agent
    regions: Regions


@dataclass(slots=True)
class _Post:
    requests: list[int] = field(default_factory=list)  # NIXL's handles of requests that are in progress
    failed: bool = False


class NixlBackend:
    """Implements `Backend` with one NIXL agent. Agents have random names, so a restarted peer is a different agent."""

    name = "nixl"
    limits = Limits(writes=4096, nbytes=32 << 20, write_nbytes=32 << 20, in_flight=1 << 16)

    def __init__(self, interface: str, lanes: int) -> None:
        """`lanes` is 1 for an endpoint that writes rarely, like that of a decode worker, which only receives."""
        choose_devices(interface)
        self._nixl = load_bindings()
        self._log = UcxLog()
        self._agent_name = uuid.uuid4().hex
        self._regions = Regions()
        self._registered: list[Any] = []
        self._lock = threading.Lock()
        # Number of connections to each agent. A peer may be connected again before its earlier connection is released.
        self._connections: Counter[str] = Counter()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = READER_DELAY_US if lanes == 1 else WRITER_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        try:
            self._agent: Any = self._nixl.nixlAgent(self._agent_name, config)
            self._ucx = self._agent.createBackend("UCX", {"num_workers": str(lanes)})
        except Exception as error:
            self._log.read()  # UCX's warnings contain the cause
            raise StartupError(
                f"transfer engine nixl: its UCX backend does not start on interface {interface}: {error}"
            ) from error
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
            # This may wait for the network, so it does not hold the lock.
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
            for local, target in self._descriptor_lists(remote, writes):
                requests.append(
                    self._agent.createXferReq(self._nixl.NIXL_WRITE, local, target, remote.agent, b"", [self._ucx])
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
        # After an error, bytes that have reached the peer's machine may still be written to its memory.
        return WriteState.FAILED_UNKNOWN if handle.failed else WriteState.DONE

    def transport(self) -> str:
        self._log.read()
        return f"UCX ({'; '.join(self._log.kinds) or 'transports not known yet'})"

    def close(self) -> None:
        if self._agent is None:
            return
        for entries in self._registered:
            self._agent.deregisterMem(entries, [self._ucx])
        self._registered.clear()
        self._agent = None  # drops the last reference, which ends the agent and its threads
        self._log.close()

    def _advance(self, post: _Post, request: int, *, begin: bool) -> None:
        """Begins or checks a request. Keeps it in the post if it is in progress, else releases it."""
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

    def _descriptor_lists(self, remote: _Remote, writes: Writes) -> Iterator[tuple[Any, Any]]:
        """Yields pairs of NIXL descriptor lists, local and remote. NIXL requires one kind of memory in each list."""
        local = _Side(self._regions, writes[:, 0], writes[:, 2])
        target = _Side(remote.regions, writes[:, 1], writes[:, 2])
        for memory in MemoryKind:
            for peer_memory in MemoryKind:
                chosen = local.is_in(memory) & target.is_in(peer_memory)
                if chosen.any():
                    yield (
                        self._nixl.nixlXferDList(self._kind(memory), local.entries[chosen]),
                        self._nixl.nixlXferDList(self._kind(peer_memory), target.entries[chosen]),
                    )


class _Side:
    """One side of a list of writes: address, length and device of each write in NIXL's format, and kind of memory."""

    def __init__(self, regions: Regions, addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        index = regions.locate(addresses, nbytes)
        devices = np.array([region.device for region in regions], np.int64)
        self._on_device = np.array([region.memory is MemoryKind.DEVICE for region in regions], np.bool_)[index]
        self.entries = np.stack([addresses, nbytes, devices[index]], axis=1).astype(np.uint64)

    def is_in(self, memory: MemoryKind) -> NDArray[np.bool_]:
        """Returns, for each write, whether this side is in this kind of memory."""
        return self._on_device if memory is MemoryKind.DEVICE else ~self._on_device
