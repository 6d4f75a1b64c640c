"""sparse_attention for Hopper where many heads share the rows, in Gluon: the products of 64 heads are worth the large
matrix instructions, and Triton's compiler does not find by itself how to keep those busy.

A program of two warpgroups works on tiles of 64 rows, in two buffers. While the scores of one tile are computed, the
next is brought to the other buffer. Plain rows are copied asynchronously. fp8 rows are loaded into registers a whole
tile ahead and are dequantised on their way to shared memory (how, says triton_impl). Both warpgroups share each
product: each takes half of the keys for the scores and half of the latents for the sums.

Order between the threads: a tile is written by all and read by the matrix units of both warpgroups, hence fence and
barrier at the end of every step. Barriers for what threads exchange through shared memory by ordinary loads and stores
are the compiler's. It puts them between any two uses of one allocation, hence two allocations and two steps in the loop
instead of one that is indexed. All products of a step are waited for in that step, with no branch in between: else
ptxas makes them wait for each other.

Order of loads: one that is issued after the rows of a tile also comes after them, a microsecond later. So indices are
loaded a step or two before they are needed, and what the scores need of them passes through shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from hotset.base.units import ceil_div
from hotset.kernels.sparse_attention.launch import GLUON_HEADS, RANK, ROPE, AttentionShape, LaunchConfig

VARYING = ["row_ids_stride", "k", "heads", "split_keys"]  # arguments whose values make no kernels of their own
# Triton 3.6 had other names.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_HEADS = gl.constexpr(GLUON_HEADS)
_KEYS = gl.constexpr(64)  # of a tile
_RANK = gl.constexpr(RANK)
_ROPE = gl.constexpr(ROPE)
_PART = gl.constexpr(128)  # latents; a tile has four parts, and in fp8 rows each has one scale
_SCALES_AT = gl.constexpr(RANK)  # bytes from the beginning of an fp8 row
_ROPE_AT = gl.constexpr(RANK + 16)
_SCAN = gl.constexpr(1024)
_LOWEST = gl.constexpr(-1.0e30)
_LEAST = gl.constexpr(1.0e-37)

_PART_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # of bfloat16: 16 bytes to a thread
_CODE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [8, 1], [1, 0]))  # of words: 8 codes, 16 bytes as float16
_SCALE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # every thread has all scales of a row
_LINE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
_ROPE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_WIDE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_FLAT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # half of the keys to a warpgroup
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_BY_HEAD = gl.constexpr(gl.SliceLayout(1, _SCORES))
_BY_KEY = gl.constexpr(gl.SliceLayout(0, _SCORES))
_DEQUANTISE = gl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mul.rn.f16x2 first, first, $5;
    mul.rn.f16x2 second, second, $5;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
    }"""
)


def attend(shape: AttentionShape, launch: LaunchConfig, tensors: tuple[Tensor, ...], scale: float) -> None:
    """As the kernel of triton_impl, for ranks and ropes of 512 and 64 and blocks of 64 heads."""
    assert (shape.rank, shape.rope, launch.block_heads) == (RANK, ROPE, GLUON_HEADS), f"{launch} for {shape}"
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

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _ROPE], _SHARED)
    even_tile = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _RANK], _SHARED)
    odd_tile = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _RANK], _SHARED)
    even_rope = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _ROPE], _SHARED)
    odd_rope = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _ROPE], _SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _KEYS], _SHARED)
    biases = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS], _VECTORS)
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, _PART_LAYOUT))
    rope_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _ROPE_LAYOUT))

    index = _load_index(my_row_ids, first, key, stop)
    rope_index = _load_index(my_row_ids, first, rope_key, stop)
    _copy_values(even_tile, rows, row_stride, index, 0, _PART_LAYOUT)
    _copy_values(even_rope, rows, row_stride, rope_index, _RANK * 2, _ROPE_LAYOUT)
    async_copy.commit_group()
    biases.index(0).store(_bias(rope_index))
    index = _load_index(my_row_ids, first + _KEYS, key, stop)
    rope_index = _load_index(my_row_ids, first + _KEYS, rope_key, stop)
    end = _end(my_row_ids, first, stop)
    my_q = q + query * query_stride
    q_latent.store(_load_q(my_q, head_stride, head_first, heads, _RANK, _WIDE_LAYOUT))
    q_rope.store(_load_q(my_q + _RANK, head_stride, head_first, heads, _ROPE, _ROPE_LAYOUT))

    zero = gl.zeros([_HEADS, _KEYS], gl.float32, _SCORES)
    mass = _sums_of_threads(zero)
    most = gl.full([_HEADS], _LOWEST, gl.float32, _BY_HEAD)
    sums = gl.zeros([_HEADS, _RANK], gl.float32, _SUMS)
    async_copy.wait_group(0)
    _finish_step()
    for pair in range(first, end, 2 * _KEYS):
        for use in gl.static_range(2):
            start = pair + use * _KEYS
            tile, other = (even_tile, odd_tile) if use == 0 else (odd_tile, even_tile)
            rope, other_rope = (even_rope, odd_rope) if use == 0 else (odd_rope, even_rope)
            s = _score(q_rope, rope, zero, True)
            s = _score_part(q_latent, tile, 0, s, False)
            _copy_values(other, rows, row_stride, index, 0, _PART_LAYOUT)
            for n in gl.static_range(1, 4):
                s = _score_part(q_latent, tile, n, s, False)
            _copy_values(other_rope, rows, row_stride, rope_index, _RANK * 2, _ROPE_LAYOUT)
            async_copy.commit_group()
            next_bias = _bias(rope_index)
            index = _load_index(my_row_ids, start + 2 * _KEYS, key, stop)
            rope_index = _load_index(my_row_ids, start + 2 * _KEYS, rope_key, stop)
            bias = biases.index(use).load(_BY_KEY).to(gl.float32)
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * scale + gl.expand_dims(bias, 0)
            now = gl.maximum(most, gl.max(s, 1))
            p = gl.exp2(s - gl.expand_dims(now, 1))
            weights.store(p.to(gl.bfloat16))
            shrink = gl.exp2(most - now)
            mass = _grown(mass, shrink, p)
            most = now
            begun = _add(weights, tile, sums, shrink)
            biases.index(1 - use).store(next_bias)
            sums = warpgroup_mma_wait(0, deps=[begun])
            async_copy.wait_group(0)
            _finish_step()
    _store(out, lse, query, head_first, heads, sums, most, mass, end > first, split)


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

    q_latent = gl.allocate_shared_memory(gl.float16, [_HEADS, _RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _ROPE], _SHARED)
    even_tile = gl.allocate_shared_memory(gl.float16, [_KEYS, _RANK], _SHARED)
    odd_tile = gl.allocate_shared_memory(gl.float16, [_KEYS, _RANK], _SHARED)
    even_rope = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _ROPE], _SHARED)
    odd_rope = gl.allocate_shared_memory(gl.bfloat16, [_KEYS, _ROPE], _SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [_HEADS, _KEYS], _SHARED)
    even_scales = gl.allocate_shared_memory(gl.float32, [_KEYS, 4], _LINES)
    odd_scales = gl.allocate_shared_memory(gl.float32, [_KEYS, 4], _LINES)
    units = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS], _VECTORS)  # powers of two; 0 for an EMPTY entry
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, _CODE_LAYOUT))
    line_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _LINE_LAYOUT))
    rope_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _ROPE_LAYOUT))

    # Tile 0 is made at once; of tile 1 the codes go to registers and the scales to shared memory.
    index = _load_index(my_row_ids, first, key, stop)
    rope_index = _load_index(my_row_ids, first, rope_key, stop)
    line_index = _load_index(my_row_ids, first, line_key, stop)
    next_line_index = _load_index(my_row_ids, first + _KEYS, line_key, stop)
    _copy_scales(even_scales, rows, row_stride, line_index)
    _copy_scales(odd_scales, rows, row_stride, next_line_index)
    _copy_values(even_rope, rows, row_stride, rope_index, _ROPE_AT, _ROPE_LAYOUT)
    async_copy.commit_group()
    codes = _load_codes(rows, row_stride, index)
    my_q = q + query * query_stride
    values = _load_q(my_q, head_stride, head_first, heads, _RANK, _WIDE_LAYOUT).to(gl.float32)
    q_unit = _unit(gl.max(gl.abs(values), 1))
    q_latent.store((values * gl.expand_dims(_inverse(q_unit), 1)).to(gl.float16))
    q_rope.store(_load_q(my_q + _RANK, head_stride, head_first, heads, _ROPE, _ROPE_LAYOUT))
    factor = gl.convert_layout(q_unit, _BY_HEAD)
    index = _load_index(my_row_ids, first + _KEYS, key, stop)
    rope_index = _load_index(my_row_ids, first + _KEYS, rope_key, stop)
    end = _end(my_row_ids, first, stop)
    async_copy.wait_group(0)
    _make_ratios(even_scales, units.index(0), line_index)
    _make_ratios(odd_scales, units.index(1), next_line_index)
    line_index = _load_index(my_row_ids, first + 2 * _KEYS, line_key, stop)
    _fill(even_tile, 0, codes[0], codes[1], even_scales)
    _fill(even_tile, 1, codes[2], codes[3], even_scales)
    code0, code1, code2, code3 = _load_codes(rows, row_stride, index)
    index = _load_index(my_row_ids, first + 2 * _KEYS, key, stop)

    zero = gl.zeros([_HEADS, _KEYS], gl.float32, _SCORES)
    mass = _sums_of_threads(zero)
    most = gl.full([_HEADS], _LOWEST, gl.float32, _BY_HEAD)
    sums = gl.zeros([_HEADS, _RANK], gl.float32, _SUMS)
    _finish_step()
    for pair in range(first, end, 2 * _KEYS):
        for use in gl.static_range(2):
            start = pair + use * _KEYS
            tile, other = (even_tile, odd_tile) if use == 0 else (odd_tile, even_tile)
            spent_scales, next_scales = (even_scales, odd_scales) if use == 0 else (odd_scales, even_scales)
            rope, other_rope = (even_rope, odd_rope) if use == 0 else (odd_rope, even_rope)
            s = _score_part(q_latent, tile, 0, zero, True)
            # All that is small is asked for before the codes: what is asked for after them comes after them.
            _copy_scales(spent_scales, rows, row_stride, line_index)
            _copy_values(other_rope, rows, row_stride, rope_index, _ROPE_AT, _ROPE_LAYOUT)
            async_copy.commit_group()
            rope_index = _load_index(my_row_ids, start + 2 * _KEYS, rope_key, stop)
            next_line_index = _load_index(my_row_ids, start + 3 * _KEYS, line_key, stop)
            next_index = _load_index(my_row_ids, start + 3 * _KEYS, key, stop)
            _fill(other, 0, code0, code1, next_scales)
            s = _score_part(q_latent, tile, 1, s, False)
            s = _score_part(q_latent, tile, 2, s, False)
            _fill(other, 1, code2, code3, next_scales)
            s = _score_part(q_latent, tile, 3, s, False)
            code0, code1, code2, code3 = _load_codes(rows, row_stride, index)
            index = next_index
            key_unit = units.index(use).load(_BY_KEY).to(gl.float32)
            s = warpgroup_mma_wait(0, deps=[s]) * gl.expand_dims(factor, 1) * gl.expand_dims(key_unit, 0)
            s = warpgroup_mma_wait(0, deps=[_score(q_rope, rope, s, False)])
            s = gl.where(gl.expand_dims(key_unit, 0) > 0, s * scale, float("-inf"))
            now = gl.maximum(most, gl.max(s + gl.expand_dims(_exponent(key_unit), 0), 1))
            p = gl.exp2(s - gl.expand_dims(now, 1))
            weights.store((p * gl.expand_dims(key_unit, 0)).to(gl.float16))
            shrink = gl.exp2(most - now)
            mass = _grown(mass, shrink, p)
            most = now
            async_copy.wait_group(0)
            begun = _add(weights, tile, sums, shrink)
            _make_ratios(spent_scales, units.index(use), line_index)
            line_index = next_line_index
            sums = warpgroup_mma_wait(0, deps=[begun])
            _finish_step()
    _store(out, lse, query, head_first, heads, sums, most, mass, end > first, split)


@gluon.jit  # type: ignore[untyped-decorator]
def _work_of_program(heads: gl.tensor, split_keys: gl.tensor, k: gl.tensor) -> gl.tensor:
    """(query row, first head, first entry, entry to stop before) of this program."""
    head_blocks = gl.cdiv(heads, _HEADS)
    query = (gl.program_id(0) // head_blocks).to(gl.int64)
    first = gl.program_id(1) * split_keys
    return query, gl.program_id(0) % head_blocks * _HEADS, first, gl.minimum(first + split_keys, k)


@gluon.jit  # type: ignore[untyped-decorator]
def _end(row_ids: gl.tensor, first: gl.tensor, stop: gl.tensor) -> gl.tensor:
    """All entries in [end, stop) are EMPTY; end <= first where none is left."""
    entry = gl.arange(0, _SCAN, _FLAT_LAYOUT)
    last = gl.full([_SCAN], 0, gl.int32, _FLAT_LAYOUT)
    for start in range(first, stop, _SCAN):
        found = _load_index(row_ids, start, entry, stop)
        last = gl.maximum(last, gl.where(found < 0, 0, start + entry + 1))
    return gl.max(last, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_index(row_ids: gl.tensor, start: gl.tensor, key: gl.tensor, stop: gl.tensor) -> gl.tensor:
    """Entries start + key, EMPTY from `stop` on. Row numbers fit 32 bits; the offsets made from them do not."""
    return gl.load(row_ids + start + key, mask=start + key < stop, other=-1).to(gl.int32)


@gluon.jit  # type: ignore[untyped-decorator]
def _bias(index: gl.tensor) -> gl.tensor:
    """What is added to the scores of these entries."""
    return gl.where(index < 0, float("-inf"), 0.0).to(gl.bfloat16)


@gluon.jit  # type: ignore[untyped-decorator]
def _rows_at(rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor) -> gl.tensor:
    return rows + gl.maximum(index, 0).to(gl.int64) * row_stride


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_values(
    target: gl.shared_memory_descriptor,
    rows: gl.tensor,
    row_stride: gl.tensor,
    index: gl.tensor,
    byte: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Begins to copy the bfloat16 values from `byte` on of the rows `index`; of EMPTY ones, zeros."""
    at = (_rows_at(rows, row_stride, index) + byte).to(gl.pointer_type(gl.bfloat16))
    value = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    _copy(target, gl.expand_dims(at, 1) + gl.expand_dims(value, 0), mask=gl.expand_dims(index, 1) >= 0)


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
def _load_codes(rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor) -> gl.tensor:
    """The four parts of a tile, four codes to a word; zeros of EMPTY rows."""
    at = gl.expand_dims(_rows_at(rows, row_stride, index).to(gl.pointer_type(gl.int32)), 1)
    at += gl.expand_dims(gl.arange(0, _PART // 4, gl.SliceLayout(0, _CODE_LAYOUT)), 0)
    there = gl.expand_dims(index, 1) >= 0
    return (
        gl.load(at, mask=there, other=0),
        gl.load(at + _PART // 4, mask=there, other=0),
        gl.load(at + _PART // 2, mask=there, other=0),
        gl.load(at + _PART // 4 * 3, mask=there, other=0),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_scales(scales: gl.shared_memory_descriptor, rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor) -> None:
    at = (_rows_at(rows, row_stride, index) + _SCALES_AT).to(gl.pointer_type(gl.float32))
    at = gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, _LINE_LAYOUT)), 0)
    _copy(scales, at, mask=gl.expand_dims(index, 1) >= 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _make_ratios(scales: gl.shared_memory_descriptor, units: gl.shared_memory_descriptor, index: gl.tensor) -> None:
    """Writes the units of a tile; in place of its scales, what they are over the units, twice in a word as float16."""
    values = scales.load(_LINE_LAYOUT)
    unit = _unit(gl.max(values, 1))
    ratio = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,r",
        [values * gl.expand_dims(_inverse(unit), 1)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    scales.store(ratio.to(gl.float32, bitcast=True))
    units.store(gl.where(index < 0, 0.0, unit).to(gl.bfloat16))


@gluon.jit  # type: ignore[untyped-decorator]
def _fill(
    tile: gl.shared_memory_descriptor,
    half: gl.constexpr,
    codes: gl.tensor,
    more_codes: gl.tensor,
    ratios: gl.shared_memory_descriptor,
) -> None:
    """Writes two parts of a tile. By one store: between two to the same tile, the compiler puts a barrier."""
    even, odd = gl.split(gl.reshape(ratios.load(_SCALE_LAYOUT).to(gl.int32, bitcast=True), [_KEYS, 2, 2]))
    ratio, more_ratio = gl.split(even)[half], gl.split(odd)[half]
    values = gl.join(_dequantised(codes, ratio), _dequantised(more_codes, more_ratio))
    tile.slice(half * 2 * _PART, 2 * _PART, 1).store(gl.reshape(gl.permute(values, (0, 2, 1)), [_KEYS, 2 * _PART]))


@gluon.jit  # type: ignore[untyped-decorator]
def _dequantised(codes: gl.tensor, ratio: gl.tensor) -> gl.tensor:
    """codes * ratio as float16, four from every word."""
    a, b, c, d = gl.inline_asm_elementwise(
        _DEQUANTISE,
        "=h,=h,=h,=h,r,r",
        [codes, gl.expand_dims(gl.convert_layout(ratio, gl.SliceLayout(1, _CODE_LAYOUT)), 1)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [_KEYS, _PART])


@gluon.jit  # type: ignore[untyped-decorator]
def _score(
    q: gl.shared_memory_descriptor, tile: gl.shared_memory_descriptor, s: gl.tensor, fresh: gl.constexpr
) -> gl.tensor:
    """Begins to add q . row to `s`, or to a fresh sum."""
    return warpgroup_mma(q, tile.permute((1, 0)), s, use_acc=not fresh, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _score_part(
    q: gl.shared_memory_descriptor,
    tile: gl.shared_memory_descriptor,
    n: gl.constexpr,
    s: gl.tensor,
    fresh: gl.constexpr,
) -> gl.tensor:
    """As `_score`, for part n of the latents."""
    return _score(q.slice(n * _PART, _PART, 1), tile.slice(n * _PART, _PART, 1), s, fresh)


@gluon.jit  # type: ignore[untyped-decorator]
def _sums_of_threads(p: gl.tensor) -> gl.tensor:
    """Weights summed over the keys as far as each thread has them: the rest is left to the end, and to `_mass`."""
    by_thread = gl.reshape(p, [_HEADS, 2, 4, 4, 2])  # of warpgroups, registers, lanes, registers
    return gl.sum(gl.sum(by_thread, 4), 2)


@gluon.jit  # type: ignore[untyped-decorator]
def _mass(sums_of_threads: gl.tensor) -> gl.tensor:
    return gl.convert_layout(gl.sum(gl.sum(sums_of_threads, 2), 1), _BY_HEAD)


@gluon.jit  # type: ignore[untyped-decorator]
def _grown(mass: gl.tensor, shrink: gl.tensor, p: gl.tensor) -> gl.tensor:
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(2, mass.type.layout)))
    return mass * gl.expand_dims(gl.expand_dims(shrink, 1), 2) + _sums_of_threads(p)


@gluon.jit  # type: ignore[untyped-decorator]
def _add(
    weights: gl.shared_memory_descriptor, tile: gl.shared_memory_descriptor, sums: gl.tensor, shrink: gl.tensor
) -> gl.tensor:
    """Begins sums * shrink + weights . latents, once all threads have stored their weights."""
    sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS)), 1)
    fence_async_shared()
    _barrier()
    return warpgroup_mma(weights, tile, sums, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_step() -> None:
    """All that was written to the other buffer, by any thread, is there for the matrix units; this one is free."""
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
    most: gl.tensor,
    mass: gl.tensor,
    filled: gl.tensor,
    split: gl.constexpr,
) -> None:
    total = gl.maximum(_mass(mass), _LEAST)  # where it is less, all sums are 0
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, _SUMS))
    sums = sums * gl.expand_dims(inverse, 1)
    if split:
        part = (query * gl.num_programs(1) + gl.program_id(1)) * heads
        head = head_first + gl.arange(0, _HEADS, _BY_HEAD)
        gl.store(lse + part + head, gl.where(filled, most + gl.log2(total), float("-inf")), mask=head < heads)
        # In the layout that it has: 4 threads fill a sector of memory. Nothing where nothing was chosen.
        head = head_first + gl.arange(0, _HEADS, gl.SliceLayout(1, _SUMS))
        latent = gl.arange(0, _RANK, gl.SliceLayout(0, _SUMS))
        at = gl.expand_dims((part + head) * _RANK, 1) + gl.expand_dims(latent, 0)
        gl.store(out + at, sums, mask=gl.expand_dims(head, 1) < gl.where(filled, heads, 0))
    else:
        head = head_first + gl.arange(0, _HEADS, gl.SliceLayout(1, _WIDE_LAYOUT))
        latent = gl.arange(0, _RANK, gl.SliceLayout(0, _WIDE_LAYOUT))
        at = gl.expand_dims((query * heads + head) * _RANK, 1) + gl.expand_dims(latent, 0)
        result = gl.convert_layout(sums.to(gl.bfloat16), _WIDE_LAYOUT)
        gl.store(out + at, result, mask=gl.expand_dims(head, 1) < heads)


@gluon.jit  # type: ignore[untyped-decorator]
def _unit(x: gl.tensor) -> gl.tensor:
    return (gl.maximum(x, 2.0**-40).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _inverse(unit: gl.tensor) -> gl.tensor:
    return (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _exponent(unit: gl.tensor) -> gl.tensor:
    return ((unit.to(gl.int32, bitcast=True) >> 23) | 0x4B000000).to(gl.float32, bitcast=True) - 8388735.0
