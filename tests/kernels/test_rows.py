"""Tests row layouts: sizes, exact round trips, and fp8 against its definition."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.kernels.rows import RowLayout, gqa_row, index_key_row, mla_row


@pytest.mark.parametrize(
    ("layout", "row_bytes", "stride_bytes"),
    [
        (mla_row(512, 64, torch.bfloat16), 1152, 1152),
        (mla_row(512, 64, torch.bfloat16, fp8=True), 656, 656),
        (mla_row(130, 6, torch.float32, fp8=True), 130 + 2 * 4 + 12, 160),
        (gqa_row(3, 5, torch.bfloat16), 60, 64),
        (index_key_row(128, torch.bfloat16), 256, 256),
        (index_key_row(128, torch.bfloat16, fp8=True), 132, 132),
        (index_key_row(130, torch.bfloat16, fp8=True), 138, 140),
    ],
)
def test_rows_have_the_documented_sizes(layout: RowLayout, row_bytes: int, stride_bytes: int) -> None:
    assert (layout.row_bytes, layout.stride_bytes) == (row_bytes, stride_bytes)
    assert layout.stored_width * layout.stored_dtype.itemsize == stride_bytes


@given(st.integers(1, 40), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), st.integers(0, 2**31))
@examples(30)
def test_plain_rows_are_decoded_exactly(width: int, dtype: torch.dtype, seed: int) -> None:
    layout = RowLayout(width, dtype)
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    stored = torch.full((3, layout.stored_width), float("nan"), dtype=dtype)
    stored.copy_(layout.encode(values))
    assert torch.equal(layout.decode(stored), values)


def nearest_e4m3(value: float) -> float:
    """Returns the nearest finite e4m3 number by the definition of the format. Ties go to the even fraction."""
    finite = []
    for exponent in range(16):
        for fraction in range(8):
            if exponent == 15 and fraction == 7:
                continue  # NaN
            size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
            finite.append((size, fraction % 2))
    size, _odd = min(finite, key=lambda number: (abs(number[0] - abs(value)), number[1]))
    return math.copysign(size, value)


@given(st.integers(1, 300), st.integers(0, 9), st.sampled_from([1e-6, 1.0, 3e4]), st.integers(0, 2**31))
@examples(15)
def test_fp8_rows_are_scaled_in_blocks_of_128_and_rounded(latent: int, rope: int, size: float, seed: int) -> None:
    layout = mla_row(latent, rope, torch.float32, fp8=True)
    values = size * torch.randn(2, latent + rope, generator=torch.Generator().manual_seed(seed))
    stored = torch.full((2, layout.stride_bytes), 0xAB, dtype=torch.uint8)
    stored.copy_(layout.encode(values))
    decoded = layout.decode(stored)
    assert torch.equal(decoded[:, latent:], values[:, latent:].bfloat16().float())
    for row in range(2):
        for first in range(0, latent, 128):
            block = values[row, first : min(first + 128, latent)]
            scale = (block.abs().max() / 448).clamp_min(1e-30)
            expected = [nearest_e4m3(float(value / scale)) * float(scale) for value in block]
            torch.testing.assert_close(
                decoded[row, first : first + len(block)], torch.tensor(expected), rtol=1e-6, atol=0
            )


def test_a_block_of_zeros_is_decoded_as_zeros() -> None:
    layout = mla_row(130, 2, torch.bfloat16, fp8=True)
    assert torch.equal(layout.decode(layout.encode(torch.zeros(1, 132).bfloat16())), torch.zeros(1, 132).bfloat16())
