"""Random cases for experts with weights in fp8, and their float64 model: products of the same quantised numbers."""

import importlib
from dataclasses import replace
from typing import Any

import torch
from experts_cases import Case, draw_tokens
from interpreted import INTERPRETED
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.fp8 import E4M3_MAX, SCALE_BLOCK, Fp8Weight, common_block_rows, quantise

# The limit of the error of a product, relative to |x| @ |W|^T. The matrix units of Hopper keep about 14 bits of the sum
# over a group. On a CPU only float32 is rounded.
PRODUCT_ERROR = 1e-6 if INTERPRETED else 2e-3
# The limit of the relative error of a result in bf16. It is rounded up to three times: activation, result, sum. An
# activation near the middle between two codes may get the other code, which changes it by up to 2**-3. This happens to
# one in 30 (the ratio of the steps of bf16 and e4m3), and the errors of the activations of a sum are independent:
# 2**-4 / sqrt(30) is about 1e-2. A wrong expert, token, weight or scale causes an error of about 1.
BF16_ERROR = 2e-2
E4M3_NAN = 0x7F


def fp8_impl() -> Any:
    return importlib.import_module("hotset.kernels.experts.triton_fp8")


def draw_weight(shape: tuple[int, ...], block_rows: int, device: str = "cpu") -> Fp8Weight:
    """Draws codes of all magnitudes, and scales that differ by up to a factor of 4 between blocks."""
    weight = Fp8Weight.empty(shape, torch.device(device), block_rows)
    weight.codes.copy_(torch.randn(shape, device=device).mul_(100).clamp_(-E4M3_MAX, E4M3_MAX))
    weight.scales.uniform_(0.5, 2).mul_(shape[-1] ** -0.5 / 100)
    return weight


def draw_weights(
    count: int, hidden: int, width: int, block_rows: int = SCALE_BLOCK, device: str = "cpu"
) -> tuple[Fp8Weight, Fp8Weight]:
    gate_up = draw_weight((count, 2 * width, hidden), common_block_rows(width, block_rows), device)
    return gate_up, draw_weight((count, hidden, width), block_rows, device)


def draw_case(tokens: int, k: int, weights: tuple[Fp8Weight, Fp8Weight], dtype: torch.dtype = torch.float32) -> Case:
    """Draws random tokens with k distinct experts each. The groups of a token differ in magnitude."""
    case, hidden = draw_tokens(tokens, k, *weights), weights[0].shape[-1]
    return replace(case, x=(case.x * torch.linspace(0.1, 3, hidden, device=case.x.device)).to(dtype))


def poison(case: Case, unused: list[int]) -> None:
    """Makes the results of these experts NaN."""
    for weight in (case.gate_up, case.down):
        weight.codes.view(torch.uint8)[unused] = E4M3_NAN
        weight.scales[unused] = float("nan")


def dequantised(x: Tensor) -> Tensor:
    codes, scales = quantise(x)
    return codes.double() * scales.double().repeat_interleave(SCALE_BLOCK, -1)[..., : x.shape[-1]]


def expected_activation(x: Tensor, gate_up: Fp8Weight) -> Tensor:  # one token, one expert
    gate, up = (gate_up.dequantised(torch.float64) @ dequantised(x)).chunk(2)
    return F.silu(gate) * up


def expected_output(case: Case) -> Tensor:
    out = torch.zeros_like(case.x, dtype=torch.float64)
    for token, ids in enumerate(case.expert_ids.tolist()):
        for expert, weight in zip(ids, case.weights[token].tolist(), strict=True):
            if expert != EMPTY:
                activation = expected_activation(case.x[token], case.gate_up[expert]).to(case.x.dtype)
                out[token] += weight * (case.down[expert].dequantised(torch.float64) @ dequantised(activation))
    return out


def group_scales(values: Tensor) -> Tensor:
    return torch.stack([group.abs().max() / E4M3_MAX for group in values.split(SCALE_BLOCK)])


def per_value(scales: Tensor, width: int) -> Tensor:
    return scales.double().repeat_interleave(SCALE_BLOCK)[:width]


def check_activation(codes: Tensor, scales: Tensor, token: Tensor, gate_up: Fp8Weight) -> None:
    """Compares one pair's quantised activation with float64, for an error of PRODUCT_ERROR in gate and in up."""
    weight, x = gate_up.dequantised(torch.float64), dequantised(token)
    (gate, up), (gate_size, up_size) = (weight @ x).chunk(2), (weight.abs() @ x.abs()).chunk(2)
    exact = F.silu(gate) * up
    # The derivative of silu is at most 1.1.
    error = PRODUCT_ERROR * (1.1 * gate_size * (up.abs() + PRODUCT_ERROR * up_size) + F.silu(gate).abs() * up_size)
    error += exact.abs() * torch.finfo(token.dtype).eps
    assert ((scales.double() - group_scales(exact)).abs() <= group_scales(error) + 1e-7 * scales).all()
    step = per_value(scales, len(exact))
    values = codes.double() * step
    # e4m3 has 3 bits after the first, and steps of 2**-9 near zero.
    rounding = torch.maximum(values.abs() * 2**-4, step * 2**-10)
    assert ((values - exact).abs() <= rounding * (1 + 1e-6) + error).all()


def check_products(case: Case, tiles: Any) -> None:
    """Checks every pair's quantised input, activation and result, each product with its own quantised input."""
    impl, k = fp8_impl(), case.expert_ids.shape[1]
    by_expert = impl.sort_by_expert(case.expert_ids, case.gate_up.shape[0], tiles.block_pairs)
    x = impl.quantise_pairs(case.x, by_expert)
    activation = impl.activation_of(x, by_expert, case.gate_up, case.x.dtype, tiles, slots=2)
    results = impl.results_of(activation, by_expert, case.down, torch.float32, tiles, slots=2)
    for index, pair in enumerate(by_expert.pairs.tolist()):
        token, expert = case.x[pair // k], int(case.expert_ids.flatten()[pair])
        if expert == EMPTY:
            continue
        codes, scales = quantise(token)
        assert torch.equal(x.codes[index].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(x.scales[:, index], scales)
        check_activation(activation.codes[index], activation.scales[:, index], token, case.gate_up[expert])
        down = case.down[expert].dequantised(torch.float64)
        values = activation.codes[index].double() * per_value(activation.scales[:, index], down.shape[1])
        error = (results[index].double() - down @ values).abs()
        assert (error <= PRODUCT_ERROR * (down.abs() @ values.abs())).all()
