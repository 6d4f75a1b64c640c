"""Selects the k best scores of each query in CUDA C++, in one launch, for Hopper: constants and launch shape."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.fast_path import is_hopper
from hotset.kernels.index_topk.scores import CONTEXT_MULTIPLE, Scores

SOURCE = Path(__file__).with_name("select.cu")
# Blocks that share a query, and the number of queries up to which this is faster than fewer blocks. A block fills a
# multiprocessor, and a cluster has to fit in one part of the GPU, which has 16 or 18 multiprocessors.
CLUSTERS = {8: 8, 4: 24, 3: 40, 2: 64, 1: 1 << 30}
SHORT, MAX_SHORT_CLUSTER = 64 << 10, 4  # if no context is longer than SHORT, clusters have at most this many blocks
WORD_BITS = 32  # a thread has a bit for each of its scores
MAX_WORDS = 8  # words of such bits per thread
WARP_SCORES = 128  # scores that a warp reads at a time
MAX_HELD_BYTES = 192 << 10  # of scores in shared memory; the rest of a block's 227 KiB is for lists and bins


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Parameters of the kernel that affect only speed."""

    threads: int = 1024
    bins: int = 1024

    @property
    def shared_bytes(self) -> int:
        """The size of `Shared` in select.cu, rounded up."""
        words = self.bins + 4 * self.threads + 3 * (self.threads // 32) + 16
        return ceil_div(4 * words, 128) * 128

    def words(self, context: int, cluster: int) -> int:
        """Returns the number of words with a bit for each score of a thread."""
        groups = ceil_div(context, cluster * self.threads * WARP_SCORES // 32)
        return ceil_div(groups * WARP_SCORES // 32, WORD_BITS)


TUNED = BlockShape()
MAX_CONTEXT = max(CLUSTERS) * TUNED.threads * MAX_WORDS * WORD_BITS


def supports(device: torch.device, limit: int) -> bool:
    """Returns whether the kernel can select from scores of contexts of up to `limit` positions on this device."""
    return is_hopper(device) and limit <= MAX_CONTEXT


def select(
    scores: Scores,
    seats: Tensor,
    positions: Tensor,
    k: int,
    out: Tensor,
    *,
    limit: int | None = None,
    shape: BlockShape = TUNED,
    cluster: int | None = None,
    max_held_bytes: int = MAX_HELD_BYTES,
) -> None:
    """Does the same as `triton_impl.select`.

    `limit` is the length of the longest context of any call, by default that of this one. The kernel is compiled for
    it, so that contexts of other lengths compile nothing. `cluster`: blocks that share a query; by default, the fastest
    number.
    """
    values = scores.values
    queries, context = values.shape
    if context % CONTEXT_MULTIPLE != 0:
        raise InternalError(f"{context} scores per query are not a multiple of {CONTEXT_MULTIPLE}")
    if not out.is_contiguous():
        raise InternalError(f"the output must be contiguous, but has strides {out.stride()}")
    limit = max(limit or 0, context)
    cluster = cluster or _cluster(queries, limit, shape)
    words = shape.words(limit, cluster)
    share = ceil_div(context, cluster * shape.threads * WARP_SCORES // 32) * shape.threads * WARP_SCORES // 32
    capacity = min(share, max_held_bytes // 4 // WARP_SCORES * WARP_SCORES)
    kernel = cuda_source.kernel(
        SOURCE,
        "select_best",
        THREADS=shape.threads,
        CLUSTER=cluster,
        WORDS=words,
        BINS=shape.bins,
        SHARED_BYTES=shape.shared_bytes,
    )
    kernel.launch(
        LaunchShape(queries * cluster, shape.threads, shape.shared_bytes + 4 * capacity, dependent_launch=True),
        values,
        seats.contiguous(),
        positions.contiguous(),
        scores.moments,
        scores.shares,
        out,
        context,
        scores.moments.shape[1],
        k,
        capacity,
    )


def _cluster(queries: int, limit: int, shape: BlockShape) -> int:
    """Returns the number of blocks that share a query."""
    largest = MAX_SHORT_CLUSTER if limit <= SHORT else max(CLUSTERS)
    fitting = [size for size in CLUSTERS if size <= largest and shape.words(limit, size) <= MAX_WORDS]
    return next((size for size in fitting if queries <= CLUSTERS[size]), min(fitting))
