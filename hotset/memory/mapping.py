"""Allocates the memory of host stores in several threads, on chosen NUMA nodes and in huge pages.

Linux allocates a page of mapped memory when it is first touched. Before that, a policy can be set for its NUMA nodes,
and huge pages can be requested. All of this is done by unprivileged system calls. If the system refuses one of
them, the memory is used as it is.
"""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import partial

import torch
from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.numa import huge_pages, mbind
from hotset.base.units import MIB, ceil_div, show_bytes

LOGGER = logging.getLogger("hotset.memory")

MADV_POPULATE_WRITE = 23  # since Linux 5.14
POPULATED_BYTES = 256 * MIB  # memory that a thread allocates at a time
POPULATE_THREADS = 8  # on an H200's machine, 16 are not faster

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def private_memory(nbytes: int, nodes: Sequence[int] = ()) -> Tensor:
    """Returns `nbytes` zero bytes for this process, in huge pages if the system has them, with the policy of
    `set_nodes`. They are freed with the tensor. Raises StartupError if the system refuses so much memory."""
    reserved = None if huge_pages().private else _reserved_huge_pages(nbytes)
    if reserved is not None:
        try:
            return map_descriptor(reserved, nbytes, nodes)
        finally:
            os.close(reserved)
    try:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _not_allocated(nbytes, error.errno) from error
    return _mapped(mapping, nbytes, nodes)


def shared_descriptor(nbytes: int) -> int:
    """Returns a file descriptor of `nbytes` new bytes that processes can share, in huge pages if the system has them.

    Raises OSError if there is too little memory.
    """
    reserved = None if huge_pages().shared else _reserved_huge_pages(nbytes)
    if reserved is not None:
        return reserved
    descriptor = os.memfd_create("hotset-kv")
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_descriptor(descriptor: int, nbytes: int, nodes: Sequence[int] = ()) -> Tensor:
    """Maps the first `nbytes` bytes of a descriptor of `shared_descriptor`, with the policy of `set_nodes`. The policy
    holds for all processes. The bytes stay mapped as long as the tensor exists."""
    return _mapped(mmap.mmap(descriptor, os.fstat(descriptor).st_size), nbytes, nodes)


def _mapped(mapping: mmap.mmap, nbytes: int, nodes: Sequence[int]) -> Tensor:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # the kernel has no huge pages, or these are reserved ones
        if error.errno != errno.EINVAL:
            raise
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # the tensor keeps the mapping alive
    if nodes:
        set_nodes(memory, nodes)
    return memory[:nbytes]


def _reserved_huge_pages(nbytes: int) -> int | None:
    """Returns a descriptor of memory in huge pages that the administrator has reserved. None if there are too few."""
    pages = huge_pages()
    if not pages.page_bytes or pages.free_reserved * pages.page_bytes < nbytes:
        return None
    descriptor = os.memfd_create("hotset-kv", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    try:
        os.ftruncate(descriptor, ceil_div(nbytes, pages.page_bytes) * pages.page_bytes)
        mmap.mmap(descriptor, 0).close()  # fails if another process has taken the pages meanwhile
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def set_nodes(memory: Tensor, nodes: Sequence[int]) -> bool:
    """Places the pages of `memory` that have not been touched yet on NUMA nodes (`mbind`). Logs a line, and returns
    False if the system refuses."""
    if failure := mbind(*_whole_pages(memory), nodes):
        LOGGER.info("host memory is not placed on NUMA nodes %s: %s", list(nodes), os.strerror(failure))
        return False
    how = "is on NUMA node" if len(nodes) == 1 else "is interleaved over NUMA nodes"
    LOGGER.info("%s of host memory %s %s", show_bytes(memory.nbytes), how, ", ".join(map(str, nodes)))
    return True


def populate(memory: Tensor, threads: Executor) -> list[Future[None]]:
    """Allocates all pages of `memory` in several threads. A failed future has a StartupError.

    If the kernel cannot do this, nothing happens: the pages are allocated when they are touched.
    """
    first, nbytes = _whole_pages(memory)
    starts = range(first, first + nbytes, POPULATED_BYTES)
    return [threads.submit(partial(_populate, start, min(POPULATED_BYTES, first + nbytes - start))) for start in starts]


def _populate(address: int, nbytes: int) -> None:
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0 or ctypes.get_errno() == errno.EINVAL:
        return
    raise _not_allocated(nbytes, ctypes.get_errno())


def _not_allocated(nbytes: int, number: int | None) -> StartupError:
    reason = os.strerror(number or errno.ENOMEM)
    return StartupError(f"{show_bytes(nbytes)} of host memory cannot be allocated ({reason}); lower --host-kv-gib")


def _whole_pages(memory: Tensor) -> tuple[int, int]:
    """Returns the address of the page in which `memory` begins, and the number of bytes from there to its end."""
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return first, memory.data_ptr() + memory.nbytes - first
