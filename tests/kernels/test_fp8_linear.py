"""Compares fp8_linear with a float64 product of the same codes and scales, over poisoned memory.

The error is measured against |x| @ |W|^T of the quantised factors, without the rounding of the result to its dtype.
"""

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreted import INTERPRETED
from matrix import matrix
from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight, quantise
from hotset.kernels.linear import Linear

BF16 = torch.bfloat16
ERROR_BAR = 2e-3
DEVICE = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def impl() -> ModuleType:
    assert INTERPRETED or torch.cuda.is_available()
    return kernels_of("linear", "triton_fp8")


def random_weight(outputs: int, inputs: int, block_rows: int = SCALE_BLOCK, device: torch.device = DEVICE) -> Fp8Weight:
    """Returns random codes, and scales that differ from block to block by a factor of up to 100."""
    weight = Fp8Weight.empty((outputs, inputs), device, block_rows)
    weight.codes.copy_((torch.randn(outputs, inputs, device=device) * 100).clamp(-448, 448))
    weight.scales.copy_(10.0 ** (2 * torch.rand(weight.scales.shape, device=device) - 5))
    return weight


def error(out: Tensor, x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> float:
    """Returns the largest error of `out`, beyond the rounding of `out` itself, as a fraction of |x| @ |W|^T."""
    codes, scales = quantise(x)
    factors = codes.double() * scales.double().repeat_interleave(SCALE_BLOCK, 1)[:, : x.shape[1]]
    weight_scales = weight.output_scales().double().repeat_interleave(SCALE_BLOCK, 1)[:, : x.shape[1]]
    values = weight.codes.double() * weight_scales
    expected = factors @ values.t() + (0 if bias is None else bias.double())
    rounding = 0.5 * torch.finfo(out.dtype).eps * expected.abs()
    assert out.shape == expected.shape and not out.isnan().any()
    return float((((out.double() - expected).abs() - rounding) / (factors.abs() @ values.abs().t())).max())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "block_rows", "splits", "fused", "dtype"),
    matrix(
        [1, 3, 16, 33],
        [1, 72],  # 72: a partial tile and a partial block
        [208, 384],  # 208: a partial group
        [128, 64, 32],
        [1, 3],
        [(False, BF16), (True, BF16), (False, torch.float32), (True, torch.float32)],
    ),
)
def test_fp8_linear_equals_a_float64_product_of_the_same_codes(
    tokens: int, outputs: int, inputs: int, block_rows: int, splits: int, fused: bool, dtype: torch.dtype
) -> None:
    weight, bias = random_weight(outputs, inputs, block_rows), torch.randn(outputs).to(dtype)
    x = torch.randn(tokens, inputs + 2).to(dtype)[:, 2:]  # tokens have a stride
    tile = replace(impl().tile_for(tokens, weight), outputs=64, fused=fused)
    counters = impl().make_counters(weight)
    splits = min(splits, weight.scales.shape[1])
    out = impl().fp8_linear_in_tiles(x, weight, bias, counters, tile, splits)
    assert out.dtype == dtype
    assert error(out, x, weight, bias) < ERROR_BAR
    assert not counters.any()  # for the next call


@pytest.mark.interpreted
@pytest.mark.parametrize("fused", [False, True])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(fused: bool) -> None:
    weight, x = random_weight(64, 256), torch.randn(16, 256).to(BF16)
    tile = replace(impl().WIDE_TILES[16], fused=fused)
    counters = impl().make_counters(weight)
    whole = impl().fp8_linear_in_tiles(x, weight, None, counters, tile, 2)
    for tokens in (slice(3, 4), slice(5, 16)):
        part = impl().fp8_linear_in_tiles(x[tokens], weight, None, counters, tile, 2)
        assert torch.equal(part, whole[tokens])
    assert error(whole, x, weight) < ERROR_BAR


@pytest.mark.interpreted
def test_a_batch_may_have_any_number_of_tokens() -> None:
    weight = random_weight(70, 200, block_rows=64)
    counters = impl().make_counters(weight)
    for tokens in (0, 1, 130):
        x = torch.randn(tokens, 200)
        out = impl().fp8_linear_in_tiles(x, weight, None, counters, impl().tile_for(tokens, weight))
        assert out.shape == (tokens, 70)
        assert tokens == 0 or error(out, x, weight) < ERROR_BAR


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(6, 144, 384), (4, 48, 512)])
def test_the_library_gets_its_operands_in_the_layout_that_it_requires(tokens: int, outputs: int, inputs: int) -> None:
    """The rules are those of torch's ScaledBlas.cpp for BlockWise1x128 and BlockWise128x128."""
    x, weight = torch.randn(tokens, inputs).to(BF16), random_weight(outputs, inputs)
    assert impl().library_supports(x.dtype, weight, None)
    arguments = impl().library_arguments(impl().quantise(x), weight)
    codes, scales, weight_codes, weight_scales = (arguments[name] for name in ("mat_a", "scale_a", "mat_b", "scale_b"))
    padded, groups = codes.shape[0], inputs // SCALE_BLOCK
    padded_groups = -(-groups // 4) * 4
    assert padded % 4 == 0 and codes.is_contiguous() and weight_codes.t().is_contiguous()
    assert scales.shape == (padded, groups) and scales.stride() == (1, padded)
    assert weight_scales.shape == (padded_groups, -(-outputs // 128))
    assert weight_scales.stride(0) == 1 and weight_scales.stride(1) == padded_groups
    factors = codes.double() * scales.double().repeat_interleave(SCALE_BLOCK, 1)
    scale_of_value = weight_scales[:groups].repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    product = factors @ (weight_codes.double() * scale_of_value[:, :outputs].double())
    assert error(product[:tokens], x, weight) < 1e-9


@pytest.mark.interpreted
def test_the_library_is_not_used_for_what_it_refuses() -> None:
    supports, weight = impl().library_supports, random_weight(144, 256)
    assert supports(BF16, weight, None)
    assert not supports(BF16, weight, torch.zeros(144, dtype=BF16))
    assert not supports(torch.float32, weight, None)
    assert not supports(BF16, random_weight(144, 256, block_rows=64), None)
    assert not supports(BF16, random_weight(136, 256), None)
    assert not supports(BF16, random_weight(144, 192), None)


@pytest.mark.interpreted
@pytest.mark.parametrize("outputs", [64, 128, 576, 1536, 4096, 7168, 24576])
@pytest.mark.parametrize("inputs", [64, 1152, 1536, 2048, 6144, 7168, 16384])
def test_splits_divide_the_groups_without_an_empty_one(outputs: int, inputs: int) -> None:
    for tile in (*impl().WIDE_TILES.values(), *impl().NARROW_TILES.values()):
        groups, splits = -(-inputs // SCALE_BLOCK), impl().splits_for(outputs, inputs, tile)
        assert 1 <= splits <= groups
        assert (splits - 1) * -(-groups // splits) < groups  # the last split has a group
        if tile.max_programs == 0:
            assert splits == 1  # blocks of tokens share no counters


def random_call(tokens: int, outputs: int, inputs: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    device = torch.device("cuda")
    return {
        "x": torch.randn(tokens, inputs, device=device).to(dtype),
        "weight": random_weight(outputs, inputs, device=device),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 128, 129, 1027])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4096, 7168), (7168, 2048), (24576, 1536), (7168, 16384), (2240, 7168), (7168, 256), (2304, 1152), (200, 300)],
)
def test_on_a_gpu_products_equal_float64(tokens: int, outputs: int, inputs: int) -> None:
    call = random_call(tokens, outputs, inputs)
    layer = Linear(call["weight"])
    for _ in range(2):
        assert error(layer(call["x"]), call["x"], call["weight"]) < ERROR_BAR


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("block_rows", [128, 64, 32, 8])
def test_on_a_gpu_float32_and_small_blocks_equal_float64(tokens: int, block_rows: int) -> None:
    device = torch.device("cuda")
    weight, bias = random_weight(424, 1300, block_rows, device), torch.randn(424, device=device)
    x = torch.randn(tokens, 1300, device=device)
    assert error(Linear(weight, bias)(x), x, weight, bias) < ERROR_BAR


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 7168), (24576, 1536), (576, 7168)])
def test_on_a_gpu_a_token_has_the_same_bits_in_every_batch_with_the_same_tile(outputs: int, inputs: int) -> None:
    call = random_call(128, outputs, inputs)
    layer, x = Linear(call["weight"]), call["x"]
    lowest = 1
    for most in (8, 16, 32, 64, 128):
        whole = layer(x[:most])
        for tokens in {lowest, (lowest + most) // 2, most - 1}:
            assert torch.equal(layer(x[:tokens]), whole[:tokens])
            assert torch.equal(layer(x[most - tokens : most]), whole[most - tokens :])
        lowest = most + 1


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_on_a_gpu_all_ways_to_read_the_factors_give_the_same_bits(tokens: int, splits: int) -> None:
    """A kernel that starts early must not read what the kernel before it has yet to write: x, or codes of x."""
    weight = random_weight(1000, 2048, device=torch.device("cuda"))
    counters, tile = impl().make_counters(weight), impl().WIDE_TILES[tokens]
    inputs = [torch.randn(tokens, 2048, device="cuda").to(BF16) for _ in range(4)]
    plain = replace(tile, fused=False)
    expected = [impl().fp8_linear_in_tiles(x, weight, None, counters, plain, splits) for x in inputs]
    assert error(expected[0], inputs[0], weight) < ERROR_BAR
    buffer = torch.empty_like(inputs[0])
    for fused, early in itertools.product((False, True), repeat=2):
        way = replace(tile, fused=fused, starts_early=early)
        for x, result in zip(inputs, expected, strict=True):
            buffer.copy_(x)
            assert torch.equal(impl().fp8_linear_in_tiles(buffer, weight, None, counters, way, splits), result), way


@pytest.mark.not_interpreted
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_the_specification_equals_a_float64_product_of_the_same_codes(dtype: torch.dtype) -> None:
    for tokens, outputs, inputs, block_rows in ((1, 200, 300, 128), (5, 96, 256, 32), (3, 1, 40, 8)):
        weight, bias = random_weight(outputs, inputs, block_rows), torch.randn(outputs).to(dtype)
        x = torch.randn(tokens, inputs).to(dtype)
        assert error(Linear(weight, bias)(x), x, weight, bias) < 1e-6
