"""experts of a single token with bfloat16 weights in Triton. Two launches take as long as it takes to read the weights.

Pairs of token and expert are not sorted: the experts of one token differ, so no two pairs read the same weights. A
program of the first product computes one value of the activation of a pair. A program of the second computes one output
of every pair, and their weighted sum.

Both are launched early, although they fill the GPU: thousands of short programs spread evenly however they start.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

MAX_INPUTS = 8192  # of a program
INPUTS_OF_WARP = 1024  # of the first product
WEIGHTS_OF_WARP = 8192  # of the second product, which takes a fifth longer with half as many
OPTIONS = {"enable_fp_fusion": True} | EARLY_LAUNCH

_EMPTY = tl.constexpr(EMPTY)


def supports(x: Tensor, down: Tensor) -> bool:
    """Returns whether these kernels can compute the experts of x."""
    return x.shape[0] == 1 and x.dtype == torch.bfloat16 and max(down.shape[1:]) <= MAX_INPUTS


def experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, first_expert: int = 0
) -> Tensor:
    (count, hidden, width), k = down.shape, expert_ids.shape[1]
    activation = torch.empty(k, width, dtype=x.dtype, device=x.device)
    out = torch.empty(1, hidden, dtype=x.dtype, device=x.device)
    expert_ids = expert_ids.contiguous()
    sizes = {"first_expert": first_expert, "experts": count, "hidden": hidden, "width": width}
    tile_hidden, tile_pairs, tile_width = (triton.next_power_of_2(size) for size in (hidden, k, width))
    _gate_up_kernel[(width, k)](
        x=x.contiguous(),
        expert_ids=expert_ids,
        gate_up=gate_up.contiguous(),
        activation=activation,
        **sizes,
        tile_inputs=tile_hidden,
        num_warps=max(1, tile_hidden // INPUTS_OF_WARP),
        **OPTIONS,
    )
    _down_kernel[(hidden,)](
        activation=activation,
        expert_ids=expert_ids,
        weights=weights.contiguous(),
        down=down.contiguous(),
        out=out,
        **sizes,
        k=k,
        tile_pairs=tile_pairs,
        tile_inputs=tile_width,
        num_warps=min(16, max(1, tile_pairs * tile_width // WEIGHTS_OF_WARP)),
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,  # [hidden]
    expert_ids: tl.tensor,  # [k]
    gate_up: tl.tensor,  # [experts, 2 * width, hidden]
    activation: tl.tensor,  # [k, width]
    first_expert: tl.tensor,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    output, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ids + pair).to(tl.int64) - first_expert
    if (expert < 0) | (expert >= experts):
        return
    entry = tl.arange(0, tile_inputs)
    gate_at = gate_up + (expert * (2 * width) + output) * hidden + entry
    gate_weights = tl.load(gate_at, mask=entry < hidden, other=0)
    up_weights = tl.load(gate_at + width * hidden, mask=entry < hidden, other=0)
    values = tl.load(x + entry, mask=entry < hidden, other=0).to(tl.float32)
    gate = tl.sum(gate_weights.to(tl.float32) * values, 0)
    up = tl.sum(up_weights.to(tl.float32) * values, 0)
    tl.store(activation + pair * width + output, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator]
def _down_kernel(
    activation: tl.tensor,  # [k, width]; not written for pairs of other ranks' experts
    expert_ids: tl.tensor,  # [k]
    weights: tl.tensor,  # [k]
    down: tl.tensor,  # [experts, hidden, width]
    out: tl.tensor,  # [hidden]
    first_expert: tl.tensor,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    k: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    output = tl.program_id(0)
    pair, entry = tl.arange(0, tile_pairs), tl.arange(0, tile_inputs)
    expert = tl.load(expert_ids + pair, mask=pair < k, other=_EMPTY).to(tl.int64) - first_expert
    local = (pair < k) & (expert >= 0) & (expert < experts)
    inside = local[:, None] & (entry < width)[None, :]
    down_at = down + (expert * hidden + output)[:, None] * width + entry[None, :]
    down_weights = tl.load(down_at, mask=inside, other=0)
    values = tl.load(activation + pair[:, None] * width + entry[None, :], mask=inside, other=0)
    results = tl.sum(down_weights.to(tl.float32) * values.to(tl.float32), 1).to(tl.bfloat16)
    pair_weights = tl.load(weights + pair, mask=local, other=0).to(tl.float32)
    tl.store(out + output, tl.sum(pair_weights * results.to(tl.float32), 0).to(tl.bfloat16))
