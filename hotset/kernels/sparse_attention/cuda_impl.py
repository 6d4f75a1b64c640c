"""sparse_attention in CUDA C++, for Hopper: constants and launch shapes."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div, next_power_of_2
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import Kernel, LaunchShape, float_bits
from hotset.kernels.sparse_attention.launch import MAX_SPLITS, RANK, ROPE, WARPGROUP, AttentionShape, LaunchConfig

FEW_HEADS, MANY_HEADS, MERGE = (
    Path(__file__).with_name(name) for name in ("few_heads.cu", "many_heads.cu", "merge.cu")
)
WARPGROUP_SHARED_BYTES = 219 << 10  # the size of `Shared` in many_heads_rows.cu
MERGED_AT_ONCE = 16  # splits, at most; more would take too many registers
# The kernel for few heads.
WARPS = 4
GROUP = 8  # rows per copy group; the kernel waits for whole groups
MAX_AHEAD = 128  # rows whose copies can begin before the first step
# In bytes: shared memory of a multiprocessor, limit of a block, and what the system reserves in addition per block.
SHARED_OF_SM, SHARED_OF_BLOCK, SHARED_RESERVED = 228 << 10, 227 << 10, 1 << 10


def attend(shape: AttentionShape, launch: LaunchConfig, tensors: tuple[Tensor, ...], scale: float) -> None:
    """Launches the kernel for rank 512, rope 64, blocks of 16, 32 or 64 heads, as `_attend` of triton_impl."""
    if (shape.rank, shape.rope) != (RANK, ROPE):
        raise InternalError(f"{launch} for {shape}")
    q, rows, row_ids, out, lse = tensors
    if out.data_ptr() % 16:
        raise InternalError(f"the results begin at {out.data_ptr()}, which is no multiple of 16 bytes")
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:  # the kernels read up to 16 bytes at a time
        q = q.contiguous()
    kernel, threads, shared_bytes = (_many_heads if launch.kernel == "warpgroup" else _few_heads)(shape, launch)
    blocks = shape.queries * launch.splits * ceil_div(shape.heads, launch.block_heads)
    kernel.launch(
        LaunchShape(blocks, threads, shared_bytes),  # not early: blocks would be spread unevenly
        q,
        rows,
        row_ids,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        rows.stride(0),
        row_ids.stride(0),
        shape.k,
        shape.heads,
        launch.splits,
        launch.split_keys(shape),
        float_bits(scale),
    )


def _few_heads(shape: AttentionShape, launch: LaunchConfig) -> tuple[Kernel, int, int]:
    """Returns the kernel for blocks of 16 or 32 heads, its number of threads, and the bytes of its shared memory."""
    if launch.warps != WARPS:
        raise InternalError(f"{launch} for {shape}")
    ring = _ring(shape, launch)
    shared_bytes = _shared_bytes(shape, launch, ring)
    kernel = cuda_source.kernel(
        FEW_HEADS,
        "attend",
        FP8=int(shape.fp8),
        HEADS=launch.block_heads,
        KEYS=launch.block_keys,
        RING=ring,
        BLOCKS=launch.programs_per_sm,
        SHARED_BYTES=shared_bytes,
    )
    return kernel, 32 * WARPS, shared_bytes


def _many_heads(shape: AttentionShape, launch: LaunchConfig) -> tuple[Kernel, int, int]:
    """Returns the kernel for blocks of 64 heads, as `_few_heads` does."""
    if replace(launch, splits=1) != WARPGROUP:
        raise InternalError(f"{launch} for {shape}")
    kernel = cuda_source.kernel(MANY_HEADS, "attend", FP8=int(shape.fp8), SHARED_BYTES=WARPGROUP_SHARED_BYTES)
    return kernel, 32 * launch.warps, WARPGROUP_SHARED_BYTES


def merge(shape: AttentionShape, launch: LaunchConfig, partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Merges the splits. The kernel may begin while `attend` is still running; it waits for the end of `attend`."""
    if launch.splits > MAX_SPLITS:
        raise InternalError(f"{launch.splits} splits: the merge supports up to {MAX_SPLITS}, one per lane")
    threads = shape.rank // 4
    at_once = min(MERGED_AT_ONCE, next_power_of_2(launch.splits))
    kernel = cuda_source.kernel(MERGE, "merge", THREADS=threads, AT_ONCE=at_once)
    blocks = LaunchShape(shape.queries * shape.heads, threads, dependent_launch=True)
    kernel.launch(blocks, partial, lse, out, shape.heads, launch.splits)


def _ring(shape: AttentionShape, launch: LaunchConfig) -> int:
    """Returns the number of rows in the shared memory of a block: all that fit, up to MAX_AHEAD after a step's rows."""
    shared_bytes = min(SHARED_OF_BLOCK, SHARED_OF_SM // launch.programs_per_sm - SHARED_RESERVED)
    room = shared_bytes - _shared_bytes(shape, launch, 0)
    rows = min(room // _bytes_of_row(shape), launch.block_keys + MAX_AHEAD) // GROUP * GROUP
    if rows < 2 * launch.block_keys:
        raise InternalError(f"{launch} leaves room for {rows} rows, but two steps need more")
    return rows


def _shared_bytes(shape: AttentionShape, launch: LaunchConfig, ring: int) -> int:
    """Returns the size of `Shared` in rows.cu."""
    heads, keys = launch.block_heads, launch.block_keys
    scores = 4 * WARPS * heads * (keys + 8) + 2 * heads * (keys + 8)  # scores and weights
    return ring * _bytes_of_row(shape) + scores + keys * (2 * WARPS + 2 * 4) + 4 * heads * (4 + WARPS) + 4 * WARPS


def _bytes_of_row(shape: AttentionShape) -> int:
    """Returns the bytes of shared memory for one row and its entry."""
    return 4 + (RANK + 16 + 2 * ROPE if shape.fp8 else 2 * (RANK + ROPE) + 16)
