"""Measures how long a host store takes to start: allocating its memory, pinning it, and freeing it again.

    python benchmarks/pinning.py --gib 32 --json pinning.json

Rows of the table: memory of one process (a single worker) and memory that processes share (several workers), each in
small pages or in huge pages, allocated by the driver while it pins, or before that by several threads. Pages are huge
only if the system allows it: shared memory needs `shmem_enabled` to be set to `advise`, or reserved huge pages.
Bar (required result): memory of one process, as an engine allocates it, takes at most a third of the time of small
pages that the driver allocates.
"""

import gc
import time
from typing import Any
from unittest.mock import patch

import torch
from gpu_timing import require_gpu
from report import Bar, make_parser, report
from torch import Tensor

from hotset.base.numa import huge_pages
from hotset.base.units import GIB
from hotset.engine.workers.shared_memory import SharedMemory
from hotset.kernels.rows import RowLayout
from hotset.memory import host_store
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore, host_bytes

LAYERS, PAGE_ROWS = 61, 64
MAX_SHARE = 1 / 3


def memory_of(kind: str, nbytes: int) -> Tensor | None:
    """Returns memory for a store, or None if the store shall allocate it."""
    if kind == "shared":
        shared = SharedMemory(nbytes)
        shared.close()
        return shared.bytes
    return torch.empty(nbytes, dtype=torch.uint8) if kind == "one process, small pages" else None


def measure(kind: str, *, threads: bool, shape: KvShape, pages: int) -> dict[str, Any]:
    nbytes = host_bytes(shape, pages, PAGE_ROWS)
    began = time.perf_counter()
    with patch.object(host_store, "populate", host_store.populate if threads else lambda layer, pool: []):
        store = HostStore(shape, pages, PAGE_ROWS, torch.device("cuda"), memory=memory_of(kind, nbytes))
    ready = time.perf_counter()
    store.close()
    del store
    gc.collect()
    freed = time.perf_counter()
    return {
        "memory": kind,
        "allocated by": "threads" if threads else "driver",
        "GiB": nbytes / GIB,
        "seconds": ready - began,
        "GB/s": nbytes / (ready - began) / 1e9,
        "freed in s": freed - ready,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gib", type=float, default=16, help="size of the host store")
    options = parser.parse_args()
    require_gpu()
    torch.zeros(1, device="cuda")
    shape = KvShape(LAYERS, RowLayout(576, torch.bfloat16), (), None, 0)
    pages = int(options.gib * GIB) // host_bytes(shape, 1, PAGE_ROWS)
    kinds = ("one process, small pages", "one process", "shared")
    rows = [measure(kind, threads=threads, shape=shape, pages=pages) for kind in kinds for threads in (False, True)]
    ratio = rows[3]["seconds"] / rows[0]["seconds"]
    bars = [Bar("one process, by threads / small pages, by the driver", ratio, MAX_SHARE)]
    report(f"Host store with {LAYERS} layers of {shape.row.stride_bytes} B per row; {huge_pages()}", rows, options.json)
    report("Bars", [bar.row() for bar in bars], None)


if __name__ == "__main__":
    main()
