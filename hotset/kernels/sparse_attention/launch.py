"""Chooses how sparse_attention is split into programs on a GPU. The tuned launches and cost model are in this file."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from hotset.base.units import ceil_div

KernelKind = Literal["triton", "cuda", "warpgroup"]  # warpgroup: in CUDA C++, with the matrix instructions of Hopper

RANK, ROPE = 512, 64  # the only sizes that the kernels for Hopper support
WARPGROUP_HEADS, WARPGROUP_KEYS, WARPGROUP_WARPS = 64, 64, 12  # heads of a block, keys of a tile, warps of a block
MAX_SPLITS = 32  # limit of the merge
TWO_AT_ONCE = 1.7  # time of two programs that share a multiprocessor, relative to the time of one


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """The cost model of one kernel, which decides the number of splits. It reproduces times measured on an H200.

    The unit of cost is a key: the time in which a program that is alone on its multiprocessor processes one key. With
    64 heads, the warpgroup kernel takes about 0.032 us for a key in bf16, and 0.038 us in fp8.
    """

    program: float  # start-up of a program with one head; a program with n heads has 1/n of this
    sums: float  # storing the sums of one head and reading them in the merge
    split: float  # merging one more split
    merge: float  # the remaining cost of the merge


FEW_HEADS_COSTS = SplitCosts(program=2048, sums=0.75, split=0, merge=96)
MANY_HEADS_COSTS = {  # by fp8 rows
    False: SplitCosts(program=6400, sums=4.4, split=2, merge=125),
    True: SplitCosts(program=6400, sums=2.8, split=1.5, merge=190),
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one call of sparse_attention."""

    queries: int
    heads: int
    k: int
    rank: int
    rope: int
    fp8: bool


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The properties of a GPU that the choice of a launch depends on."""

    multiprocessors: int
    hopper: bool


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One way to run a call. A program processes one query, `block_heads` of its heads and one split of its keys."""

    kernel: KernelKind
    block_heads: int
    block_keys: int  # keys per iteration of the loop
    warps: int = 8
    stages: int = 2  # iterations whose rows are in shared memory; used only by the Triton kernel
    programs_per_sm: int = 1  # resident programs per multiprocessor
    splits: int = 1

    def programs(self, shape: AttentionShape) -> int:
        return shape.queries * ceil_div(shape.heads, self.block_heads) * self.splits

    def split_keys(self, shape: AttentionShape) -> int:
        """Returns the number of keys of every split but the last. It is a multiple of `block_keys`."""
        return ceil_div(ceil_div(shape.k, self.splits), self.block_keys) * self.block_keys

    def every_split_has_entries(self, shape: AttentionShape) -> bool:
        return (self.splits - 1) * self.split_keys(shape) < shape.k


# Both tables are indexed by (fp8 rows, heads per block). HOPPER is for rank 512 and rope 64, as in production models.
PORTABLE = {
    (False, 16): LaunchConfig("triton", 16, 32, warps=4, stages=3, programs_per_sm=2),
    (False, 32): LaunchConfig("triton", 32, 32, warps=8, stages=4),
    (False, 64): LaunchConfig("triton", 64, 32, warps=8, stages=3),
    (True, 16): LaunchConfig("triton", 16, 32, warps=4, stages=3, programs_per_sm=2),
    (True, 32): LaunchConfig("triton", 32, 32, warps=8, stages=3),
    (True, 64): LaunchConfig("triton", 64, 32, warps=8, stages=3),
}
WARPGROUP = LaunchConfig("warpgroup", WARPGROUP_HEADS, WARPGROUP_KEYS, warps=WARPGROUP_WARPS)
HOPPER = {
    (False, 16): LaunchConfig("cuda", 16, 32, warps=4, programs_per_sm=2),
    (False, 32): WARPGROUP,  # in large batches up to 1.3 times as fast, although half of its products are unused
    (False, 64): WARPGROUP,
    (True, 16): LaunchConfig("cuda", 16, 32, warps=4, programs_per_sm=2),
    (True, 32): LaunchConfig("cuda", 32, 32, warps=4, programs_per_sm=2),
    (True, 64): WARPGROUP,
}
# By fp8 rows: up to this many blocks of 16 heads are faster than blocks of 32 and 64. They begin sooner, and the GPU
# still has room for several splits of every block.
MAX_SMALL_BLOCKS = {False: 8, True: 16}


@lru_cache(maxsize=1024)  # every layer calls this
def choose_launch(shape: AttentionShape, gpu: GpuTraits) -> LaunchConfig:
    """Returns the launch for these sizes on this GPU. No tensor affects it, so a graph can capture the launch."""
    table = HOPPER if gpu.hopper and (shape.rank, shape.rope) == (RANK, ROPE) else PORTABLE
    small = table is HOPPER and shape.queries * ceil_div(shape.heads, 16) <= MAX_SMALL_BLOCKS[shape.fp8]
    heads = 16 if small or shape.heads <= 16 else 32 if shape.heads <= 32 else 64
    return with_splits(table[shape.fp8, heads], shape, gpu)


def with_splits(launch: LaunchConfig, shape: AttentionShape, gpu: GpuTraits) -> LaunchConfig:
    """Returns the launch with the number of splits that has the lowest cost. If several have it, the lowest number."""
    candidates = (replace(launch, splits=splits) for splits in range(1, MAX_SPLITS + 1))
    usable = (candidate for candidate in candidates if candidate.every_split_has_entries(shape))
    return min(usable, key=lambda candidate: cost(candidate, shape, gpu))


def cost(launch: LaunchConfig, shape: AttentionShape, gpu: GpuTraits) -> float:
    """Returns the time of the busiest multiprocessor plus that of the merge, in keys."""
    costs = MANY_HEADS_COSTS[shape.fp8] if launch.kernel == "warpgroup" else FEW_HEADS_COSTS
    programs = ceil_div(launch.programs(shape), gpu.multiprocessors)
    pairs, singles = divmod(programs, 2) if launch.programs_per_sm > 1 else (0, programs)
    attend = (pairs * TWO_AT_ONCE + singles) * (launch.split_keys(shape) + costs.program // launch.block_heads)
    if launch.splits == 1:
        return attend
    heads = launch.programs(shape) / gpu.multiprocessors * launch.block_heads
    return attend + heads * costs.sums + launch.splits * costs.split + costs.merge
