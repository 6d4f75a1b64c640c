"""sparse_attention in CUDA C++, for Hopper where few heads share the rows: constants and launch shapes."""

import struct
from pathlib import Path

from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.sparse_attention.launch import MAX_SPLITS, RANK, ROPE, AttentionShape, LaunchConfig

ATTEND, MERGE = (Path(__file__).with_name(name) for name in ("kernel.cu", "merge.cu"))
WARPS = 4
GROUP = 8  # rows that are waited for together
MAX_AHEAD = 128  # rows that can be asked for before the first step
SHARED_OF_SM, SHARED_OF_BLOCK, UNUSABLE = 228 << 10, 227 << 10, 1 << 10  # bytes; every block costs the last ones more


def attend(shape: AttentionShape, launch: LaunchConfig, tensors: tuple[Tensor, ...], scale: float) -> None:
    """As the kernel of triton_impl, for ranks and ropes of 512 and 64 and blocks of 16 or 32 heads."""
    assert (shape.rank, shape.rope, launch.warps) == (RANK, ROPE, WARPS), f"{launch} for {shape}"
    q, rows, row_ids, out, lse = tensors
    if q.data_ptr() % 8 or q.stride(0) % 4 or q.stride(1) % 4:  # it is read 8 bytes at a time
        q = q.contiguous()
    ring = _ring(shape, launch)
    shared_bytes = _shared_bytes(shape, launch, ring)
    kernel = cuda_source.kernel(
        ATTEND,
        "attend",
        FP8=int(shape.fp8),
        HEADS=launch.block_heads,
        KEYS=launch.block_keys,
        RING=ring,
        BLOCKS=launch.programs_per_sm,
        SHARED_BYTES=shared_bytes,
    )
    blocks = shape.queries * launch.splits * ceil_div(shape.heads, launch.block_heads)
    kernel.launch(
        LaunchShape(blocks, 32 * WARPS, shared_bytes),
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
        _bits(scale),
    )


def merge(shape: AttentionShape, launch: LaunchConfig, partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Joins the splits. May begin while `attend` ends, and waits for it."""
    assert launch.splits <= MAX_SPLITS, f"{launch.splits} splits: a warp weighs one in each lane"
    threads = shape.rank // 4
    kernel = cuda_source.kernel(MERGE, "merge", THREADS=threads)
    blocks = LaunchShape(shape.queries * shape.heads, threads, dependent_launch=True)
    kernel.launch(blocks, partial, lse, out, shape.heads, launch.splits)


def _ring(shape: AttentionShape, launch: LaunchConfig) -> int:
    """Rows that a block holds: as many as fit."""
    room = min(SHARED_OF_BLOCK, SHARED_OF_SM // launch.programs_per_sm - UNUSABLE) - _shared_bytes(shape, launch, 0)
    rows = min(room // _bytes_of_row(shape), launch.block_keys + MAX_AHEAD) // GROUP * GROUP
    assert rows >= 2 * launch.block_keys, f"{launch} leaves room for {rows} rows"
    return rows


def _shared_bytes(shape: AttentionShape, launch: LaunchConfig, ring: int) -> int:
    """Of `Shared` in rows.cu."""
    heads, keys = launch.block_heads, launch.block_keys
    scores = 4 * WARPS * heads * (keys + 8) + 2 * heads * (keys + 8)  # and weights
    return ring * _bytes_of_row(shape) + scores + keys * (2 * WARPS + 2 * 4) + 4 * heads * (4 + WARPS) + 4 * WARPS


def _bytes_of_row(shape: AttentionShape) -> int:
    """With its entry."""
    return 4 + (RANK + 16 + 2 * ROPE if shape.fp8 else 2 * (RANK + ROPE) + 16)


def _bits(value: float) -> int:
    """Of a float32: kernels take whole numbers only."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
