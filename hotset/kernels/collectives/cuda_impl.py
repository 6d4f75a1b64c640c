"""The collectives in CUDA C++: buffers, launch shapes, and the choice between one and two shots.

Every function must be called by all ranks with the same sizes, in the same order. A call only enqueues kernels on the
current stream, and a graph can capture it. If `abort` is set, kernels end without waiting, and results are undefined.

A block waits until the same block of all other ranks has run. On a GPU that several ranks share, all these blocks must
be resident at the same time, and other kernels must still have room to compute the data that these blocks wait for. All
ranks of a GPU together therefore use at most `BLOCKS_PER_GPU` blocks. Each occupies at most one multiprocessor, of
which an H200 has 132. The processes must run at the same time, which requires the multi-process service (MPS).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape

REDUCE, GATHER, STAGES = (Path(__file__).with_name(f"{name}.cu") for name in ("reduce", "gather", "stages"))
MAX_RANKS = 16
BLOCKS_PER_GPU = 32
THREADS = 512
ROUND_BYTES = 2 << 20  # of one rank's data in one round of an exchange; larger messages take several rounds
SEND_BYTES = 512 << 10  # of data in one round of `send` and `receive`
BYTES_PER_BLOCK = 8 << 10  # a smaller message uses fewer blocks: each thread copies 16 bytes at a time
# One shot reads `size` times the message on every rank, two shots read it twice but wait once more. Together the ranks
# read size * (size - 2) * bytes more with one shot. Up to this number of bytes, that takes less time than the wait.
ONE_SHOT_EXTRA_BYTES = 6 << 20
FLAG_BYTES = 128  # as in channel.cu
COUNTERS = 4  # as in stages.cu
TENSORS = 4  # of one launch, as in gather.cu
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging buffers of a group of ranks, as one of them sees them.

    Each rank has a buffer of `staging_bytes` bytes that is zero before any rank's first call. Calls on one `Staging`
    must be on one stream, or ordered by events.
    """

    buffers: Tensor  # [size] int64: the address of each rank's buffer, in this rank's address space
    rank: int
    abort: Tensor  # [1] int32, readable by host and device
    blocks: int = BLOCKS_PER_GPU  # at most this many in a launch; the same on all ranks
    slot_bytes: int = ROUND_BYTES // BLOCKS_PER_GPU  # per block; a multiple of 16 * size
    threads: int = THREADS
    bytes_per_block: int = BYTES_PER_BLOCK
    memory: object = None  # keeps this rank's buffer allocated

    @property
    def size(self) -> int:
        return len(self.buffers)


def blocks_of_a_rank(ranks_on_gpu: int) -> int:
    return max(1, BLOCKS_PER_GPU // ranks_on_gpu)


def slot_bytes(round_bytes: int, blocks: int, size: int) -> int:
    """Returns the bytes of a slot, so that the slots of all blocks hold about `round_bytes`."""
    return round_bytes // blocks // (16 * size) * (16 * size)


def staging_bytes(blocks: int, slot_bytes: int) -> int:
    return blocks * (FLAG_BYTES + 2 * slot_bytes)


def inbox_bytes(blocks: int, slot_bytes: int, size: int) -> int:
    return blocks * (COUNTERS * FLAG_BYTES + 2 * size * slot_bytes)


def all_reduce(staging: Staging, x: Tensor) -> None:
    """Replaces the contiguous `x` with the sum over all ranks."""
    if x.numel() == 0:
        return
    extra = staging.size * (staging.size - 2) * x.nbytes
    name = "all_reduce_one_shot" if extra <= ONE_SHOT_EXTRA_BYTES else "all_reduce_two_shot"
    blocks, chunk = _divide(staging, x.nbytes, staging.slot_bytes)
    _launch(staging, REDUCE, name, blocks, x, x, x.numel(), chunk // x.element_size(), element=_element(x))


def reduce_scatter(staging: Staging, x: Tensor, tokens_per_rank: Sequence[int]) -> Tensor:
    """Returns the sum over all ranks of this rank's tokens. `x` [all tokens, width] is contiguous."""
    width, most = x[:1].numel(), max(tokens_per_rank)
    out = x.new_empty(tokens_per_rank[staging.rank], *x.shape[1:])
    longest = most * width
    if longest == 0:
        return out
    blocks, chunk = _divide(staging, longest * x.element_size(), staging.slot_bytes // staging.size)
    sizes = (width, longest, chunk // x.element_size(), *_packed(tokens_per_rank))
    _launch(staging, REDUCE, "reduce_scatter", blocks, x, out, *sizes, element=_element(x))
    return out


def all_gather_columns(staging: Staging, x: Tensor) -> Tensor:
    """Returns [tokens, size * width]. `x` [tokens, width] is contiguous."""
    tokens, width = x.shape
    out = x.new_empty(tokens, staging.size * width)
    # A kernel counts up to 4 GiB. Larger messages are gathered in several parts.
    rows = max(1, (1 << 31) // max(1, x[:1].nbytes))
    for first in range(0, tokens if width else 0, rows):
        some = x[first : first + rows]
        blocks, chunk = _divide(staging, some.nbytes, staging.slot_bytes)
        _launch(staging, GATHER, "gather_columns", blocks, some, out[first:], some.nbytes, some[:1].nbytes, chunk)
    return out


def all_gather_tokens(staging: Staging, tensors: Sequence[Tensor], tokens_per_rank: Sequence[int]) -> list[Tensor]:
    """Returns each of the contiguous `tensors` of all ranks, concatenated in the order of the ranks. Up to `TENSORS`
    tensors need one launch."""
    total, most = sum(tokens_per_rank), max(tokens_per_rank)
    outs = [x.new_empty(total, *x.shape[1:]) for x in tensors]
    for first in range(0, len(tensors), TENSORS):
        pairs = list(zip(tensors, outs, strict=True))[first : first + TENSORS]
        row_bytes = [out[:1].nbytes for _, out in pairs]
        if most * sum(row_bytes) == 0:
            continue
        usable = staging.slot_bytes - 16 * TENSORS  # chunks are rounded up to 16 bytes
        blocks, _ = _divide(staging, most * sum(row_bytes), usable)
        rounds = ceil_div(most * sum(row_bytes), blocks * usable)
        arguments: list[Tensor | int] = []
        for (x, out), row in zip(pairs, row_bytes, strict=True):
            arguments += [x, out, row, _round_up(ceil_div(most * row, rounds * blocks), 16)]
        arguments += [0] * (4 * (TENSORS - len(pairs)))
        _launch(staging, GATHER, "gather_tokens", blocks, *arguments, rounds, *_packed(tokens_per_rank))
    return outs


def broadcast(staging: Staging, x: Tensor) -> Tensor:
    """Returns rank 0's `x`. The contiguous `x` of the other ranks has the same shape and is ignored."""
    (of_rank_0,) = all_gather_tokens(staging, [x.view(1, -1)], [1] + [0] * (staging.size - 1))
    return of_rank_0.view(x.shape)


def barrier(staging: Staging) -> None:
    """Later work on this stream begins after all ranks have reached this call."""
    _launch(staging, GATHER, "barrier", 1)


def send(inboxes: Staging, x: Tensor, to: int) -> None:
    """Sends the contiguous `x` to rank `to`, which calls `receive`. `inboxes` are buffers of `inbox_bytes` bytes, used
    for `send` and `receive` only. Waits if the receiver is far behind."""
    _transfer(inboxes, "send", x, to)


def receive(inboxes: Staging, x: Tensor, source: int) -> None:
    """Fills the contiguous `x` with the next tensor that rank `source` sends to this rank."""
    _transfer(inboxes, "receive", x, source)


def _transfer(inboxes: Staging, name: str, x: Tensor, peer: int) -> None:
    if x.numel() == 0:
        return
    blocks, chunk = _divide(inboxes, x.nbytes, inboxes.slot_bytes)
    arguments = (x, x.nbytes, chunk, peer, inboxes.buffers, inboxes.rank, inboxes.blocks, inboxes.slot_bytes)
    kernel = cuda_source.kernel(STAGES, name, RANKS=inboxes.size, THREADS=inboxes.threads)
    kernel.launch(LaunchShape(blocks, inboxes.threads), *arguments, inboxes.abort)


def _launch(
    staging: Staging, source: Path, name: str, blocks: int, *arguments: Tensor | int, element: int | None = None
) -> None:
    kernel = partial(cuda_source.kernel, source, name, RANKS=staging.size, THREADS=staging.threads)
    common = (staging.buffers, staging.rank, staging.slot_bytes, staging.abort)
    (kernel() if element is None else kernel(ELEMENT=element)).launch(
        LaunchShape(blocks, staging.threads), *arguments, *common
    )


def _divide(staging: Staging, nbytes: int, most: int) -> tuple[int, int]:
    """Returns the number of blocks for a message, and the bytes of it per block and round: at most `most`, a multiple
    of 16."""
    blocks = min(staging.blocks, ceil_div(nbytes, staging.bytes_per_block))
    return blocks, min(most // 16 * 16, _round_up(ceil_div(nbytes, blocks), 16))


def _packed(tokens_per_rank: Sequence[int]) -> list[int]:
    """Packs the counts of up to MAX_RANKS ranks, two in each of 8 words."""
    counts = [*tokens_per_rank, *[0] * (MAX_RANKS - len(tokens_per_rank))]
    return [counts[i] | counts[i + 1] << 32 for i in range(0, MAX_RANKS, 2)]


def _element(x: Tensor) -> int:
    if x.dtype not in ELEMENTS:
        raise ConfigError(f"sums over ranks support {', '.join(map(str, ELEMENTS))}, not {x.dtype}")
    return ELEMENTS[x.dtype]


def _round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple
