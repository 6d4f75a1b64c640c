"""Compares the codes and scales of quantise with `fp8.quantise`, bit by bit, over poisoned memory."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from interpreted import triton_impl
from torch import Tensor

from hotset.kernels import fp8
from hotset.kernels.quantise import quantise

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_same_bits(codes: Tensor, scales: Tensor, x: Tensor) -> None:
    tokens = x.shape[0]
    expected_codes, expected_scales = fp8.quantise(x)
    assert scales.stride() == (1, max(1, scales.shape[0]))
    assert torch.equal(codes[:tokens].view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales[:tokens].view(torch.int32), expected_scales.view(torch.int32))


def values_with_ties(tokens: int, width: int, seed: int, exponents: int = 60) -> Tensor:
    """Returns small integers times a power of two per token: many of their quotients lie between two codes."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-256, 257, (tokens, width), generator=generator)
    return integers * 2.0 ** torch.randint(-exponents, exponents, (tokens, 1), generator=generator)


def all_pairs_of_mantissas() -> Tensor:
    """Returns groups [128, 128] that begin with their largest value: every pair of a largest and another bf16 mantissa.

    For 13 of them, the quotient is a tie that the product with the inverse of the scale would miss.
    """
    mantissa = torch.arange(128, 256)
    return torch.where(mantissa == 128, mantissa[:, None], mantissa / 2).to(BF16) * 2.0**-10


@pytest.mark.interpreted
def test_every_quotient_of_two_bf16_numbers_is_rounded_as_a_division() -> None:
    x = all_pairs_of_mantissas()
    assert int((x[:, 0].float() * 1024).sum()) == sum(range(128, 256))
    assert_same_bits(*triton_impl("quantise").quantise(x, 128), x)


@pytest.mark.interpreted
@examples(6)
@given(
    tokens=st.sampled_from([1, 3, 9]),
    width=st.sampled_from([1, 100, 128, 300]),
    align=st.sampled_from([1, 4]),
    dtype=st.sampled_from([BF16, torch.float32]),
    ties=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_codes_and_scales_have_the_right_bits(
    tokens: int, width: int, align: int, dtype: torch.dtype, ties: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = values_with_ties(tokens, width + 3, seed) if ties else torch.randn(tokens, width + 3)
    x = (x * (torch.rand(tokens, 1) > 0.2)).to(dtype)[:, 3:]  # some tokens are zero; tokens have a stride
    padded = -(-tokens // align) * align
    codes, scales = triton_impl("quantise").quantise(x, padded)
    assert codes.shape == (padded, width) and scales.shape == (padded, -(-width // 128))
    assert_same_bits(codes, scales, x)


@pytest.mark.interpreted
def test_tokens_are_padded_and_the_padding_is_not_written() -> None:
    x = torch.randn(5, 200)
    quantised = quantise(x)
    assert quantised.codes.shape == (8, 200) and quantised.scales.shape == (8, 2)
    assert quantised.codes[5:].float().isnan().all() and quantised.scales[5:].isnan().all()
    assert_same_bits(quantised.codes, quantised.scales, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (1, 7168), (17, 576), (64, 2048), (300, 7168), (4097, 1536)])
def test_on_a_gpu_codes_and_scales_have_the_bits_of_a_cpu(dtype: torch.dtype, tokens: int, width: int) -> None:
    for x in (torch.randn(tokens, width + 8), values_with_ties(tokens, width + 8, seed=tokens)):
        values = x.to(dtype)[:, 8:]
        quantised = quantise(values.cuda())
        assert_same_bits(quantised.codes.cpu(), quantised.scales.t().cpu().t(), values)
