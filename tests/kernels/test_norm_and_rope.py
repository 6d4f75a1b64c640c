"""norm, rope, rope_query, per_head_matmul and fp32_linear: against plain formulas, and kernels against references."""

import pytest
import torch
from interpreted import triton_impl
from torch import Tensor

from hotset.kernels.linear import fp32_linear, per_head_matmul
from hotset.kernels.linear import reference as linear_reference
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.norm import reference as norm_reference
from hotset.kernels.rope import Rotation, rope_query, rotate
from hotset.kernels.rope import reference as rope_reference

EPS = 1e-6
BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
only_interpreted = pytest.mark.interpreted


def exact(*shape: int, dtype: torch.dtype) -> Tensor:
    """Eighths up to 1: squares and their sums are exact in float32, in whatever order they are taken."""
    return (torch.randint(-8, 9, shape) / 8).to(dtype)


def angles(rows: int, dim: int, dtype: torch.dtype) -> Rotation:
    turns = torch.randn(rows, 1, dim // 2) * 3
    return Rotation(turns.cos().to(dtype), turns.sin().to(dtype))


def on(device: str, rotation: Rotation) -> Rotation:
    return Rotation(rotation.cos.to(device), rotation.sin.to(device))


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, by the Frobenius norm; NaN if there is one anywhere."""
    difference = got.cpu().double() - expected.cpu().double()
    return float(difference.norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 16)])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    for row, normed in zip(x.view(-1, shape[-1]), rms_norm(x, weight, EPS).view(-1, shape[-1]), strict=True):
        mean_square = sum(float(value) ** 2 for value in row) / shape[-1]
        torch.testing.assert_close(normed, row / (mean_square + EPS) ** 0.5 * weight)


def test_bf16_norm_rounds_the_scaled_row_before_the_weight() -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), scaled * weight)
    assert not torch.equal(rms_norm(x, weight, EPS), (scaled.float() * weight.float() * 1.001).bfloat16())


def test_adding_before_the_norm_returns_the_sum_as_well() -> None:
    x, delta, weight = (torch.randn(4, 24).bfloat16() for _ in range(3))
    total, normed = add_rms_norm(x, delta, weight[0], EPS)
    assert torch.equal(total, x + delta) and torch.equal(normed, rms_norm(x + delta, weight[0], EPS))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_each_pair_by_its_angle_and_leaves_the_rest(interleaved: bool) -> None:
    x, turns = torch.randn(3, 2, 10, dtype=torch.float64), torch.randn(3, 1, 3, dtype=torch.float64)
    out = rotate(x, Rotation(turns.cos(), turns.sin()), interleaved)
    for pair in range(3):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
        turned = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * turns[..., pair])
        torch.testing.assert_close(torch.complex(out[..., pair], out[..., pair + 3]), turned)
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_query_is_absorbed_head_by_head_beside_its_turned_part() -> None:
    q, key_up = torch.randn(3, 2, 9, dtype=torch.float64), torch.randn(2, 5, 7, dtype=torch.float64)
    turns = torch.randn(3, 1, 2, dtype=torch.float64)
    rotation = Rotation(turns.cos(), turns.sin())
    out = rope_query(q, key_up, rotation)
    for row in range(3):
        for head in range(2):
            torch.testing.assert_close(out[row, head, :7], q[row, head, :5] @ key_up[head])
    assert torch.equal(out[..., 7:], rotate(q[..., 5:], rotation, True))


@only_interpreted
@DTYPES
@pytest.mark.parametrize("width", [1, 40, 128])
def test_norm_kernel_equals_the_reference_bit_by_bit(dtype: torch.dtype, width: int) -> None:
    impl = triton_impl("norm")
    weight = torch.randn(width).to(dtype)
    wide = exact(5, width + 3, dtype=dtype)
    compare = torch.equal if dtype == torch.bfloat16 else torch.allclose  # float32 rounds the two products as one
    x = wide[:, 1 : width + 1]  # rows that lie apart
    assert compare(impl.rms_norm(x, weight, EPS), norm_reference.rms_norm(x, weight, EPS))
    delta = exact(5, width, dtype=dtype)
    for got, expected in zip(
        impl.add_rms_norm(x, delta, weight, EPS), norm_reference.add_rms_norm(x, delta, weight, EPS), strict=True
    ):
        assert compare(got, expected)
    heads = exact(3, 4, width + 2, dtype=dtype)[:, 1:3, :width]
    assert compare(impl.rms_norm(heads, weight, EPS), norm_reference.rms_norm(heads, weight, EPS))


@only_interpreted
@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "turning"), [(1, 8, 8), (3, 10, 6), (9, 16, 8)])
def test_rope_kernel_equals_the_reference_bit_by_bit(
    dtype: torch.dtype, interleaved: bool, heads: int, dim: int, turning: int
) -> None:
    x = torch.randn(4, heads + 2, dim + 1).to(dtype)[:, 1 : heads + 1, 1:]
    rotation = angles(4, turning, dtype)
    got = triton_impl("rope").rotate(x, rotation, interleaved)
    assert torch.equal(got, rope_reference.rotate(x, rotation, interleaved))


@only_interpreted
def test_rope_kernel_writes_into_a_slice_and_spares_what_is_beside_it() -> None:
    x, rotation = torch.randn(2, 3, 8), angles(2, 8, torch.float32)
    out = torch.full((2, 3, 13), float("nan"))
    triton_impl("rope").rotate_into(out[..., 5:], x, rotation, True)
    assert torch.equal(out[..., 5:], rope_reference.rotate(x, rotation, True)) and bool(out[..., :5].isnan().all())


@only_interpreted
@DTYPES
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 1, 3), (5, 3, 40), (9, 4, 1500)])
def test_wide_kernel_equals_the_reference(dtype: torch.dtype, rows: int, outputs: int, width: int) -> None:
    x, weight = torch.randn(rows, width + 1).to(dtype)[:, 1:], torch.randn(outputs, width)
    got = triton_impl("linear").fp32_linear(x, weight, 0.3)
    torch.testing.assert_close(got, linear_reference.fp32_linear(x, weight, 0.3), atol=1e-4, rtol=1e-4)


@only_interpreted
def test_op_reaches_its_kernels_again_after_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing `triton_impl` sets that name in the op's package, so nothing else there may be called so."""
    impl = triton_impl("norm")
    monkeypatch.setattr("hotset.kernels.norm.has_fast_path", lambda x: True)
    x, weight = exact(2, 8, dtype=BF16), torch.randn(8).bfloat16()
    for _ in range(2):
        assert torch.equal(rms_norm(x, weight, EPS), impl.rms_norm(x, weight, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [(BF16, 1, 4096), (BF16, 128, 4096), (BF16, 7, 1536), (BF16, 30, 5), (torch.float32, 2000, 96)],
    ids=str,
)
def test_norm_on_a_gpu_equals_the_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    weight = torch.randn(width, dtype=torch.float32).to(dtype)
    for wide, delta in (
        (torch.randn(rows, width + 8).to(dtype), torch.randn(rows, width).to(dtype)),
        (exact(rows, width + 8, dtype=dtype), exact(rows, width, dtype=dtype)),
    ):
        x = wide[:, 8:]
        expected = norm_reference.rms_norm(x, weight, EPS)
        total, expected_after = norm_reference.add_rms_norm(x, delta, weight, EPS)
        got = rms_norm(wide.cuda()[:, 8:], weight.cuda(), EPS)
        got_total, got_after = add_rms_norm(wide.cuda()[:, 8:], delta.cuda(), weight.cuda(), EPS)
        assert torch.equal(got_total.cpu(), total)
        # Sums are taken in another order, so a bf16 value may fall on the other side of a rounding: 2**-8 of itself,
        # of one value in thousands.
        assert error(got, expected) < 3e-4 and error(got_after, expected_after) < 3e-4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "interleaved", "rows", "heads", "dim", "turning"),
    [
        (BF16, False, 1, 32, 128, 64),
        (BF16, True, 128, 32, 64, 64),
        (BF16, True, 9, 33, 96, 32),
        (torch.float32, False, 5, 3, 80, 80),
    ],
    ids=str,
)
def test_rope_on_a_gpu_equals_the_reference_bit_by_bit(
    dtype: torch.dtype, interleaved: bool, rows: int, heads: int, dim: int, turning: int
) -> None:
    x, rotation = torch.randn(rows, heads, dim + 8).to(dtype), angles(rows, turning, dtype)
    expected = rope_reference.rotate(x[..., 8:], rotation, interleaved)
    assert torch.equal(rotate(x.cuda()[..., 8:], on("cuda", rotation), interleaved).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 17, 128])
@pytest.mark.parametrize(
    ("dtype", "heads", "nope", "rope", "rank"), [(BF16, 32, 128, 64, 512), (torch.float32, 3, 24, 8, 40)], ids=str
)
def test_query_on_a_gpu_equals_the_reference(
    dtype: torch.dtype, rows: int, heads: int, nope: int, rope: int, rank: int
) -> None:
    q, rotation = torch.randn(rows, heads, nope + rope).to(dtype), angles(rows, rope, dtype)
    key_up = torch.randn(heads, nope + 16, rank).to(dtype)[:, :nope]
    got = rope_query(q.cuda(), key_up.cuda(), on("cuda", rotation)).cpu()
    expected = rope_reference.rope_query(q.double(), key_up.double(), Rotation(rotation.cos, rotation.sin))
    assert error(got[..., :rank], expected[..., :rank]) < 1e-2  # products of bf16 operands, rounded once
    assert torch.equal(got[..., rank:], rope_reference.rotate(q[..., nope:], rotation, True))
    value_up = torch.randn(heads, 16, rank).to(dtype).transpose(1, 2)
    values = per_head_matmul(got.cuda()[..., :rank], value_up.cuda())
    assert values.is_contiguous()
    assert error(values, linear_reference.per_head_matmul(got[..., :rank].double(), value_up.double())) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rows", "outputs", "width"),
    [(BF16, 1, 32, 4096), (BF16, 128, 32, 4096), (BF16, 300, 4, 96), (torch.float32, 7, 3, 1100)],
    ids=str,
)
def test_wide_products_on_a_gpu_keep_the_weight_unrounded(
    dtype: torch.dtype, rows: int, outputs: int, width: int
) -> None:
    x, weight = torch.randn(rows, width + 8).to(dtype), torch.randn(outputs, width)
    expected = linear_reference.fp32_linear(x[:, 8:].double(), weight.double(), 0.3)
    assert error(fp32_linear(x.cuda()[:, 8:], weight.cuda(), 0.3), expected) < 1e-5  # float32 throughout


@pytest.mark.gpu
def test_these_ops_can_be_captured_in_a_graph_and_replayed_on_new_values() -> None:
    q, key_up = torch.randn(4, 8, 96).bfloat16().cuda(), torch.randn(8, 64, 128).bfloat16().cuda()
    rotation, weight = on("cuda", angles(4, 32, torch.bfloat16)), torch.randn(160).bfloat16().cuda()
    rms_norm(rope_query(q, key_up, rotation), weight, EPS)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(rope_query(q, key_up, rotation), weight, EPS)
    q.copy_(torch.randn(4, 8, 96))
    graph.replay()
    assert torch.equal(out, rms_norm(rope_query(q, key_up, rotation), weight, EPS))
