"""Compares norm, rope, rope_query and per_head_matmul with plain formulas, and their kernels with the references."""

import pytest
import torch
from interpreted import triton_impl
from kernel_tensors import draw_exact, draw_rotation, on_device
from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.linear import per_head_matmul
from hotset.kernels.linear import reference as linear_reference
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.norm import reference as norm_reference
from hotset.kernels.rope import Rotation, rope_query
from hotset.kernels.rope import reference as rope_reference

EPS = 1e-6
BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
needs_interpreter = pytest.mark.interpreted


def error(got: Tensor, expected: Tensor) -> float:
    """Returns the relative error in the Frobenius norm, or NaN if any value is NaN."""
    difference = got.cpu().double() - expected.cpu().double()
    return float(difference.norm() / expected.double().norm())


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.randn(3, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    for row, normed in zip(x, rms_norm(x, weight, EPS), strict=True):
        mean_square = sum(float(value) ** 2 for value in row) / 40
        torch.testing.assert_close(normed, row / (mean_square + EPS) ** 0.5 * weight)


def test_bf16_norm_rounds_before_it_multiplies_by_the_weight() -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), scaled * weight)
    assert not torch.equal(rms_norm(x, weight, EPS), (scaled.float() * weight.float() * 1.001).bfloat16())


def test_add_rms_norm_returns_the_sum_and_its_norm() -> None:
    x, delta, weight = (torch.randn(4, 24).bfloat16() for _ in range(3))
    total, normed = add_rms_norm(x, delta, weight[0], EPS)
    assert torch.equal(total, x + delta) and torch.equal(normed, rms_norm(x + delta, weight[0], EPS))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_rotates_each_pair_by_its_angle_and_copies_the_remaining_values(interleaved: bool) -> None:
    x, angles = torch.randn(3, 2, 10, dtype=torch.float64), torch.randn(3, 1, 3, dtype=torch.float64)
    out = rope_reference.rotate(x, Rotation(angles.cos(), angles.sin()), interleaved)
    for pair in range(3):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
        rotated = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles[..., pair])
        torch.testing.assert_close(torch.complex(out[..., pair], out[..., pair + 3]), rotated)
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_rope_query_absorbs_each_head_and_rotates_the_rope_part() -> None:
    q, key_up = torch.randn(3, 2, 9, dtype=torch.float64), torch.randn(2, 5, 7, dtype=torch.float64)
    angles = torch.randn(3, 1, 2, dtype=torch.float64)
    rotation = Rotation(angles.cos(), angles.sin())
    out = rope_query(q, key_up, rotation)
    for token in range(3):
        for head in range(2):
            torch.testing.assert_close(out[token, head, :7], q[token, head, :5] @ key_up[head])
    assert torch.equal(out[..., 7:], rope_reference.rotate(q[..., 5:], rotation, True))


@needs_interpreter
@DTYPES
@pytest.mark.parametrize("width", [1, 40, 128])
def test_norm_kernel_equals_the_reference(dtype: torch.dtype, width: int) -> None:
    impl = triton_impl("norm")
    weight = torch.randn(width).to(dtype)
    wide = draw_exact(5, width + 3, dtype=dtype)
    # In float32, the reference rounds the two products of the norm only once.
    compare = torch.equal if dtype == torch.bfloat16 else torch.allclose
    x = wide[:, 1 : width + 1]  # not contiguous
    assert compare(impl.rms_norm(x, weight, EPS), norm_reference.rms_norm(x, weight, EPS))
    delta = draw_exact(5, width, dtype=dtype)
    for got, expected in zip(
        impl.add_rms_norm(x, delta, weight, EPS), norm_reference.add_rms_norm(x, delta, weight, EPS), strict=True
    ):
        assert compare(got, expected)


@needs_interpreter
@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 6), (9, 16)])
def test_rope_kernel_equals_the_reference(dtype: torch.dtype, heads: int, dim: int) -> None:
    x, rotation = torch.randn(4, heads + 2, dim + 1).to(dtype)[:, 1 : heads + 1, 1:], draw_rotation(4, dim, dtype)
    got = torch.full(x.shape, float("nan"), dtype=dtype)
    triton_impl("rope").rotate_pairs_into(got, x, rotation)
    assert torch.equal(got, rope_reference.rotate_pairs(x, rotation))


@needs_interpreter
def test_rope_kernel_writes_into_a_slice_and_nothing_else() -> None:
    x, rotation = torch.randn(2, 3, 8), draw_rotation(2, 8, torch.float32)
    out = torch.full((2, 3, 13), float("nan"))
    triton_impl("rope").rotate_pairs_into(out[..., 5:], x, rotation)
    assert torch.equal(out[..., 5:], rope_reference.rotate_pairs(x, rotation)) and bool(out[..., :5].isnan().all())


@needs_interpreter
def test_an_op_finds_its_kernels_after_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing `triton_impl` sets this name in the op's package. The package must not use the name otherwise."""
    impl = triton_impl("norm")
    monkeypatch.setattr("hotset.kernels.norm.has_fast_path", lambda x: True)
    x, weight = draw_exact(2, 8, dtype=BF16), torch.randn(8).bfloat16()
    for _ in range(2):
        assert torch.equal(rms_norm(x, weight, EPS), impl.rms_norm(x, weight, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tokens", "width"),
    [(BF16, 1, 4096), (BF16, 128, 4096), (BF16, 7, 1536), (BF16, 30, 5), (torch.float32, 2000, 96)],
    ids=str,
)
def test_norm_on_a_gpu_equals_the_reference(dtype: torch.dtype, tokens: int, width: int) -> None:
    weight = torch.randn(width, dtype=torch.float32).to(dtype)
    for wide, delta in (
        (torch.randn(tokens, width + 8).to(dtype), torch.randn(tokens, width).to(dtype)),
        (draw_exact(tokens, width + 8, dtype=dtype), draw_exact(tokens, width, dtype=dtype)),
    ):
        x = wide[:, 8:]
        expected = norm_reference.rms_norm(x, weight, EPS)
        total, expected_sum_normed = norm_reference.add_rms_norm(x, delta, weight, EPS)
        got = rms_norm(wide.cuda()[:, 8:], weight.cuda(), EPS)
        got_total, got_sum_normed = add_rms_norm(wide.cuda()[:, 8:], delta.cuda(), weight.cuda(), EPS)
        assert torch.equal(got_total.cpu(), total)
        assert_same_but_for_rounding(got, expected)
        assert_same_but_for_rounding(got_sum_normed, expected_sum_normed)


def assert_same_but_for_rounding(got: Tensor, expected: Tensor) -> None:
    """The kernel sums in another order. Therefore one bf16 value in thousands may be rounded the other way before it is
    multiplied by the weight, and the product too: this changes it by less than 2**-6 of itself."""
    if expected.dtype != BF16:
        assert error(got, expected) < 1e-5
        return
    difference = (got.cpu().double() - expected.double()).abs()
    assert bool((difference <= expected.double().abs() * 2**-6).all())
    assert int((difference > 0).sum()) <= 1 + expected.numel() // 100


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tokens", "heads", "dim"), [(BF16, 128, 32, 64), (BF16, 9, 33, 32), (torch.float32, 5, 3, 80)], ids=str
)
def test_rope_on_a_gpu_equals_the_reference(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    x, rotation = torch.randn(tokens, heads, dim + 8).to(dtype), draw_rotation(tokens, dim, dtype)
    got = torch.full((tokens, heads, dim), float("nan"), dtype=dtype, device="cuda")
    kernels_of("rope").rotate_pairs_into(got, x.cuda()[..., 8:], on_device(rotation, "cuda"))
    assert torch.equal(got.cpu(), rope_reference.rotate_pairs(x[..., 8:], rotation))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 17, 128])
@pytest.mark.parametrize(
    ("dtype", "heads", "nope", "rope", "rank"), [(BF16, 32, 128, 64, 512), (torch.float32, 3, 24, 8, 40)], ids=str
)
def test_rope_query_and_per_head_matmul_on_a_gpu_equal_the_reference(
    dtype: torch.dtype, tokens: int, heads: int, nope: int, rope: int, rank: int
) -> None:
    q, rotation = torch.randn(tokens, heads, nope + rope).to(dtype), draw_rotation(tokens, rope, dtype)
    key_up = torch.randn(heads, nope + 16, rank).to(dtype)[:, :nope]
    got = rope_query(q.cuda(), key_up.cuda(), on_device(rotation, "cuda")).cpu()
    expected = rope_reference.rope_query(q.double(), key_up.double(), Rotation(rotation.cos, rotation.sin))
    assert error(got[..., :rank], expected[..., :rank]) < 1e-2  # in bf16, the result is rounded once
    assert torch.equal(got[..., rank:], rope_reference.rotate(q[..., nope:], rotation, True))
    value_up = torch.randn(heads, 16, rank).to(dtype).transpose(1, 2)
    values = per_head_matmul(got.cuda()[..., :rank], value_up.cuda())
    assert values.is_contiguous()
    assert error(values, linear_reference.per_head_matmul(got[..., :rank].double(), value_up.double())) < 1e-2
