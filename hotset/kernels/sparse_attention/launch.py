"""How sparse_attention is cut into programs on a GPU. Everything that was tuned stands here."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from hotset.base.units import ceil_div

Kernel = Literal["triton", "gluon", "cuda"]

RANK, ROPE = 512, 64  # what the kernels for Hopper are written for
GLUON_HEADS, GLUON_KEYS = 64, 128  # of a program of the Gluon kernel, and of one turn of its loop
MAX_SPLITS = 32  # that the merge can join
# By these the number of splits is decided; they explain times of an H200. Keys stand for the time that a program which
# has a multiprocessor for itself takes for as many.
TWO_AT_ONCE = 1.7  # times as long take two programs that share a multiprocessor
PROGRAM_KEYS = 2048  # of one head: a program before its first key and after its last
SUMS_KEYS = 0.75  # the sums of one head, stored by a program and read by the merge
MERGE_KEYS = 96  # the merge otherwise


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one call."""

    queries: int
    heads: int
    k: int
    rank: int
    rope: int
    fp8: bool


@dataclass(frozen=True, slots=True)
class GpuTraits:
    multiprocessors: int
    hopper: bool  # and a Triton that has the Gluon of gluon_impl


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One way to run a call: a program takes one query row, `block_heads` of its heads and one split of its keys."""

    kernel: Kernel
    block_heads: int
    block_keys: int  # in a tile
    warps: int = 8
    stages: int = 2  # tiles of rows in shared memory: in Triton; Gluon has two, CUDA C++ as many rows as fit
    programs_per_sm: int = 1  # that are resident together
    splits: int = 1

    def programs(self, shape: AttentionShape) -> int:
        return shape.queries * ceil_div(shape.heads, self.block_heads) * self.splits

    def split_keys(self, shape: AttentionShape) -> int:
        """Keys of every split but the last: whole tiles."""
        return ceil_div(ceil_div(shape.k, self.splits), self.block_keys) * self.block_keys

    def every_split_has_entries(self, shape: AttentionShape) -> bool:
        """Every split has an entry."""
        return (self.splits - 1) * self.split_keys(shape) < shape.k


# By (fp8 rows, class of heads). HOPPER is for the sizes that production models have.
PORTABLE = {
    (False, 16): LaunchConfig("triton", 16, 32, warps=4, stages=3, programs_per_sm=2),
    (False, 32): LaunchConfig("triton", 32, 32, warps=8, stages=4),
    (False, 64): LaunchConfig("triton", 64, 32, warps=8, stages=3),
    (True, 16): LaunchConfig("triton", 16, 32, warps=4, stages=3, programs_per_sm=2),
    (True, 32): LaunchConfig("triton", 32, 32, warps=8, stages=3),
    (True, 64): LaunchConfig("triton", 64, 32, warps=8, stages=3),
}
HOPPER = {
    (False, 16): LaunchConfig("cuda", 16, 32, warps=4, programs_per_sm=2),
    (False, 32): LaunchConfig("cuda", 32, 32, warps=4, programs_per_sm=2),
    (False, 64): LaunchConfig("gluon", GLUON_HEADS, GLUON_KEYS),
    (True, 16): LaunchConfig("cuda", 16, 32, warps=4, programs_per_sm=2),
    (True, 32): LaunchConfig("cuda", 32, 32, warps=4, programs_per_sm=2),
    (True, 64): LaunchConfig("gluon", GLUON_HEADS, GLUON_KEYS),
}


@lru_cache(maxsize=1024)  # it is asked for in every layer
def choose_launch(shape: AttentionShape, gpu: GpuTraits) -> LaunchConfig:
    """The launch for this work. It depends on sizes alone, so a captured graph stays right."""
    heads = 16 if shape.heads <= 16 else 32 if shape.heads <= 32 else 64
    table = HOPPER if gpu.hopper and (shape.rank, shape.rope) == (RANK, ROPE) else PORTABLE
    return with_splits(table[shape.fp8, heads], shape, gpu)


def with_splits(launch: LaunchConfig, shape: AttentionShape, gpu: GpuTraits) -> LaunchConfig:
    """As many splits as make the busiest multiprocessor end soonest; of equals the fewest."""
    tried = (replace(launch, splits=splits) for splits in range(1, MAX_SPLITS + 1))
    return min((each for each in tried if each.every_split_has_entries(shape)), key=lambda at: _cost(at, shape, gpu))


def _cost(launch: LaunchConfig, shape: AttentionShape, gpu: GpuTraits) -> float:
    programs = ceil_div(launch.programs(shape), gpu.multiprocessors)  # of the busiest multiprocessor
    pairs, singles = divmod(programs, 2) if launch.programs_per_sm > 1 else (0, programs)
    keys = launch.split_keys(shape) + PROGRAM_KEYS // launch.block_heads
    attend = (pairs * TWO_AT_ONCE + singles) * keys
    return attend if launch.splits == 1 else attend + programs * launch.block_heads * SUMS_KEYS + MERGE_KEYS
