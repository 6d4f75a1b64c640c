"""Reads ranges of files into the memory of a device: several threads, each with buffers of its own, read ahead.

A thread reads a piece of a range with direct I/O into a pinned buffer, and copies it to the device on a stream of its
own, so reads and copies overlap, and no page of the file passes through the page cache. What the file system already
has in the page cache, and what other workers of this machine read too, is read through it, so that each byte comes from
the disk once. On a CPU the buffers are not pinned, and copies are done when they return.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import CheckpointError
from hotset.base.units import MIB, ceil_div

LOGGER = logging.getLogger("hotset.models")
THREADS = 8
BUFFERS_PER_THREAD = 2  # one is filled while the other is copied to the device
BUFFER_BYTES = 8 * MIB  # so all buffers take 128 MiB
STAGING_BYTES = 512 * MIB  # memory of the device for ranges that are read ahead; a larger range gets memory of its own
ALIGNMENT = 4096  # of addresses, offsets and sizes of direct I/O; no disk has larger blocks
PROBES = 64  # places of a file that are looked up in the page cache


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    first: int
    nbytes: int
    title: str  # for error messages: the file and the tensor's name
    shared: bool = False  # whether other workers of this machine read the same bytes


class ParallelReader:
    """Reads ranges in the order in which they were announced, ahead of the calls that ask for them."""

    def __init__(
        self,
        device: torch.device,
        *,
        threads: int = THREADS,
        buffer_bytes: int = BUFFER_BYTES,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Starts no thread and takes no memory before the first `read`."""
        self._device = device
        self._buffer_bytes, self._staging = buffer_bytes, _Staging(staging_bytes, device)
        self._threads = ThreadPoolExecutor(threads, "hotset-read")
        self._buffers = threading.local()
        self._files: dict[Path, _File] = {}
        self._announced: deque[FileRange] = deque()
        self._ahead: deque[_Pending] = deque()  # are being read, in the order of `_announced`
        self._in_use: list[_Pending] = []  # were returned since the last `release`

    def announce(self, wanted: FileRange) -> None:
        """Says that `read` will be called with this range, after those that were announced before."""
        self._announced.append(wanted)

    def read(self, wanted: FileRange) -> Tensor:
        """Returns the bytes [nbytes] uint8 on the device, valid until `release`.

        Work that is queued later on the current stream finds them there. Raises `CheckpointError`, with the title of
        the range, if it cannot be read, if the file ends before, or if it has changed since it was opened.
        """
        pending = self._take(wanted)
        self._in_use.append(pending)
        self._read_ahead()
        for copied in pending.pieces:
            event = copied.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        self._file(wanted).check_unchanged(wanted.title)
        return pending.target

    def release(self) -> None:
        """Says that what `read` returned is not used by work that the caller queues from now on. The caller stays on
        one stream."""
        for pending in self._in_use:
            self._staging.free(pending.target)
        self._in_use = []

    def close(self) -> None:
        """Ends reading, and frees all memory. Idempotent."""
        self._announced.clear()
        self._threads.shutdown(cancel_futures=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ahead.clear()
        self._in_use = []
        self._staging.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _take(self, wanted: FileRange) -> "_Pending":
        """Returns the range, which is being read: as announced, else from now on. Announced ranges before it are
        dropped."""
        is_next = bool(self._ahead) and self._ahead[0].wanted == wanted
        if not (is_next or wanted in self._announced or wanted in [pending.wanted for pending in self._ahead]):
            return self._begin(wanted, self._new_memory(wanted))
        while True:
            self._read_ahead()
            pending = self._ahead.popleft()
            if pending.wanted == wanted:
                return pending
            self._discard(pending)

    def _read_ahead(self) -> None:
        """Begins to read announced ranges while there is staging memory for them. The first one gets memory of its own
        if there is none."""
        while self._announced:
            target = self._staging.allocate(self._announced[0].nbytes)
            if target is None and self._ahead:
                return
            wanted = self._announced.popleft()
            self._ahead.append(self._begin(wanted, self._new_memory(wanted) if target is None else target))

    def _new_memory(self, wanted: FileRange) -> Tensor:
        return torch.empty(wanted.nbytes, dtype=torch.uint8, device=self._device)

    def _begin(self, wanted: FileRange, target: Tensor) -> "_Pending":
        file, step = self._file(wanted), self._buffer_bytes
        begin, end = wanted.first // ALIGNMENT * ALIGNMENT, wanted.first + wanted.nbytes
        # Work that the caller has queued may still use what this memory had before.
        after = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        pieces = []
        for offset in range(begin, end, step):
            first, last = max(offset, wanted.first), min(offset + step, end)
            part = target[first - wanted.first : last - wanted.first]
            pieces.append(self._threads.submit(self._read_piece, file, wanted, first, part, after))
        return _Pending(wanted, target, pieces)

    def _discard(self, pending: "_Pending") -> None:
        for piece in pending.pieces:
            if (copied := piece.result()) is not None:
                copied.synchronize()
        self._staging.free(pending.target)

    def _file(self, wanted: FileRange) -> "_File":
        if wanted.path not in self._files:
            self._files[wanted.path] = _File(wanted)
        return self._files[wanted.path]

    @torch.inference_mode()  # the memory may be that of a caller in this mode
    def _read_piece(
        self, file: "_File", wanted: FileRange, first: int, part: Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Reads the bytes [first, first + len(part)) of a file, in one of this thread's buffers, and copies them to
        `part`. Returns the event of the copy; None if it is done."""
        buffer = self._buffer()
        buffer.wait()
        skipped = first % ALIGNMENT
        file.fill(buffer.bytes, first - skipped, skipped + part.numel(), wanted)
        return buffer.copy_to(part, skipped, after)

    def _buffer(self) -> "_Buffer":
        """Returns the buffer that this thread has used least recently."""
        own: deque[_Buffer] | None = getattr(self._buffers, "own", None)
        if own is None:
            if self._device.index is not None:
                torch.cuda.set_device(self._device)  # for pinned memory
            own = self._buffers.own = deque(
                _Buffer(self._buffer_bytes, self._device) for _ in range(BUFFERS_PER_THREAD)
            )
        own.rotate()
        return own[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A range that is being read to `target`."""

    wanted: FileRange
    target: Tensor
    pieces: Sequence[Future[torch.cuda.Event | None]]


class _Buffer:
    """Aligned host memory through which one thread reads, and its stream."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=on_gpu)
        begin = -memory.data_ptr() % ALIGNMENT
        self._memory = memory[begin : begin + nbytes]
        self.bytes = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits until the buffer can be filled again."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, part: Tensor, skipped: int, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        context: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            if after is not None:
                self._stream.wait_event(after)
            context = torch.cuda.stream(self._stream)
        with context:
            part.copy_(self._memory[skipped : skipped + part.numel()], non_blocking=True)
        self._copied = None if self._stream is None else self._stream.record_event()
        return self._copied


class _Staging:
    """Memory of the device, given out in a ring. It is taken when the first range needs it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device
        self._memory: Tensor | None = None
        self._given: dict[int, int] = {}  # first byte -> last byte + 1, the oldest first
        self._freed: set[int] = set()  # first bytes of those that wait for older ones

    def allocate(self, nbytes: int) -> Tensor | None:
        """Returns memory, or None if there is not enough of it now."""
        if nbytes > self._nbytes:
            return None
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        size = ceil_div(max(1, nbytes), ALIGNMENT) * ALIGNMENT
        oldest, newest = (next(iter(self._given)), next(reversed(self._given.values()))) if self._given else (0, 0)
        wrapped = bool(self._given) and newest <= oldest
        if newest + size <= (oldest if wrapped else self._nbytes):
            first = newest
        elif not wrapped and size <= oldest:
            first = 0
        else:
            return None
        self._given[first] = first + size
        return self._memory[first : first + nbytes]

    def free(self, target: Tensor) -> None:
        """Frees memory of `allocate`, which is given out again when all older memory is free, too."""
        if self._memory is None or target.untyped_storage().data_ptr() != self._memory.untyped_storage().data_ptr():
            return  # memory of its own, which is freed with its last reference
        self._freed.add(int(target.storage_offset()))
        while self._given and (oldest := next(iter(self._given))) in self._freed:
            self._freed.remove(oldest)
            del self._given[oldest]

    def close(self) -> None:
        self._memory = None
        self._given.clear()


class _File:
    """A file that is read in pieces, by several threads."""

    def __init__(self, wanted: FileRange) -> None:
        """Raises `CheckpointError` if the file cannot be opened."""
        try:
            self._buffered = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{wanted.title} cannot be read: {error.strerror}") from error
        self._path, self._state = wanted.path, _state(os.fstat(self._buffered))
        self._direct: int | None = None
        if _cached_share(self._buffered, os.fstat(self._buffered).st_size) < 0.5:
            self._direct = _open_direct(wanted.path)

    def fill(self, buffer: memoryview, offset: int, nbytes: int, wanted: FileRange) -> None:
        """Reads at least `nbytes` bytes from `offset`, which is aligned."""
        done = 0
        try:
            if self._direct is not None and not wanted.shared:
                whole = ceil_div(nbytes, ALIGNMENT) * ALIGNMENT
                done = os.preadv(self._direct, [buffer[:whole]], offset)
            while done < nbytes:
                read = os.preadv(self._buffered, [buffer[done:nbytes]], offset + done)
                if read == 0:
                    raise CheckpointError(f"{wanted.title} is cut short: {wanted.path} ends at {offset + done}")
                done += read
        except OSError as error:
            raise CheckpointError(f"{wanted.title} cannot be read: {error.strerror}") from error

    def check_unchanged(self, title: str) -> None:
        """Raises `CheckpointError` if the file has been written or replaced since it was opened."""
        try:
            unchanged = _state(os.stat(self._path)) == self._state
        except OSError:
            unchanged = False
        if not unchanged:
            raise CheckpointError(f"{title} was read while its file changed; start again when the file is complete")

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_without_direct: set[int] = set()  # devices of file systems about which the log has said it


def _open_direct(path: Path) -> int | None:
    """Opens a file for direct I/O. Returns None, and says so once, if its file system has none."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        os.preadv(descriptor, [_Buffer(ALIGNMENT, torch.device("cpu")).bytes], 0)
        return descriptor
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        device = os.stat(path).st_dev
        if device not in _without_direct:
            LOGGER.info("%s is read through the page cache: no direct I/O (%s)", path.parent, error.strerror)
        _without_direct.add(device)
        return None


def _cached_share(descriptor: int, nbytes: int) -> float:
    """Returns about which share of a file is in the page cache; 0 if the file system does not say."""
    page, found = bytearray(ALIGNMENT), 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # so that a look does not read ahead
    try:
        for probe in range(PROBES):
            try:
                found += os.preadv(descriptor, [page], nbytes * probe // PROBES, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                continue
    except OSError:  # the file system cannot look
        return 0.0
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return found / PROBES
