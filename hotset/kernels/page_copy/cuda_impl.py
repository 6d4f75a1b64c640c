"""page_copy in CUDA C++: constants and launch shapes. One kernel copies in both directions, for all sizes."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape

SOURCE = Path(__file__).with_name("kernel.cu")
CHUNK_BYTES = 16 << 10  # a block copies up to this many bytes, or one row, at a time


@dataclass(frozen=True, slots=True)
class PageCopyTuning:
    """The size of a launch. A few blocks saturate the bus and leave the rest of the GPU to other kernels."""

    blocks: int = 32
    threads: int = 256


TUNED = PageCopyTuning()


def copy(
    pieces: Tensor, device_rows: Tensor, host_rows: Tensor, *, to_host: bool, tuning: PageCopyTuning = TUNED
) -> None:
    device, host = device_rows.view(torch.uint8), host_rows.view(torch.uint8)
    source, target = (device, host) if to_host else (host, device)
    layers, row_bytes = device.shape[0], device.shape[2]
    if pieces.shape[0] == 0 or row_bytes == 0:
        return
    shared_bytes = tuning.threads * (3 * 8 + 4) + 32 * 4  # the size of `Shared` in kernel.cu
    kernel = cuda_source.kernel(SOURCE, "copy_pieces", THREADS=tuning.threads, SHARED_BYTES=shared_bytes)
    kernel.launch(
        LaunchShape(tuning.blocks, tuning.threads, shared_bytes),
        pieces,
        pieces.shape[0],
        layers,
        row_bytes,
        max(1, CHUNK_BYTES // row_bytes),
        source,
        source.stride(0),
        source.stride(1),
        0 if to_host else 1,
        target,
        target.stride(0),
        target.stride(1),
        1 if to_host else 0,
    )
