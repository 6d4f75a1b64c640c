"""sparse_attention in Gluon, for Hopper and more than 32 heads.

With blocks of 64 heads, the products are large enough for Hopper's warpgroup matrix instructions. Triton's compiler
does not keep the matrix units busy; Gluon allows us to schedule the instructions.

A program has two warpgroups, and two buffers for one tile of 64 rows each. While the scores of one tile are computed,
the next tile is loaded into the other buffer. The codes of fp8 rows are loaded into registers one step before they are
dequantised into a buffer. Both warpgroups share each product: of the scores, each computes half of the keys, and of the
sums, half of the latents.

Synchronisation: all threads write a tile, and the matrix units of both warpgroups read it, so every step ends with a
fence and a barrier. The compiler inserts the barriers for ordinary loads and stores of shared memory. It puts one
between any two uses of the same allocation. Therefore there are two allocations, and the loop body contains two steps,
instead of one indexed allocation. Every step waits for all its products, and there is no branch between a product
and its wait; otherwise ptxas serialises the products.

Order of loads: a load that is issued after those of a tile also completes after them, a microsecond later. Therefore
row ids are loaded at least one step before they are used. Which entries are EMPTY reaches the scores through shared
memory (`biases` or `units`).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.sparse_attention.gluon_tiles import (
    CODE_LAYOUT,
    FP8_ROPE_AT,
    PART,
    PART_LAYOUT,
    PLAIN_ROPE_AT,
    ROPE_LAYOUT,
    SCALE_LAYOUT,
    TILE_KEYS,
    TILE_RANK,
    TILE_ROPE,
    begin_copy,
    begin_copy_of_scales,
    bias_of,
    exponent_of,
    inverse_of,
    load_codes,
    load_row_ids,
    scales_to_ratios,
    store_dequantised,
    unit_of,
)
from hotset.kernels.sparse_attention.launch import GLUON_HEADS, RANK, ROPE, AttentionShape, LaunchConfig

VARYING = ["row_ids_stride", "k", "heads", "split_keys"]  # not specialised: they vary between calls
# Triton 3.6 has another name for this function.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_HEADS = gl.constexpr(GLUON_HEADS)
_SCAN = gl.constexpr(1024)  # entries inspected together to find the last one that is not EMPTY
_MIN_SCORE = gl.constexpr(-1.0e30)
_MIN_WEIGHT_SUM = gl.constexpr(1.0e-37)

_WIDE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_FLAT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # each warpgroup has half of the keys
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_BY_HEAD = gl.constexpr(gl.SliceLayout(1, _SCORES))
_BY_KEY = gl.constexpr(gl.SliceLayout(0, _SCORES))


def attend(shape: AttentionShape, launch: LaunchConfig, tensors: tuple[Tensor, ...], scale: float) -> None:
    """Launches the kernel for rank 512, rope 64 and blocks of 64 heads. `tensors`: see `Attend` in triton_impl."""
    if (shape.rank, shape.rope, launch.block_heads) != (RANK, ROPE, GLUON_HEADS):
        raise InternalError(f"{launch} for {shape}")
    q, rows, row_ids, out, lse = tensors
    kernel = _attend_fp8_kernel if shape.fp8 else _attend_plain_kernel
    kernel[ceil_div(shape.heads, launch.block_heads) * shape.queries, launch.splits](
        q=q,
        rows=rows,
        row_ids=row_ids,
        out=out,
        lse=lse,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        row_stride=rows.stride(0),
        row_ids_stride=row_ids.stride(0),
        k=shape.k,
        heads=shape.heads,
        split_keys=launch.split_keys(shape),
        scale=scale,
        split=launch.splits > 1,
        num_warps=8,
        enable_fp_fusion=True,
    )


@gluon.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_plain_kernel(
    q: gl.tensor,
    rows: gl.tensor,
    row_ids: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    query_stride: gl.tensor,
    head_stride: gl.tensor,
    row_stride: gl.tensor,
    row_ids_stride: gl.tensor,
    k: gl.tensor,
    heads: gl.tensor,
    split_keys: gl.tensor,
    scale: gl.tensor,
    split: gl.constexpr,
) -> None:
    query, head_first, first, stop = _work_of_program(heads, split_keys, k)
    my_row_ids = row_ids + query * row_ids_stride

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, TILE_RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, TILE_ROPE], _SHARED)
    even_tile = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_RANK], _SHARED)
    odd_tile = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_RANK], _SHARED)
    even_rope = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_ROPE], _SHARED)
    odd_rope = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_ROPE], _SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, TILE_KEYS], _SHARED)
    biases = gl.allocate_shared_memory(gl.bfloat16, [2, TILE_KEYS], _VECTORS)
    key = gl.arange(0, TILE_KEYS, gl.SliceLayout(1, PART_LAYOUT))
    rope_key = gl.arange(0, TILE_KEYS, gl.SliceLayout(1, ROPE_LAYOUT))

    tile_ids = load_row_ids(my_row_ids, first, key, stop)
    rope_ids = load_row_ids(my_row_ids, first, rope_key, stop)
    begin_copy(even_tile, rows, row_stride, tile_ids, 0, PART_LAYOUT)
    begin_copy(even_rope, rows, row_stride, rope_ids, PLAIN_ROPE_AT, ROPE_LAYOUT)
    async_copy.commit_group()
    biases.index(0).store(bias_of(rope_ids))
    tile_ids = load_row_ids(my_row_ids, first + TILE_KEYS, key, stop)
    rope_ids = load_row_ids(my_row_ids, first + TILE_KEYS, rope_key, stop)
    end = _used_end(my_row_ids, first, stop)
    my_q = q + query * query_stride
    q_latent.store(_load_q(my_q, head_stride, head_first, heads, TILE_RANK, _WIDE_LAYOUT))
    q_rope.store(_load_q(my_q + TILE_RANK, head_stride, head_first, heads, TILE_ROPE, ROPE_LAYOUT))

    zero = gl.zeros([_HEADS, TILE_KEYS], gl.float32, _SCORES)
    weight_sum = _sum_by_thread(zero)
    max_score = gl.full([_HEADS], _MIN_SCORE, gl.float32, _BY_HEAD)
    sums = gl.zeros([_HEADS, TILE_RANK], gl.float32, _SUMS)
    async_copy.wait_group(0)
    _finish_step()
    for pair in range(first, end, 2 * TILE_KEYS):
        for buffer in gl.static_range(2):
            start = pair + buffer * TILE_KEYS
            tile, next_tile = (even_tile, odd_tile) if buffer == 0 else (odd_tile, even_tile)
            rope, next_rope = (even_rope, odd_rope) if buffer == 0 else (odd_rope, even_rope)
            s = _score(q_rope, rope, zero, True)
            s = _score_part(q_latent, tile, 0, s, False)
            begin_copy(next_tile, rows, row_stride, tile_ids, 0, PART_LAYOUT)
            for n in gl.static_range(1, 4):
                s = _score_part(q_latent, tile, n, s, False)
            begin_copy(next_rope, rows, row_stride, rope_ids, PLAIN_ROPE_AT, ROPE_LAYOUT)
            async_copy.commit_group()
            next_bias = bias_of(rope_ids)
            tile_ids = load_row_ids(my_row_ids, start + 2 * TILE_KEYS, key, stop)
            rope_ids = load_row_ids(my_row_ids, start + 2 * TILE_KEYS, rope_key, stop)
            bias = biases.index(buffer).load(_BY_KEY).to(gl.float32)
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * scale + gl.expand_dims(bias, 0)
            new_max = gl.maximum(max_score, gl.max(s, 1))
            p = gl.exp2(s - gl.expand_dims(new_max, 1))
            weights.store(p.to(gl.bfloat16))
            rescale = gl.exp2(max_score - new_max)
            weight_sum = _add_weights(weight_sum, rescale, p)
            max_score = new_max
            pending_sums = _begin_sums(weights, tile, sums, rescale)
            biases.index(1 - buffer).store(next_bias)
            sums = warpgroup_mma_wait(0, deps=[pending_sums])
            async_copy.wait_group(0)
            _finish_step()
    _store(out, lse, query, head_first, heads, sums, max_score, weight_sum, end > first, split)


@gluon.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_fp8_kernel(
    q: gl.tensor,
    rows: gl.tensor,
    row_ids: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    query_stride: gl.tensor,
    head_stride: gl.tensor,
    row_stride: gl.tensor,
    row_ids_stride: gl.tensor,
    k: gl.tensor,
    heads: gl.tensor,
    split_keys: gl.tensor,
    scale: gl.tensor,
    split: gl.constexpr,
) -> None:
    query, head_first, first, stop = _work_of_program(heads, split_keys, k)
    my_row_ids = row_ids + query * row_ids_stride

    q_latent = gl.allocate_shared_memory(gl.float16, [_HEADS, TILE_RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, TILE_ROPE], _SHARED)
    even_tile = gl.allocate_shared_memory(gl.float16, [TILE_KEYS, TILE_RANK], _SHARED)
    odd_tile = gl.allocate_shared_memory(gl.float16, [TILE_KEYS, TILE_RANK], _SHARED)
    even_rope = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_ROPE], _SHARED)
    odd_rope = gl.allocate_shared_memory(gl.bfloat16, [TILE_KEYS, TILE_ROPE], _SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [_HEADS, TILE_KEYS], _SHARED)
    even_scales = gl.allocate_shared_memory(gl.float32, [TILE_KEYS, 4], _SCALES)
    odd_scales = gl.allocate_shared_memory(gl.float32, [TILE_KEYS, 4], _SCALES)
    units = gl.allocate_shared_memory(gl.bfloat16, [2, TILE_KEYS], _VECTORS)  # powers of two; 0 for an EMPTY entry
    key = gl.arange(0, TILE_KEYS, gl.SliceLayout(1, CODE_LAYOUT))
    scale_key = gl.arange(0, TILE_KEYS, gl.SliceLayout(1, SCALE_LAYOUT))
    rope_key = gl.arange(0, TILE_KEYS, gl.SliceLayout(1, ROPE_LAYOUT))

    # Tile 0 is dequantised now. The codes of tile 1 are loaded into registers, and its scales into shared memory.
    tile_ids = load_row_ids(my_row_ids, first, key, stop)
    rope_ids = load_row_ids(my_row_ids, first, rope_key, stop)
    scale_ids = load_row_ids(my_row_ids, first, scale_key, stop)
    next_scale_ids = load_row_ids(my_row_ids, first + TILE_KEYS, scale_key, stop)
    begin_copy_of_scales(even_scales, rows, row_stride, scale_ids)
    begin_copy_of_scales(odd_scales, rows, row_stride, next_scale_ids)
    begin_copy(even_rope, rows, row_stride, rope_ids, FP8_ROPE_AT, ROPE_LAYOUT)
    async_copy.commit_group()
    codes = load_codes(rows, row_stride, tile_ids)
    my_q = q + query * query_stride
    values = _load_q(my_q, head_stride, head_first, heads, TILE_RANK, _WIDE_LAYOUT).to(gl.float32)
    q_unit = unit_of(gl.max(gl.abs(values), 1))
    q_latent.store((values * gl.expand_dims(inverse_of(q_unit), 1)).to(gl.float16))
    q_rope.store(_load_q(my_q + TILE_RANK, head_stride, head_first, heads, TILE_ROPE, ROPE_LAYOUT))
    head_unit = gl.convert_layout(q_unit, _BY_HEAD)
    tile_ids = load_row_ids(my_row_ids, first + TILE_KEYS, key, stop)
    rope_ids = load_row_ids(my_row_ids, first + TILE_KEYS, rope_key, stop)
    end = _used_end(my_row_ids, first, stop)
    async_copy.wait_group(0)
    scales_to_ratios(even_scales, units.index(0), scale_ids)
    scales_to_ratios(odd_scales, units.index(1), next_scale_ids)
    scale_ids = load_row_ids(my_row_ids, first + 2 * TILE_KEYS, scale_key, stop)
    store_dequantised(even_tile, 0, codes[0], codes[1], even_scales)
    store_dequantised(even_tile, 1, codes[2], codes[3], even_scales)
    code0, code1, code2, code3 = load_codes(rows, row_stride, tile_ids)
    tile_ids = load_row_ids(my_row_ids, first + 2 * TILE_KEYS, key, stop)

    zero = gl.zeros([_HEADS, TILE_KEYS], gl.float32, _SCORES)
    weight_sum = _sum_by_thread(zero)
    max_score = gl.full([_HEADS], _MIN_SCORE, gl.float32, _BY_HEAD)
    sums = gl.zeros([_HEADS, TILE_RANK], gl.float32, _SUMS)
    _finish_step()
    for pair in range(first, end, 2 * TILE_KEYS):
        for buffer in gl.static_range(2):
            start = pair + buffer * TILE_KEYS
            tile, next_tile = (even_tile, odd_tile) if buffer == 0 else (odd_tile, even_tile)
            spent_scales, next_scales = (even_scales, odd_scales) if buffer == 0 else (odd_scales, even_scales)
            rope, next_rope = (even_rope, odd_rope) if buffer == 0 else (odd_rope, even_rope)
            s = _score_part(q_latent, tile, 0, zero, True)
            # All small loads are issued before those of the codes, because they would otherwise complete after them.
            begin_copy_of_scales(spent_scales, rows, row_stride, scale_ids)
            begin_copy(next_rope, rows, row_stride, rope_ids, FP8_ROPE_AT, ROPE_LAYOUT)
            async_copy.commit_group()
            rope_ids = load_row_ids(my_row_ids, start + 2 * TILE_KEYS, rope_key, stop)
            next_scale_ids = load_row_ids(my_row_ids, start + 3 * TILE_KEYS, scale_key, stop)
            next_tile_ids = load_row_ids(my_row_ids, start + 3 * TILE_KEYS, key, stop)
            store_dequantised(next_tile, 0, code0, code1, next_scales)
            s = _score_part(q_latent, tile, 1, s, False)
            s = _score_part(q_latent, tile, 2, s, False)
            store_dequantised(next_tile, 1, code2, code3, next_scales)
            s = _score_part(q_latent, tile, 3, s, False)
            code0, code1, code2, code3 = load_codes(rows, row_stride, tile_ids)
            tile_ids = next_tile_ids
            key_unit = units.index(buffer).load(_BY_KEY).to(gl.float32)
            s = warpgroup_mma_wait(0, deps=[s]) * gl.expand_dims(head_unit, 1) * gl.expand_dims(key_unit, 0)
            s = warpgroup_mma_wait(0, deps=[_score(q_rope, rope, s, False)])
            s = gl.where(gl.expand_dims(key_unit, 0) > 0, s * scale, float("-inf"))
            new_max = gl.maximum(max_score, gl.max(s + gl.expand_dims(exponent_of(key_unit), 0), 1))
            p = gl.exp2(s - gl.expand_dims(new_max, 1))
            weights.store((p * gl.expand_dims(key_unit, 0)).to(gl.float16))
            rescale = gl.exp2(max_score - new_max)
            weight_sum = _add_weights(weight_sum, rescale, p)
            max_score = new_max
            async_copy.wait_group(0)
            pending_sums = _begin_sums(weights, tile, sums, rescale)
            scales_to_ratios(spent_scales, units.index(buffer), scale_ids)
            scale_ids = next_scale_ids
            sums = warpgroup_mma_wait(0, deps=[pending_sums])
            _finish_step()
    _store(out, lse, query, head_first, heads, sums, max_score, weight_sum, end > first, split)


@gluon.jit  # type: ignore[untyped-decorator]
def _work_of_program(heads: gl.tensor, split_keys: gl.tensor, k: gl.tensor) -> gl.tensor:
    """Returns (query, first head, first entry, end of entries) of this program."""
    head_blocks = gl.cdiv(heads, _HEADS)
    query = (gl.program_id(0) // head_blocks).to(gl.int64)
    first = gl.program_id(1) * split_keys
    return query, gl.program_id(0) % head_blocks * _HEADS, first, gl.minimum(first + split_keys, k)


@gluon.jit  # type: ignore[untyped-decorator]
def _used_end(row_ids: gl.tensor, first: gl.tensor, stop: gl.tensor) -> gl.tensor:
    """Returns the smallest `end` such that all entries in [end, stop) are EMPTY; 0 if all in [first, stop) are."""
    entry = gl.arange(0, _SCAN, _FLAT_LAYOUT)
    last = gl.full([_SCAN], 0, gl.int32, _FLAT_LAYOUT)
    for start in range(first, stop, _SCAN):
        row_id = load_row_ids(row_ids, start, entry, stop)
        last = gl.maximum(last, gl.where(row_id < 0, 0, start + entry + 1))
    return gl.max(last, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_q(
    my_q: gl.tensor,
    head_stride: gl.tensor,
    head_first: gl.tensor,
    heads: gl.tensor,
    count: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    head = head_first + gl.arange(0, _HEADS, gl.SliceLayout(1, layout))
    value = gl.arange(0, count, gl.SliceLayout(0, layout))
    at = gl.expand_dims(my_q + head * head_stride, 1) + gl.expand_dims(value, 0)
    return gl.load(at, mask=gl.expand_dims(head, 1) < heads, other=0.0)


@gluon.jit  # type: ignore[untyped-decorator]
def _score(
    q: gl.shared_memory_descriptor, tile: gl.shared_memory_descriptor, s: gl.tensor, fresh: gl.constexpr
) -> gl.tensor:
    """Begins to compute s + q . row, or q . row if `fresh`."""
    return warpgroup_mma(q, tile.permute((1, 0)), s, use_acc=not fresh, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _score_part(
    q: gl.shared_memory_descriptor,
    tile: gl.shared_memory_descriptor,
    n: gl.constexpr,
    s: gl.tensor,
    fresh: gl.constexpr,
) -> gl.tensor:
    """Begins `_score` for part n of the latents."""
    return _score(q.slice(n * PART, PART, 1), tile.slice(n * PART, PART, 1), s, fresh)


@gluon.jit  # type: ignore[untyped-decorator]
def _sum_by_thread(p: gl.tensor) -> gl.tensor:
    """Sums the weights of the keys that one thread holds. `_total_weight` adds up these sums after the last step."""
    by_thread = gl.reshape(p, [_HEADS, 2, 4, 4, 2])  # warpgroups, registers, lanes, registers
    return gl.sum(gl.sum(by_thread, 4), 2)


@gluon.jit  # type: ignore[untyped-decorator]
def _total_weight(thread_sums: gl.tensor) -> gl.tensor:
    return gl.convert_layout(gl.sum(gl.sum(thread_sums, 2), 1), _BY_HEAD)


@gluon.jit  # type: ignore[untyped-decorator]
def _add_weights(weight_sum: gl.tensor, rescale: gl.tensor, p: gl.tensor) -> gl.tensor:
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, gl.SliceLayout(2, weight_sum.type.layout)))
    return weight_sum * gl.expand_dims(gl.expand_dims(rescale, 1), 2) + _sum_by_thread(p)


@gluon.jit  # type: ignore[untyped-decorator]
def _begin_sums(
    weights: gl.shared_memory_descriptor, tile: gl.shared_memory_descriptor, sums: gl.tensor, rescale: gl.tensor
) -> gl.tensor:
    """Begins to compute sums * rescale + weights . latents, after all threads have stored their weights."""
    sums = sums * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, _SUMS)), 1)
    fence_async_shared()
    _barrier()
    return warpgroup_mma(weights, tile, sums, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_step() -> None:
    """Makes all writes to the next tile visible to the matrix units. After it, the current tile may be overwritten."""
    fence_async_shared()
    _barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    out: gl.tensor,
    lse: gl.tensor,
    query: gl.tensor,
    head_first: gl.tensor,
    heads: gl.tensor,
    sums: gl.tensor,
    max_score: gl.tensor,
    weight_sum: gl.tensor,
    filled: gl.tensor,
    split: gl.constexpr,
) -> None:
    total = gl.maximum(_total_weight(weight_sum), _MIN_WEIGHT_SUM)  # the bound matters only without rows
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, _SUMS))
    sums = sums * gl.expand_dims(inverse, 1)
    if split:
        part = (query * gl.num_programs(1) + gl.program_id(1)) * heads
        head = head_first + gl.arange(0, _HEADS, _BY_HEAD)
        gl.store(lse + part + head, gl.where(filled, max_score + gl.log2(total), float("-inf")), mask=head < heads)
        # The sums are stored in their own layout, in which 4 threads fill a sector. An empty split stores nothing.
        head = head_first + gl.arange(0, _HEADS, gl.SliceLayout(1, _SUMS))
        latent = gl.arange(0, TILE_RANK, gl.SliceLayout(0, _SUMS))
        at = gl.expand_dims((part + head) * TILE_RANK, 1) + gl.expand_dims(latent, 0)
        gl.store(out + at, sums, mask=gl.expand_dims(head, 1) < gl.where(filled, heads, 0))
    else:
        head = head_first + gl.arange(0, _HEADS, gl.SliceLayout(1, _WIDE_LAYOUT))
        latent = gl.arange(0, TILE_RANK, gl.SliceLayout(0, _WIDE_LAYOUT))
        at = gl.expand_dims((query * heads + head) * TILE_RANK, 1) + gl.expand_dims(latent, 0)
        result = gl.convert_layout(sums.to(gl.bfloat16), _WIDE_LAYOUT)
        gl.store(out + at, result, mask=gl.expand_dims(head, 1) < heads)
