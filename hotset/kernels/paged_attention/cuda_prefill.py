"""paged_attention of prompts in CUDA C++, for Hopper: heads of 128 values in bfloat16."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape, float_bits
from hotset.kernels.paged_attention.triton_impl import LOG2_E, check_strides
from hotset.kernels.rows import PagedRows

SOURCE = Path(__file__).with_name("prefill.cu")
DIM, TOKENS, THREADS = 128, 128, 384  # of a head; tokens and threads of a block
SHARED_BYTES = 161 << 10  # the size of `Shared` in prefill.cu


def supports(q: Tensor) -> bool:
    """Returns whether the kernel computes queries of this type and size, on this GPU."""
    return q.dtype == torch.bfloat16 and q.shape[2] == DIM and _is_hopper(q.device)


def prefill(
    q: Tensor, context: PagedRows, positions: Tensor, segment_of: Tensor, kv_heads: int, scale: float, out: Tensor
) -> None:
    """Writes the attention of every query to `out`. All tensors except pool and page table have one entry per query."""
    queries, heads, _dim = q.shape
    if queries == 0:
        return
    check_strides(q, context, positions, out)
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:  # the kernel reads 16 bytes at a time
        q = q.contiguous()
    blocks, table = context.blocks, context.table
    kernel = cuda_source.kernel(SOURCE, "attend", PAGE_ROWS=blocks.shape[2], SHARED_BYTES=SHARED_BYTES)
    kernel.launch(
        LaunchShape(heads * ceil_div(queries, TOKENS), THREADS, SHARED_BYTES),
        q,
        blocks,
        table,
        context.seat_of,
        segment_of,
        positions,
        out,
        queries,
        q.stride(0),
        q.stride(1),
        blocks.stride(1) * blocks.itemsize,
        blocks.stride(2) * blocks.itemsize,
        table.stride(0),
        heads,
        kv_heads,
        float_bits(scale * LOG2_E),
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
