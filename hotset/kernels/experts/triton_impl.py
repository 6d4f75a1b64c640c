"""experts in Triton: sort the pairs by expert, two products, a weighted sum. No synchronisation with the host.

There are four launches, or five if the pairs do not fit into one chunk of the sort.

A pair is one (token, expert of this token); pair p belongs to token p // k. `_sort_kernel` sorts the pairs by expert
and divides the sorted pairs of each expert into blocks. A program of a product computes one tile of outputs for one
block. Programs with the same tile of outputs and neighbouring blocks run next to each other, so the weights of an
expert with several blocks are read from memory once. The products are computed as weight @ tokens^T: the weight is the
tall operand, so Hopper's wide matrix instructions can also be used for blocks of 16 pairs. No sum crosses programs, so
a token gets the same bits in all batches that use the same `Tiles`. The `Tiles` depend on the dtype and on the mean
number of pairs per expert.

With MIN_TORCH_PAIRS or more pairs per expert on average, the products are bound by arithmetic. Then torch's
grouped product is used instead, if it supports the dtype and the sizes. A single token has kernels of its own
(`triton_one_token.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, let_next_launch_start, wait_for_previous_launch
from hotset.kernels.experts import triton_one_token
from hotset.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program of a product. It computes `outputs` outputs of each pair of a block.

    It adds `inputs` terms of each sum at a time.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The number of pairs in a block, and the tile of each product."""

    block_pairs: int
    gate_up: Tile  # a program computes `outputs` outputs of gate and the same number of up
    down: Tile


# The key of an entry is the largest mean number of pairs per expert for which the entry is used. A multiprocessor needs
# about 40 KB of weights in flight. It runs two of these programs at a time, each with 32 KB or more in flight.
TILES = {
    8: Tiles(16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    20: Tiles(32, Tile(64, 64, 4, 5), Tile(128, 64, 4, 5)),
    56: Tiles(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    1 << 62: Tiles(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
}
FLOAT32_TILES = Tiles(16, Tile(32, 32, 4, 3), Tile(32, 32, 4, 3))
MIN_TORCH_PAIRS = 96  # mean pairs per expert from which on torch's grouped product is faster
# Pairs per chunk of the sort: the smallest size that holds all pairs, or else the last. The sort has a program for each
# chunk and each of 33 bins (32 experts and EMPTY). The last size results in 132 programs for 16,384 pairs, one for each
# multiprocessor of an H200, and in 1,056 for 131,072. It is not smaller because every program reads the counts of all
# chunks: of 131,072 pairs in chunks of 2,048, it would read as many bytes of counts as of pairs (16 KB each).
CHUNK_SIZES = (256, 1024, 4096)
SUM_BLOCK = 2048  # values of a token that one program of the weighted sum computes
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns if this is not set
# Products are not launched early. Their programs would not be spread evenly over the multiprocessors, because some
# still run programs of the launch before.
SMALL_OPTIONS = OPTIONS | EARLY_LAUNCH

_EMPTY = tl.constexpr(EMPTY)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs, sorted by expert. EMPTY pairs come after the pairs of all experts and are in no block.

    A block has `block_pairs` consecutive pairs of one expert; the last block of an expert may have fewer.
    """

    pairs: Tensor  # [pairs] int32: the pair at each sorted index
    sorted_index: Tensor  # [pairs] int32: the sorted index of each pair
    ends: Tensor  # [experts] int32: the sorted index after each expert's last pair
    block_expert: Tensor  # [blocks] int32, EMPTY-padded at the end
    block_first: Tensor  # [blocks] int32: the sorted index of each block's first pair
    num_blocks: Tensor  # [1] int32: the number of blocks, without the padding


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    pairs_per_expert: int,
    first_expert: int = 0,
) -> Tensor:
    if triton_one_token.supports(x, down):
        return triton_one_token.experts(x, expert_ids, weights, gate_up, down, first_expert)
    if pairs_per_expert >= MIN_TORCH_PAIRS and supports_grouped_mm(x, down):
        return experts_by_torch(x, expert_ids, weights, gate_up, down, first_expert)
    tiles = tiles_for(x.dtype, pairs_per_expert)
    return experts_in_tiles(x, expert_ids, weights, gate_up, down, tiles, first_expert)


def tiles_for(dtype: torch.dtype, pairs_per_expert: int) -> Tiles:
    if dtype == torch.float32:
        return FLOAT32_TILES
    return next(tiles for max_pairs, tiles in TILES.items() if pairs_per_expert <= max_pairs)


def supports_grouped_mm(x: Tensor, down: Tensor) -> bool:
    """torch's grouped product requires bf16, and hidden and width must be multiples of 16 bytes."""
    return x.dtype == torch.bfloat16 and down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0


def experts_in_tiles(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tiles: Tiles,
    first_expert: int = 0,
) -> Tensor:
    _, hidden, width = down.shape
    by_expert = sort_by_expert(expert_ids, gate_up.shape[0], tiles.block_pairs, first_expert)
    x = x if x.stride(1) == 1 else x.contiguous()
    # Both tensors have one vector per pair, in sorted order.
    activation = torch.empty(expert_ids.numel(), width, dtype=x.dtype, device=x.device)
    results = torch.empty(expert_ids.numel(), hidden, dtype=x.dtype, device=x.device)
    blocks = {"block_expert": by_expert.block_expert, "block_first": by_expert.block_first, "ends": by_expert.ends}
    sizes = {"hidden": hidden, "width": width, "block_pairs": tiles.block_pairs}
    _gate_up_kernel[_grid(by_expert, width, tiles.gate_up)](
        x=x,
        gate_up=gate_up.contiguous(),
        pairs=by_expert.pairs,
        **blocks,
        activation=activation,
        x_stride=x.stride(0),
        k=expert_ids.shape[1],
        **sizes,
        **_tile_options(tiles.gate_up),
    )
    _down_kernel[_grid(by_expert, hidden, tiles.down)](
        activation=activation,
        down=down.contiguous(),
        **blocks,
        results=results,
        **sizes,
        **_tile_options(tiles.down),
    )
    return weighted_sum(results, by_expert, weights)


def experts_by_torch(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, first_expert: int = 0
) -> Tensor:
    by_expert = sort_by_expert(expert_ids, gate_up.shape[0], expert_ids.numel(), first_expert)
    gathered = x.index_select(0, by_expert.pairs // expert_ids.shape[1])
    activation = swiglu(F.grouped_mm(gathered, gate_up.transpose(1, 2), offs=by_expert.ends))
    results = F.grouped_mm(activation, down.transpose(1, 2), offs=by_expert.ends)
    return weighted_sum(results, by_expert, weights)


def _grid(by_expert: SortedPairs, outputs: int, tile: Tile) -> tuple[int, int]:
    return by_expert.block_expert.shape[0], triton.cdiv(outputs, tile.outputs)


def _tile_options(tile: Tile) -> dict[str, Any]:
    sizes = {"tile_out": tile.outputs, "tile_in": tile.inputs}
    return sizes | {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS


def sort_by_expert(
    expert_ids: Tensor,  # [tokens, k]; ids outside [first_expert, first_expert + experts) count as EMPTY
    experts: int,
    block_pairs: int,
    first_expert: int = 0,
) -> SortedPairs:
    pairs = expert_ids.numel()
    # This bounds the number of blocks: each expert in use has at least one pair and one block, and every further block
    # needs `block_pairs` more pairs.
    used = min(experts, pairs)
    blocks = used + (pairs - used) // block_pairs

    def empty(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=expert_ids.device)

    by_expert = SortedPairs(
        pairs=empty(pairs),
        sorted_index=empty(pairs),
        ends=empty(experts),
        block_expert=empty(blocks),
        block_first=empty(blocks),
        num_blocks=empty(1),
    )
    chunk = next((size for size in CHUNK_SIZES if size >= pairs), CHUNK_SIZES[-1])
    chunks, bins = triton.cdiv(pairs, chunk), max(32, triton.next_power_of_2(experts + 1))
    expert_ids = expert_ids.contiguous()
    sizes = {"num_pairs": pairs, "first_expert": first_expert, "experts": experts, "bins": bins, "chunk": chunk}
    options = {"num_warps": min(16, max(4, chunk // 256))} | SMALL_OPTIONS
    chunk_counts = by_expert.pairs  # not read if there is one chunk
    if chunks > 1:
        chunk_counts = empty(chunks * bins)
        _count_pairs_kernel[(chunks,)](expert_ids=expert_ids, chunk_counts=chunk_counts, **sizes, **options)
    _sort_kernel[(experts + 1, chunks)](
        expert_ids=expert_ids,
        chunk_counts=chunk_counts,
        pairs=by_expert.pairs,
        sorted_index=by_expert.sorted_index,
        ends=by_expert.ends,
        block_expert=by_expert.block_expert,
        block_first=by_expert.block_first,
        num_blocks=by_expert.num_blocks,
        blocks=blocks,
        block_pairs=block_pairs,
        one_chunk=chunks == 1,
        **sizes,
        **options,
    )
    return by_expert


def weighted_sum(results: Tensor, by_expert: SortedPairs, weights: Tensor) -> Tensor:
    """Returns [tokens, hidden]: the weighted sum over each token's pairs, computed in float32.

    `results` [pairs, hidden] is in sorted order.
    """
    (tokens, k), hidden = weights.shape, results.shape[1]
    out = torch.empty(tokens, hidden, dtype=results.dtype, device=results.device)
    _sum_kernel[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
        results=results,
        sorted_index=by_expert.sorted_index,
        ends=by_expert.ends,
        weights=weights.contiguous(),
        out=out,
        experts=by_expert.ends.numel(),
        hidden=hidden,
        k=k,
        block=SUM_BLOCK,
        num_warps=4,
        **SMALL_OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])  # type: ignore[untyped-decorator]
def _count_pairs_kernel(
    expert_ids: tl.tensor,
    chunk_counts: tl.tensor,
    num_pairs: tl.tensor,
    first_expert: tl.tensor,
    experts: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Counts the pairs of each expert in one chunk. The bin after the last expert counts pairs without an expert."""
    wait_for_previous_launch()
    pair = tl.program_id(0) * chunk + tl.arange(0, chunk)
    counts = tl.histogram(_expert_of(expert_ids, pair, num_pairs, first_expert, experts), bins)
    tl.store(chunk_counts + tl.program_id(0) * bins + tl.arange(0, bins), counts)


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "blocks", "block_pairs"])  # type: ignore[untyped-decorator]
def _sort_kernel(
    expert_ids: tl.tensor,
    chunk_counts: tl.tensor,  # [chunks, bins] int32, written by `_count_pairs_kernel`; not read if `one_chunk`
    pairs: tl.tensor,
    sorted_index: tl.tensor,
    ends: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    num_blocks: tl.tensor,
    num_pairs: tl.tensor,
    first_expert: tl.tensor,
    blocks: tl.tensor,
    block_pairs: tl.tensor,
    one_chunk: tl.constexpr,
    experts: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Sorts the pairs. Each program sorts the pairs of one expert in one chunk.

    The programs of the bin after the last expert sort the EMPTY pairs. Those of the first chunk also divide the pairs
    of their expert into blocks or, in the last bin, count the blocks and pad `block_expert`.
    """
    wait_for_previous_launch()
    own_bin, own_chunk = tl.program_id(0), tl.program_id(1)
    pair = own_chunk * chunk + tl.arange(0, chunk)
    expert = _expert_of(expert_ids, pair, num_pairs, first_expert, experts)
    bin_number = tl.arange(0, bins)
    if one_chunk:
        counts = tl.histogram(expert, bins)
        earlier = tl.zeros([bins], tl.int32)
    else:
        counts, earlier = _sum_counts(chunk_counts, own_chunk, tl.num_programs(1), bins, chunk)
    before = bin_number < own_bin
    first = tl.sum(tl.where(before, counts, 0), 0)
    if own_chunk == 0:
        first_block = tl.sum(tl.where(before, (counts + block_pairs - 1) // block_pairs, 0), 0)
        if own_bin < experts:
            end = first + tl.sum(tl.where(bin_number == own_bin, counts, 0), 0)
            tl.store(ends + own_bin, end)
            own_blocks = tl.cdiv(end - first, block_pairs)
            for start in range(0, own_blocks, chunk):
                block = start + tl.arange(0, chunk)
                tl.store(block_expert + first_block + block, own_bin, mask=block < own_blocks)
                tl.store(block_first + first_block + block, first + block * block_pairs, mask=block < own_blocks)
        else:
            tl.store(num_blocks, first_block)
            for start in range(first_block, blocks, chunk):
                block = start + tl.arange(0, chunk)
                tl.store(block_expert + block, _EMPTY, mask=block < blocks)
    own = (expert == own_bin) & (pair < num_pairs)
    first += tl.sum(tl.where(bin_number == own_bin, earlier, 0), 0)
    index = first + tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(pairs + index, pair, mask=own)
    tl.store(sorted_index + pair, index, mask=own)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_counts(
    chunk_counts: tl.tensor, own_chunk: tl.tensor, chunks: tl.tensor, bins: tl.constexpr, chunk: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the number of pairs of each bin in all chunks, and in the chunks before `own_chunk`."""
    rows: tl.constexpr = chunk // bins  # as many counts at a time as a chunk has pairs
    counts = tl.zeros([rows, bins], tl.int32)
    earlier = tl.zeros([rows, bins], tl.int32)
    for start in range(0, chunks, rows):
        row = (start + tl.arange(0, rows))[:, None]
        tile = tl.load(chunk_counts + row * bins + tl.arange(0, bins)[None, :], mask=row < chunks, other=0)
        counts += tile
        earlier += tl.where(row < own_chunk, tile, 0)
    return tl.sum(counts, 0), tl.sum(earlier, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_of(
    expert_ids: tl.tensor, pair: tl.tensor, num_pairs: tl.tensor, first_expert: tl.tensor, experts: tl.constexpr
) -> tl.tensor:
    """Returns the index of each pair's expert as int32, or `experts` if the pair is EMPTY or beyond `num_pairs`."""
    expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=_EMPTY).to(tl.int32) - first_expert
    return tl.where((expert >= 0) & (expert < experts), expert, experts)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    pairs: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    activation: tl.tensor,
    x_stride: tl.tensor,
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    block_pairs: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert == _EMPTY:
        return
    index = tl.load(block_first + tl.program_id(0)) + tl.arange(0, block_pairs)
    inside = index < tl.load(ends + expert)
    token = tl.load(pairs + index, mask=inside, other=0) // k
    output = tl.program_id(1) * tile_out + tl.arange(0, tile_out)
    # A tile may extend beyond the last output. These extra outputs read the weights of the first outputs, so that the
    # loads need no mask. They are not stored.
    entry = tl.arange(0, tile_in)
    gate_at = gate_up + expert * (2 * width * hidden) + (output % width)[:, None] * hidden + entry[None, :]
    up_at = gate_at + width * hidden
    x_at = x + token.to(tl.int64)[:, None] * x_stride + entry[None, :]
    gate = tl.zeros([tile_out, block_pairs], tl.float32)
    up = tl.zeros([tile_out, block_pairs], tl.float32)
    for start in range(0, hidden, tile_in):
        if hidden % tile_in == 0:
            gate_tile = tl.load(gate_at + start)
            up_tile = tl.load(up_at + start)
            x_tile = tl.load(x_at + start, mask=inside[:, None], other=0)
        else:
            in_range = (start + entry < hidden)[None, :]
            gate_tile = tl.load(gate_at + start, mask=in_range, other=0)
            up_tile = tl.load(up_at + start, mask=in_range, other=0)
            x_tile = tl.load(x_at + start, mask=inside[:, None] & in_range, other=0)
        gate = tl.dot(gate_tile, tl.trans(x_tile), gate, input_precision="tf32x3")
        up = tl.dot(up_tile, tl.trans(x_tile), up, input_precision="tf32x3")
    value = tl.trans(gate * tl.sigmoid(gate) * up).to(activation.dtype.element_ty)
    target = activation + index.to(tl.int64)[:, None] * width + output[None, :]
    tl.store(target, value, mask=inside[:, None] & (output < width)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(
    activation: tl.tensor,
    down: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    results: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    block_pairs: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    let_next_launch_start()
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert == _EMPTY:
        return
    index = tl.load(block_first + tl.program_id(0)) + tl.arange(0, block_pairs)
    inside = index < tl.load(ends + expert)
    output = tl.program_id(1) * tile_out + tl.arange(0, tile_out)
    entry = tl.arange(0, tile_in)
    down_at = down + expert * (hidden * width) + (output % hidden)[:, None] * width + entry[None, :]
    activation_at = activation + index.to(tl.int64)[:, None] * width + entry[None, :]
    result = tl.zeros([tile_out, block_pairs], tl.float32)
    for start in range(0, width, tile_in):
        if width % tile_in == 0:
            down_tile = tl.load(down_at + start)
            activation_tile = tl.load(activation_at + start, mask=inside[:, None], other=0)
        else:
            in_range = (start + entry < width)[None, :]
            down_tile = tl.load(down_at + start, mask=in_range, other=0)
            activation_tile = tl.load(activation_at + start, mask=inside[:, None] & in_range, other=0)
        result = tl.dot(down_tile, tl.trans(activation_tile), result, input_precision="tf32x3")
    target = results + index.to(tl.int64)[:, None] * hidden + output[None, :]
    tl.store(target, tl.trans(result).to(results.dtype.element_ty), mask=inside[:, None] & (output < hidden)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(
    results: tl.tensor,
    sorted_index: tl.tensor,
    ends: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * block + tl.arange(0, block)
    used = tl.load(ends + experts - 1)  # EMPTY pairs come after the pairs of the last expert
    # All results are requested before the first one is used. No time is spent on EMPTY pairs after that.
    indices = (tl.load(sorted_index + token * k),)
    for j in tl.static_range(1, k):
        indices += (tl.load(sorted_index + token * k + j),)  # type: ignore[assignment]
    values = (_load_result(results, indices[0], used, entry, hidden),)
    for j in tl.static_range(1, k):
        values += (_load_result(results, indices[j], used, entry, hidden),)  # type: ignore[assignment]
    total = tl.zeros([block], tl.float32)
    for j in tl.static_range(k):
        if indices[j] < used:
            total += tl.load(weights + token * k + j).to(tl.float32) * values[j].to(tl.float32)
    tl.store(out + token * hidden + entry, total.to(out.dtype.element_ty), mask=entry < hidden)


@triton.jit  # type: ignore[untyped-decorator]
def _load_result(
    results: tl.tensor, index: tl.tensor, used: tl.tensor, entry: tl.tensor, hidden: tl.constexpr
) -> tl.tensor:
    """Returns values of the result at a sorted index, without reading it if the pair is EMPTY."""
    inside = entry < tl.where(index < used, hidden, 0)
    return tl.load(results + index.to(tl.int64) * hidden + entry, mask=inside, other=0)
