"""paged_attention of prompts in CUDA C++, for Hopper: heads of 128 values in bfloat16."""

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape, float_bits
from hotset.kernels.fast_path import is_hopper
from hotset.kernels.paged_attention.triton_impl import LOG2_E
from hotset.kernels.rows import PagedRows

SOURCE = Path(__file__).with_name("prefill.cu")
DIM, TOKENS, KEYS, THREADS = 128, 128, 128, 384  # of a head; tokens of a block; keys of a tile; threads of a block
SHARED_BYTES = 161 << 10  # the size of `Shared` in prefill.cu
MIN_BOX_ROWS = 8  # copies of fewer rows would not begin where the layout of shared memory repeats
MAP_BYTES = 128  # of a tensor map


def supports(q: Tensor, context: PagedRows) -> bool:
    """Returns whether the kernel computes queries and pages of this type and these sizes on this GPU."""
    return (
        q.dtype == torch.bfloat16
        and q.shape[2] == DIM
        and _box_rows(context.blocks) >= MIN_BOX_ROWS
        and is_hopper(q.device)
    )


def prefill(
    q: Tensor, context: PagedRows, positions: Tensor, segment_of: Tensor, kv_heads: int, scale: float, out: Tensor
) -> None:
    """Writes the attention of every query to `out`. All tensors except pool and page table have one entry per query."""
    queries, heads, _dim = q.shape
    if queries == 0:
        return
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:  # the kernel reads 16 bytes at a time
        q = q.contiguous()
    blocks, table = context.blocks, context.table
    constants = {"PAGE_ROWS": blocks.shape[2], "BOX_ROWS": _box_rows(blocks), "SHARED_BYTES": SHARED_BYTES}
    kernel = cuda_source.kernel(SOURCE, "attend", **constants)
    kernel.launch(
        LaunchShape(heads * ceil_div(queries, TOKENS), THREADS, SHARED_BYTES),
        q,
        _tensor_map(blocks.data_ptr(), tuple(blocks.shape[1:]), tuple(blocks.stride()[1:3]), blocks.device),
        table,
        context.seat_of,
        segment_of,
        positions,
        out,
        queries,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        heads,
        kv_heads,
        float_bits(scale * LOG2_E),
    )


def _box_rows(blocks: Tensor) -> int:
    """Returns the rows of one copy, which must not extend beyond a page or a tile."""
    return math.gcd(blocks.shape[2], KEYS)


@cache  # captured graphs read it, so it is never freed
def _tensor_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the description of a bfloat16 tensor [pages, rows, values] that copies to shared memory refer to.

    `strides` are those of pages and rows, in values.
    """
    from cuda.bindings import driver

    pages, rows, width = shape
    page_stride, row_stride = strides
    status, described = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        3,
        address,
        [driver.cuuint64_t(size) for size in (width, rows, pages)],
        [driver.cuuint64_t(2 * stride) for stride in (row_stride, page_stride)],
        [driver.cuuint32_t(size) for size in (64, math.gcd(rows, KEYS), 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(f"the driver refused to describe pages {shape} with strides {strides}: {status}")
    opaque = bytearray(ctypes.string_at(int(described.getPtr()), MAP_BYTES))
    return torch.frombuffer(opaque, dtype=torch.uint8).to(device)
