"""Replaces the calls of CUDA's runtime that pin memory, on machines without a GPU."""

import ctypes
from mmap import PAGESIZE

from hotset.base.units import ceil_div


def allocated_bytes(address: int, nbytes: int) -> int:
    """Returns how much of a range of addresses has been allocated, in whole pages of the kernel."""
    first, last = address // PAGESIZE * PAGESIZE, address + nbytes
    pages = (ctypes.c_ubyte * ceil_div(last - first, PAGESIZE))()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pages)
    assert not failed, "the range is not mapped"
    return PAGESIZE * sum(page & 1 for page in pages)


class FakeCudart:
    """Records which ranges are pinned, and whether their pages were allocated before."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.fails_at = fails_at

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.pinned) == self.fails_at:
            return 2
        assert allocated_bytes(address, nbytes) >= nbytes, "pages are allocated before they are pinned"
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0
