"""Measures how fast the files of a model can be read."""

import errno
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hotset.base.host_checks import Finding
from hotset.base.units import GIB, MIB, show_bytes
from hotset.lab.doctor.findings import Subject, show_seconds

CHUNK_BYTES = 8 * MIB
THREADS = 8
MAX_BYTES = 2 * GIB
MAX_SECONDS = 10.0
SLOW_LOAD_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How many bytes were read, and how fast. Without direct I/O, the system's cache may have had some of them."""

    nbytes: int
    seconds: float
    direct: bool


def check_disk(subject: Subject) -> list[Finding]:
    if not subject.weights:
        return [Finding("skipped", "no model with weights was named", "hotset doctor MODEL")]
    total = sum(path.stat().st_size for path in subject.weights)
    return [judge_rate(read_rate(subject.weights), total)]


def judge_rate(read: ReadRate, total: int) -> Finding:
    """Judges how long a checkpoint of `total` bytes takes at this rate."""
    rate = read.nbytes / read.seconds
    how = "direct I/O" if read.direct else "through the cache of the system, because there is no direct I/O"
    found = f"{rate / 1e9:.2f} GB/s ({show_bytes(read.nbytes)}, {how})"
    found += f"; the weights, {show_bytes(total)}, take {show_seconds(total / rate)}"
    if total / rate > SLOW_LOAD_SECONDS:
        return Finding("slow", found, "copy the model to a local NVMe disk")
    return Finding("good", found)


def read_rate(files: Sequence[Path], max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> ReadRate:
    """Reads the beginning of the files in several threads, in chunks, until one of the limits is reached."""
    direct = all(map(_has_direct_io, files))
    sizes = ((path, path.stat().st_size) for path in files)
    chunks = ((path, start) for path, size in sizes for start in range(0, size, CHUNK_BYTES))
    queue = iter(list(itertools.islice(chunks, max_bytes // CHUNK_BYTES)))
    began = time.monotonic()

    def read_chunks() -> int:
        buffer, count = mmap.mmap(-1, CHUNK_BYTES), 0  # aligned, as direct I/O requires
        while time.monotonic() - began < max_seconds and (chunk := next(queue, None)) is not None:
            count += _read_chunk(*chunk, buffer, direct)
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        counts = [threads.submit(read_chunks) for _ in range(THREADS)]
        nbytes = sum(count.result() for count in counts)
    return ReadRate(nbytes, time.monotonic() - began, direct)


def _read_chunk(path: Path, start: int, buffer: mmap.mmap, direct: bool) -> int:
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(descriptor, start, CHUNK_BYTES, os.POSIX_FADV_DONTNEED)
        return os.preadv(descriptor, [buffer], start)
    finally:
        os.close(descriptor)


def _has_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
