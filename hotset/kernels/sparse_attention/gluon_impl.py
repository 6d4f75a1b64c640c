"""sparse_attention for Hopper, in Gluon: what Triton's compiler does not find by itself, above all where many heads
share the rows.

A program of two warpgroups works on tiles of 64 rows, in two buffers. While the scores of one tile are computed, the
next is brought to the other buffer, part by part between the matrix products, so that neither waits for the other.
Plain rows are copied asynchronously. fp8 rows are loaded into registers a whole tile ahead and are dequantised on
their way to shared memory (how, says triton_impl). Both warpgroups share each product: of 64 heads, each takes half of
the keys for the scores and half of the latents for the sums. With fewer heads (`few`) every product is transposed, so
that keys, and then latents, take the place of the 64 rows that the instruction wants.

Order between the threads: a tile is written by all and read by the matrix units of both warpgroups, hence wait, fence
and barrier at the end of every step. Barriers for what threads exchange through shared memory by ordinary loads and
stores are the compiler's. All products of a step are waited for in that step, with no branch in between: else ptxas
makes them wait for each other.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from hotset.base.units import ceil_div
from hotset.kernels.sparse_attention.launch import GLUON_KEYS, GLUON_RANK, GLUON_ROPE, Launch, Work

VARYING = ["chosen_stride", "k", "heads", "split_keys"]  # arguments whose values make no kernels of their own
# Triton 3.6 had other names.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_KEYS = gl.constexpr(GLUON_KEYS)
_RANK = gl.constexpr(GLUON_RANK)
_ROPE = gl.constexpr(GLUON_ROPE)
_PART = gl.constexpr(128)  # latents; a tile has four parts, and in fp8 rows each has one scale
_SCALES_AT = gl.constexpr(GLUON_RANK)  # bytes from the beginning of an fp8 row
_ROPE_AT = gl.constexpr(GLUON_RANK + 16)
_SCAN = gl.constexpr(1024)
_WARPS = gl.constexpr(8)
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


def attend(work: Work, launch: Launch, tensors: tuple[Tensor, ...], scale: float) -> None:
    """As the kernel of triton_impl, for ranks and ropes of 512 and 64 and blocks of 16, 32 or 64 heads."""
    assert (work.rank, work.rope) == (GLUON_RANK, GLUON_ROPE), f"rank {work.rank} and rope {work.rope} in Gluon"
    q, rows, chosen, out, lse = tensors
    kernel = _attend_fp8_kernel if work.fp8 else _attend_plain_kernel
    kernel[ceil_div(work.heads, launch.block_heads) * work.rows, launch.splits](
        *(q, rows, chosen, out, lse, q.stride(0), q.stride(1), rows.stride(0), chosen.stride(0)),
        *(work.k, work.heads, launch.split_keys(work), scale),
        split=launch.splits > 1,
        block_h=launch.block_heads,
        num_warps=8,
        enable_fp_fusion=True,
    )


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _scores_layout(block_h: int) -> gl.NVMMADistributedLayout:
    """Of [heads, keys], or of [keys, heads] where heads are few: 64 rows, and the columns in two halves."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, block_h // 2, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _sums_layout(block_h: int) -> gl.NVMMADistributedLayout:
    """Of [heads, rank], or of [rank, heads] where heads are few."""
    if block_h < 64:
        return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, block_h, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _weights_layout(block_h: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(2 * block_h, 16, 2)


@gluon.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_plain_kernel(
    q: gl.tensor,
    rows: gl.tensor,
    chosen: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    q_row_stride: gl.tensor,
    q_head_stride: gl.tensor,
    row_stride: gl.tensor,
    chosen_stride: gl.tensor,
    k: gl.tensor,
    heads: gl.tensor,
    split_keys: gl.tensor,
    scale: gl.tensor,
    split: gl.constexpr,
    block_h: gl.constexpr,
) -> None:
    few: gl.constexpr = block_h < 64
    by_head: gl.constexpr = 0 if few else 1  # the axis of scores that a value per head lacks
    by_key: gl.constexpr = 1 if few else 0
    scores_layout: gl.constexpr = _scores_layout(block_h)
    sums_layout: gl.constexpr = _sums_layout(block_h)
    row, head_first, first, stop = _place(heads, split_keys, k, block_h)
    my_chosen = chosen + row * chosen_stride
    end, spare = _extent(my_chosen, first, stop)

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [block_h, _RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [block_h, _ROPE], _SHARED)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS, _RANK], _SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS, _ROPE], _SHARED)
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [_KEYS, block_h] if few else [block_h, _KEYS], _weights_layout(block_h)
    )
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, _PART_LAYOUT))
    rope_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _ROPE_LAYOUT))
    score_key = gl.arange(0, _KEYS, gl.SliceLayout(by_key, scores_layout))

    at = _rows_at(rows, row_stride, _load_index(my_chosen, first, key, end), spare)
    for n in gl.static_range(4):
        _copy(tiles.index(0).slice(n * _PART, _PART, 1), _values_at(at + n * _PART * 2, _PART, _PART_LAYOUT))
    at_rope = _rows_at(rows, row_stride, _load_index(my_chosen, first, rope_key, end), spare) + _RANK * 2
    _copy(ropes.index(0), _values_at(at_rope, _ROPE, _ROPE_LAYOUT))
    async_copy.commit_group()
    index = _load_index(my_chosen, first + _KEYS, key, end)
    rope_index = _load_index(my_chosen, first + _KEYS, rope_key, end)
    my_q = q + row * q_row_stride
    q_latent.store(_load_q(my_q, q_head_stride, head_first, heads, block_h, _RANK, _WIDE_LAYOUT))
    q_rope.store(_load_q(my_q + _RANK, q_head_stride, head_first, heads, block_h, _ROPE, _ROPE_LAYOUT))

    zero = gl.zeros([_KEYS, block_h] if few else [block_h, _KEYS], gl.float32, scores_layout)
    mass = zero
    most = gl.full([block_h], _LOWEST, gl.float32, gl.SliceLayout(by_head, scores_layout))
    sums = gl.zeros([_RANK, block_h] if few else [block_h, _RANK], gl.float32, sums_layout)
    _finish_step()
    for start in range(first, end, _KEYS):
        use = (start - first) // _KEYS % 2
        tile, other = tiles.index(use), tiles.index(1 - use)
        s = _score(q_rope, ropes.index(use), zero, True, few)
        at = _rows_at(rows, row_stride, index, spare)
        for n in gl.static_range(4):
            _copy(other.slice(n * _PART, _PART, 1), _values_at(at + n * _PART * 2, _PART, _PART_LAYOUT))
            s = _score(q_latent.slice(n * _PART, _PART, 1), tile.slice(n * _PART, _PART, 1), s, False, few)
        at_rope = _rows_at(rows, row_stride, rope_index, spare) + _RANK * 2
        _copy(ropes.index(1 - use), _values_at(at_rope, _ROPE, _ROPE_LAYOUT))
        async_copy.commit_group()
        index = _load_index(my_chosen, start + 2 * _KEYS, key, end)
        rope_index = _load_index(my_chosen, start + 2 * _KEYS, rope_key, end)
        bias = gl.where(_load_index(my_chosen, start, score_key, end) < 0, float("-inf"), 0.0)
        s = warpgroup_mma_wait(0, deps=[s])
        s = s * scale + gl.expand_dims(bias, by_key)
        now = gl.maximum(most, gl.max(s, by_head))
        p = gl.exp2(s - gl.expand_dims(now, by_head))
        weights.store(p.to(gl.bfloat16))
        shrink = gl.exp2(most - now)
        mass = mass * gl.expand_dims(shrink, by_head) + p
        most = now
        sums = _add(weights, tile, sums, shrink, sums_layout, few)
        _finish_step()
    _store(out, lse, row, head_first, heads, sums, most, mass, end > first, split, block_h)


@gluon.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_fp8_kernel(
    q: gl.tensor,
    rows: gl.tensor,
    chosen: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    q_row_stride: gl.tensor,
    q_head_stride: gl.tensor,
    row_stride: gl.tensor,
    chosen_stride: gl.tensor,
    k: gl.tensor,
    heads: gl.tensor,
    split_keys: gl.tensor,
    scale: gl.tensor,
    split: gl.constexpr,
    block_h: gl.constexpr,
) -> None:
    few: gl.constexpr = block_h < 64
    by_head: gl.constexpr = 0 if few else 1
    by_key: gl.constexpr = 1 if few else 0
    scores_layout: gl.constexpr = _scores_layout(block_h)
    sums_layout: gl.constexpr = _sums_layout(block_h)
    row, head_first, first, stop = _place(heads, split_keys, k, block_h)
    my_chosen = chosen + row * chosen_stride
    end, spare = _extent(my_chosen, first, stop)

    q_latent = gl.allocate_shared_memory(gl.float16, [block_h, _RANK], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [block_h, _ROPE], _SHARED)
    tiles = gl.allocate_shared_memory(gl.float16, [2, _KEYS, _RANK], _SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, _KEYS, _ROPE], _SHARED)
    weights = gl.allocate_shared_memory(
        gl.float16, [_KEYS, block_h] if few else [block_h, _KEYS], _weights_layout(block_h)
    )
    scales = gl.allocate_shared_memory(gl.float32, [_KEYS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    units = gl.allocate_shared_memory(gl.float32, [2, _KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, _CODE_LAYOUT))
    line_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _LINE_LAYOUT))
    rope_key = gl.arange(0, _KEYS, gl.SliceLayout(1, _ROPE_LAYOUT))
    score_key = gl.arange(0, _KEYS, gl.SliceLayout(by_key, scores_layout))

    # Tile 0 is made at once; of tile 1 the codes go to registers and the scales to shared memory.
    codes = _load_codes(rows, row_stride, _load_index(my_chosen, first, key, end), spare)
    _copy_scales(scales, rows, row_stride, _load_index(my_chosen, first, line_key, end), spare)
    at_rope = _rows_at(rows, row_stride, _load_index(my_chosen, first, rope_key, end), spare) + _ROPE_AT
    _copy(ropes.index(0), _values_at(at_rope, _ROPE, _ROPE_LAYOUT))
    async_copy.commit_group()
    my_q = q + row * q_row_stride
    values = _load_q(my_q, q_head_stride, head_first, heads, block_h, _RANK, _WIDE_LAYOUT).to(gl.float32)
    q_unit = _unit(gl.max(gl.abs(values), 1))
    q_latent.store((values * gl.expand_dims(_inverse(q_unit), 1)).to(gl.float16))
    q_rope.store(_load_q(my_q + _RANK, q_head_stride, head_first, heads, block_h, _ROPE, _ROPE_LAYOUT))
    factor = gl.convert_layout(q_unit, gl.SliceLayout(by_head, scores_layout)) * scale
    async_copy.wait_group(0)
    unit, ratios = _ratios(scales)
    units.index(0).store(unit)
    for n in gl.static_range(4):
        _fill(tiles.index(0), n, codes[n], ratios[n])
    code0, code1, code2, code3 = _load_codes(rows, row_stride, _load_index(my_chosen, first + _KEYS, key, end), spare)
    _barrier()  # scales have been read, before others replace them
    _copy_scales(scales, rows, row_stride, _load_index(my_chosen, first + _KEYS, line_key, end), spare)
    async_copy.commit_group()
    index = _load_index(my_chosen, first + 2 * _KEYS, key, end)
    line_index = _load_index(my_chosen, first + 2 * _KEYS, line_key, end)
    rope_index = _load_index(my_chosen, first + _KEYS, rope_key, end)

    zero = gl.zeros([_KEYS, block_h] if few else [block_h, _KEYS], gl.float32, scores_layout)
    mass = zero
    most = gl.full([block_h], _LOWEST, gl.float32, gl.SliceLayout(by_head, scores_layout))
    sums = gl.zeros([_RANK, block_h] if few else [block_h, _RANK], gl.float32, sums_layout)
    _finish_step()
    for start in range(first, end, _KEYS):
        use = (start - first) // _KEYS % 2
        tile, other = tiles.index(use), tiles.index(1 - use)
        next_unit, next_ratios = _ratios(scales)
        units.index(1 - use).store(next_unit)
        of_rope = _score(q_rope, ropes.index(use), zero, True, few)
        s = _score(q_latent.slice(0, _PART, 1), tile.slice(0, _PART, 1), zero, True, few)
        _fill(other, 0, code0, next_ratios[0])
        s = _score(q_latent.slice(_PART, _PART, 1), tile.slice(_PART, _PART, 1), s, False, few)
        _fill(other, 1, code1, next_ratios[1])
        s = _score(q_latent.slice(2 * _PART, _PART, 1), tile.slice(2 * _PART, _PART, 1), s, False, few)
        _fill(other, 2, code2, next_ratios[2])
        s = _score(q_latent.slice(3 * _PART, _PART, 1), tile.slice(3 * _PART, _PART, 1), s, False, few)
        _fill(other, 3, code3, next_ratios[3])
        code0, code1, code2, code3 = _load_codes(rows, row_stride, index, spare)
        _copy_scales(scales, rows, row_stride, line_index, spare)
        at_rope = _rows_at(rows, row_stride, rope_index, spare) + _ROPE_AT
        _copy(ropes.index(1 - use), _values_at(at_rope, _ROPE, _ROPE_LAYOUT))
        async_copy.commit_group()
        index = _load_index(my_chosen, start + 3 * _KEYS, key, end)
        line_index = _load_index(my_chosen, start + 3 * _KEYS, line_key, end)
        rope_index = _load_index(my_chosen, start + 2 * _KEYS, rope_key, end)
        bias = gl.where(_load_index(my_chosen, start, score_key, end) < 0, float("-inf"), 0.0)
        key_unit = units.index(use).load(gl.SliceLayout(by_key, scores_layout))
        s, of_rope = warpgroup_mma_wait(0, deps=[s, of_rope])
        s = s * gl.expand_dims(factor, by_head) * gl.expand_dims(key_unit, by_key)
        s += of_rope * scale + gl.expand_dims(bias, by_key)
        now = gl.maximum(most, gl.max(s + gl.expand_dims(_exponent(key_unit), by_key), by_head))
        p = gl.exp2(s - gl.expand_dims(now, by_head))
        weights.store((p * gl.expand_dims(key_unit, by_key)).to(gl.float16))
        shrink = gl.exp2(most - now)
        mass = mass * gl.expand_dims(shrink, by_head) + p
        most = now
        sums = _add(weights, tile, sums, shrink, sums_layout, few)
        _finish_step()
    _store(out, lse, row, head_first, heads, sums, most, mass, end > first, split, block_h)


@gluon.jit  # type: ignore[untyped-decorator]
def _place(heads: gl.tensor, split_keys: gl.tensor, k: gl.tensor, block_h: gl.constexpr) -> gl.tensor:
    """(query row, first head, first entry, entry to stop before) of this program."""
    head_blocks = gl.cdiv(heads, block_h)
    row = (gl.program_id(0) // head_blocks).to(gl.int64)
    first = gl.program_id(1) * split_keys
    return row, gl.program_id(0) % head_blocks * block_h, first, gl.minimum(first + split_keys, k)


@gluon.jit  # type: ignore[untyped-decorator]
def _extent(chosen: gl.tensor, first: gl.tensor, stop: gl.tensor) -> gl.tensor:
    """As in triton_impl."""
    entry = gl.arange(0, _SCAN, _FLAT_LAYOUT)
    last = gl.full([_SCAN], 0, gl.int32, _FLAT_LAYOUT)
    some = gl.full([_SCAN], 0, gl.int32, _FLAT_LAYOUT)
    for start in range(first, stop, _SCAN):
        found = _load_index(chosen, start, entry, stop)
        last = gl.maximum(last, gl.where(found < 0, 0, start + entry + 1))
        some = gl.maximum(some, found)
    return gl.max(last, 0), gl.max(some, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_index(chosen: gl.tensor, start: gl.tensor, key: gl.tensor, end: gl.tensor) -> gl.tensor:
    """Entries start + key, EMPTY from `end` on. Row numbers fit 32 bits; the offsets made from them do not."""
    return gl.load(chosen + start + key, mask=start + key < end, other=-1).to(gl.int32)


@gluon.jit  # type: ignore[untyped-decorator]
def _rows_at(rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor, spare: gl.tensor) -> gl.tensor:
    return rows + gl.where(index < 0, spare, index).to(gl.int64) * row_stride


@gluon.jit  # type: ignore[untyped-decorator]
def _values_at(at: gl.tensor, count: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """[rows, count] addresses of the bfloat16 values that begin at the bytes `at`."""
    value = gl.arange(0, count, gl.SliceLayout(0, layout))
    return gl.expand_dims(at.to(gl.pointer_type(gl.bfloat16)), 1) + gl.expand_dims(value, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_q(
    my_q: gl.tensor,
    head_stride: gl.tensor,
    head_first: gl.tensor,
    heads: gl.tensor,
    block_h: gl.constexpr,
    count: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    head = head_first + gl.arange(0, block_h, gl.SliceLayout(1, layout))
    value = gl.arange(0, count, gl.SliceLayout(0, layout))
    at = gl.expand_dims(my_q + head * head_stride, 1) + gl.expand_dims(value, 0)
    return gl.load(at, mask=gl.expand_dims(head, 1) < heads, other=0.0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_codes(rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor, spare: gl.tensor) -> gl.tensor:
    """The four parts of a tile, four codes to a word."""
    at = gl.expand_dims(_rows_at(rows, row_stride, index, spare).to(gl.pointer_type(gl.int32)), 1)
    at += gl.expand_dims(gl.arange(0, _PART // 4, gl.SliceLayout(0, _CODE_LAYOUT)), 0)
    return gl.load(at), gl.load(at + _PART // 4), gl.load(at + _PART // 2), gl.load(at + _PART // 4 * 3)


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_scales(
    scales: gl.shared_memory_descriptor, rows: gl.tensor, row_stride: gl.tensor, index: gl.tensor, spare: gl.tensor
) -> None:
    at = (_rows_at(rows, row_stride, index, spare) + _SCALES_AT).to(gl.pointer_type(gl.float32))
    _copy(scales, gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, _LINE_LAYOUT)), 0))


@gluon.jit  # type: ignore[untyped-decorator]
def _ratios(scales: gl.shared_memory_descriptor) -> gl.tensor:
    """(units, the scales over them): a vector per part, each value twice in a word as float16."""
    values = scales.load(_SCALE_LAYOUT)
    unit = _unit(gl.max(values, 1))
    ratio = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,r",
        [values * gl.expand_dims(_inverse(unit), 1)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    even, odd = gl.split(gl.reshape(ratio, [_KEYS, 2, 2]))
    ratio0, ratio2 = gl.split(even)
    ratio1, ratio3 = gl.split(odd)
    layout: gl.constexpr = gl.SliceLayout(1, _CODE_LAYOUT)
    return unit, (
        gl.convert_layout(ratio0, layout),
        gl.convert_layout(ratio1, layout),
        gl.convert_layout(ratio2, layout),
        gl.convert_layout(ratio3, layout),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _fill(tile: gl.shared_memory_descriptor, n: gl.constexpr, codes: gl.tensor, ratio: gl.tensor) -> None:
    """Writes part n of a tile: codes * ratio as float16, four from every word."""
    a, b, c, d = gl.inline_asm_elementwise(
        _DEQUANTISE,
        "=h,=h,=h,=h,r,r",
        [codes, gl.expand_dims(ratio, 1)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    values = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [_KEYS, _PART])
    tile.slice(n * _PART, _PART, 1).store(values)


@gluon.jit  # type: ignore[untyped-decorator]
def _score(
    q: gl.shared_memory_descriptor,
    tile: gl.shared_memory_descriptor,
    s: gl.tensor,
    fresh: gl.constexpr,
    few: gl.constexpr,
) -> gl.tensor:
    """Begins to add q . row to `s`, or to a fresh sum."""
    if few:
        begun = warpgroup_mma(tile, q.permute((1, 0)), s, use_acc=not fresh, is_async=True)
    else:
        begun = warpgroup_mma(q, tile.permute((1, 0)), s, use_acc=not fresh, is_async=True)
    return begun


@gluon.jit  # type: ignore[untyped-decorator]
def _add(
    weights: gl.shared_memory_descriptor,
    tile: gl.shared_memory_descriptor,
    sums: gl.tensor,
    shrink: gl.tensor,
    sums_layout: gl.constexpr,
    few: gl.constexpr,
) -> gl.tensor:
    """sums * shrink + weights . latents, once all threads have stored their weights."""
    by_head: gl.constexpr = 0 if few else 1
    sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(by_head, sums_layout)), by_head)
    fence_async_shared()
    _barrier()
    if few:
        begun = warpgroup_mma(tile.permute((1, 0)), weights, sums, is_async=True)
    else:
        begun = warpgroup_mma(weights, tile, sums, is_async=True)
    return warpgroup_mma_wait(0, deps=[begun])


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_step() -> None:
    """All that was written to the other buffer, by any thread, is there for the matrix units; this one is free."""
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    out: gl.tensor,
    lse: gl.tensor,
    row: gl.tensor,
    head_first: gl.tensor,
    heads: gl.tensor,
    sums: gl.tensor,
    most: gl.tensor,
    mass: gl.tensor,
    filled: gl.tensor,
    split: gl.constexpr,
    block_h: gl.constexpr,
) -> None:
    by_head: gl.constexpr = 0 if block_h < 64 else 1
    total = gl.maximum(gl.sum(mass, by_head), _LEAST)  # where it is less, all sums are 0
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(by_head, sums.type.layout))
    sums = sums * gl.expand_dims(inverse, by_head)
    if split:
        part = (row * gl.num_programs(1) + gl.program_id(1)) * heads
        head = head_first + gl.arange(0, block_h, most.type.layout)
        gl.store(lse + part + head, gl.where(filled, most + gl.log2(total), float("-inf")), mask=head < heads)
        # In the layout that it has: 8 threads or 4 fill a sector of memory. Nothing where nothing was chosen.
        by_latent: gl.constexpr = 1 - by_head
        head = head_first + gl.arange(0, block_h, gl.SliceLayout(by_head, sums.type.layout))
        latent = gl.arange(0, _RANK, gl.SliceLayout(by_latent, sums.type.layout))
        at = gl.expand_dims((part + head) * _RANK, by_head) + gl.expand_dims(latent, by_latent)
        gl.store(out + at, sums, mask=gl.expand_dims(head, by_head) < gl.where(filled, heads, 0))
    else:
        result = sums.to(gl.bfloat16)
        if block_h < 64:
            result = gl.permute(result, (1, 0))
        head = head_first + gl.arange(0, block_h, gl.SliceLayout(1, _WIDE_LAYOUT))
        latent = gl.arange(0, _RANK, gl.SliceLayout(0, _WIDE_LAYOUT))
        at = gl.expand_dims((row * heads + head) * _RANK, 1) + gl.expand_dims(latent, 0)
        gl.store(out + at, gl.convert_layout(result, _WIDE_LAYOUT), mask=gl.expand_dims(head, 1) < heads)


@gluon.jit  # type: ignore[untyped-decorator]
def _unit(x: gl.tensor) -> gl.tensor:
    return (gl.maximum(x, 2.0**-40).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _inverse(unit: gl.tensor) -> gl.tensor:
    return (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _exponent(unit: gl.tensor) -> gl.tensor:
    return ((unit.to(gl.int32, bitcast=True) >> 23) | 0x4B000000).to(gl.float32, bitcast=True) - 8388735.0
