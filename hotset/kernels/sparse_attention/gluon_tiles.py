"""Tiles of rows for the Gluon kernels of sparse_attention: loading row ids, copying rows, dequantising fp8 rows.

A tile holds 64 rows in shared memory. Plain rows are copied asynchronously. The codes of fp8 rows are loaded into
registers, and are dequantised to float16 on their way to shared memory. A ratio is the
scale of a part divided by the row's unit, a power of two that the docstring of triton_impl explains. Row ids are
passed in registers, in the layout of the tensor whose rows they name.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hotset.kernels.sparse_attention.launch import RANK, ROPE

# Triton 3.6 has this function under the longer name.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

TILE_KEYS = gl.constexpr(64)
TILE_RANK = gl.constexpr(RANK)
TILE_ROPE = gl.constexpr(ROPE)
PART = gl.constexpr(128)  # latents; a row has four parts, and in fp8 rows each part has one scale
PLAIN_ROPE_AT = gl.constexpr(RANK * 2)  # bytes from the beginning of a plain row
FP8_ROPE_AT = gl.constexpr(RANK + 16)  # bytes from the beginning of an fp8 row
_SCALES_AT = gl.constexpr(RANK)

PART_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # bfloat16: 16 bytes per thread
ROPE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
CODE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [8, 1], [1, 0]))  # 2 words: 8 codes, 16 bytes as float16
SCALE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
_ALL_SCALES_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))  # a thread has all scales of a row
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


@gluon.jit  # type: ignore[untyped-decorator]
def load_row_ids(row_ids: gl.tensor, start: gl.tensor, key: gl.tensor, stop: gl.tensor) -> gl.tensor:
    """Loads the entries start + key, with EMPTY from `stop` on. Row ids fit into 32 bits; byte offsets may not."""
    return gl.load(row_ids + start + key, mask=start + key < stop, other=-1).to(gl.int32)


@gluon.jit  # type: ignore[untyped-decorator]
def bias_of(row_id: gl.tensor) -> gl.tensor:
    """Returns the bias of the scores of these entries: -inf for EMPTY entries, otherwise 0."""
    return gl.where(row_id < 0, float("-inf"), 0.0).to(gl.bfloat16)


@gluon.jit  # type: ignore[untyped-decorator]
def _rows_at(rows: gl.tensor, row_stride: gl.tensor, row_id: gl.tensor) -> gl.tensor:
    return rows + gl.maximum(row_id, 0).to(gl.int64) * row_stride


@gluon.jit  # type: ignore[untyped-decorator]
def begin_copy(
    target: gl.shared_memory_descriptor,
    rows: gl.tensor,
    row_stride: gl.tensor,
    row_id: gl.tensor,
    byte: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Begins to copy bfloat16 values of these rows, from `byte` on; copies zeros for EMPTY entries."""
    at = (_rows_at(rows, row_stride, row_id) + byte).to(gl.pointer_type(gl.bfloat16))
    value = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    _copy(target, gl.expand_dims(at, 1) + gl.expand_dims(value, 0), mask=gl.expand_dims(row_id, 1) >= 0)


@gluon.jit  # type: ignore[untyped-decorator]
def begin_copy_of_scales(
    scales: gl.shared_memory_descriptor, rows: gl.tensor, row_stride: gl.tensor, row_id: gl.tensor
) -> None:
    at = (_rows_at(rows, row_stride, row_id) + _SCALES_AT).to(gl.pointer_type(gl.float32))
    at = gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SCALE_LAYOUT)), 0)
    _copy(scales, at, mask=gl.expand_dims(row_id, 1) >= 0)


@gluon.jit  # type: ignore[untyped-decorator]
def load_codes(rows: gl.tensor, row_stride: gl.tensor, row_id: gl.tensor) -> gl.tensor:
    """Loads the codes of a tile in four parts, four codes per word. EMPTY entries get zeros."""
    at = gl.expand_dims(_rows_at(rows, row_stride, row_id).to(gl.pointer_type(gl.int32)), 1)
    at += gl.expand_dims(gl.arange(0, PART // 4, gl.SliceLayout(0, CODE_LAYOUT)), 0)
    valid = gl.expand_dims(row_id, 1) >= 0
    return (
        gl.load(at, mask=valid, other=0),
        gl.load(at + PART // 4, mask=valid, other=0),
        gl.load(at + PART // 2, mask=valid, other=0),
        gl.load(at + PART // 4 * 3, mask=valid, other=0),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def scales_to_ratios(
    scales: gl.shared_memory_descriptor, units: gl.shared_memory_descriptor, row_id: gl.tensor
) -> None:
    """Writes the units of a tile (0 for EMPTY entries). Replaces each scale by its ratio.

    A ratio is stored as two equal float16 values in a word.
    """
    values = scales.load(SCALE_LAYOUT)
    unit = unit_of(gl.max(values, 1))
    ratio = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,r",
        [values * gl.expand_dims(inverse_of(unit), 1)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    scales.store(ratio.to(gl.float32, bitcast=True))
    units.store(gl.where(row_id < 0, 0.0, unit).to(gl.bfloat16))


@gluon.jit  # type: ignore[untyped-decorator]
def store_dequantised(
    tile: gl.shared_memory_descriptor,
    half: gl.constexpr,
    codes: gl.tensor,
    more_codes: gl.tensor,
    ratios: gl.shared_memory_descriptor,
) -> None:
    """Writes two parts of a tile with one store. The compiler would put a barrier between two stores to the tile."""
    even, odd = gl.split(gl.reshape(ratios.load(_ALL_SCALES_LAYOUT).to(gl.int32, bitcast=True), [TILE_KEYS, 2, 2]))
    ratio, more_ratio = gl.split(even)[half], gl.split(odd)[half]
    values = gl.join(_dequantised(codes, ratio), _dequantised(more_codes, more_ratio))
    tile.slice(half * 2 * PART, 2 * PART, 1).store(gl.reshape(gl.permute(values, (0, 2, 1)), [TILE_KEYS, 2 * PART]))


@gluon.jit  # type: ignore[untyped-decorator]
def _dequantised(codes: gl.tensor, ratio: gl.tensor) -> gl.tensor:
    """Returns codes * ratio as float16, four values for every word."""
    a, b, c, d = gl.inline_asm_elementwise(
        _DEQUANTISE,
        "=h,=h,=h,=h,r,r",
        [codes, gl.expand_dims(gl.convert_layout(ratio, gl.SliceLayout(1, CODE_LAYOUT)), 1)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [TILE_KEYS, PART])


@gluon.jit  # type: ignore[untyped-decorator]
def unit_of(x: gl.tensor) -> gl.tensor:
    """Returns the largest power of two that does not exceed `x` >= 0, but at least 2**-40."""
    return (gl.maximum(x, 2.0**-40).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def inverse_of(unit: gl.tensor) -> gl.tensor:
    return (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def exponent_of(unit: gl.tensor) -> gl.tensor:
    return ((unit.to(gl.int32, bitcast=True) >> 23) | 0x4B000000).to(gl.float32, bitcast=True) - 8388735.0
