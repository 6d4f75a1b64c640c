"""Scores fp8 index keys of queries that share no context in CUDA C++, for Hopper: constants and launch shape."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape, float_bits
from hotset.kernels.fast_path import is_hopper, multiprocessors
from hotset.kernels.index_topk.scores import MAX_SPLITS, Scores
from hotset.kernels.rows import PagedRows

SOURCE = Path(__file__).with_name("score.cu")
HEAD_DIM = 128
ALIGN = 16  # bytes: of the copies
TILE, GROUP = 64, 32  # keys of a tile; heads per product
MAX_SHARED_BYTES = 227 << 10  # of a block on Hopper


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Parameters of the kernel that affect only speed."""

    stages: int  # tiles in shared memory: those in flight and the current ones
    warpgroups: int

    def __post_init__(self) -> None:
        if self.stages % self.warpgroups:
            raise InternalError(f"{self.stages} stages do not divide evenly between {self.warpgroups} warpgroups")

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 64


TUNED = {  # by groups of heads
    1: BlockShape(stages=8, warpgroups=4),
    2: BlockShape(stages=8, warpgroups=4),
    3: BlockShape(stages=12, warpgroups=3),
    4: BlockShape(stages=12, warpgroups=3),
}


def supports(q: Tensor, keys: PagedRows) -> bool:
    """Returns whether the kernel can score these keys on this device."""
    blocks = keys.blocks
    strides = [stride * blocks.element_size() for stride in blocks.stride()[:2]]
    return (
        keys.layout.quantised == HEAD_DIM
        and is_hopper(q.device)
        and not any(number % ALIGN for number in (blocks.data_ptr(), *strides))
    )


def score(
    q: Tensor,
    weights: Tensor,
    keys: PagedRows,
    seats: Tensor,
    positions: Tensor,
    context: int,
    k: int,
    scale: float,
    shape: BlockShape | None = None,
) -> Scores:
    """Returns the same as `triton_score.score`, up to rounding."""
    queries, heads, _ = q.shape
    blocks = keys.blocks
    parts, pages, block_rows, width = blocks.shape
    if not (blocks.stride(3) == 1 and blocks.stride(2) == width):
        raise InternalError(f"index keys must be adjacent: {blocks.stride()}")
    if q.stride(2) != 1 or q.data_ptr() % ALIGN or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.contiguous()
    groups = ceil_div(heads, GROUP)
    shape = shape or TUNED[groups]
    values = torch.empty(queries, context, dtype=torch.float32, device=q.device)
    most_tiles = queries * ceil_div(context, block_rows) * ceil_div(block_rows, TILE)
    num_blocks = min(multiprocessors(q.device), most_tiles, MAX_SPLITS)
    moments = torch.empty(queries, num_blocks, 2, dtype=torch.float32, device=q.device)
    shares = torch.empty(queries, dtype=torch.int32, device=q.device)
    shared_bytes = _shared_bytes(groups, shape)
    kernel = cuda_source.kernel(
        SOURCE,
        "score",
        GROUPS=groups,
        HALF=int(q.dtype == torch.float16),
        WARPGROUPS=shape.warpgroups,
        STAGES=shape.stages,
        BLOCK_ROWS=block_rows,
        PARTS=parts,
        STEP=keys.step,
        SHARED_BYTES=shared_bytes,
    )
    kernel.launch(
        LaunchShape(num_blocks, shape.threads, shared_bytes, dependent_launch=True),
        blocks,
        keys.table,
        seats.contiguous(),
        positions.contiguous(),
        queries,
        k,
        keys.table.stride(0),
        blocks.stride(1),
        blocks.stride(0),
        keys.first_part,
        *keys.table.shape,
        pages,
        q,
        weights.float().contiguous(),
        values,
        moments,
        shares,
        q.stride(0),
        q.stride(1),
        heads,
        context,
        num_blocks,
        float_bits(scale),
    )
    return Scores(values, moments, shares)


def _shared_bytes(groups: int, shape: BlockShape) -> int:
    """Returns the size of `Shared` in score.cu."""
    tiles = shape.stages * (TILE * (HEAD_DIM + 4) + 16)
    size = ceil_div(GROUP * groups * (HEAD_DIM + 4) + tiles + shape.warpgroups * 32 + 4, 1024) * 1024
    if size > MAX_SHARED_BYTES:
        raise InternalError(f"{shape} needs {size} bytes of shared memory, more than {MAX_SHARED_BYTES}")
    return size
