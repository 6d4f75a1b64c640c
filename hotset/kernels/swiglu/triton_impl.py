"""swiglu in Triton: one pass in float32, which rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

BLOCK = 1024  # values of a token that one program computes
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True} | EARLY_LAUNCH  # Triton 3.9 warns without enable_fp_fusion


def swiglu(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(width))
        _swiglu_kernel[(tokens, triton.cdiv(width, block))](
            gate_up=gate_up,
            out=out,
            stride=gate_up.stride(0),
            width=width,
            block=block,
            **OPTIONS,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_kernel(
    gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, width: tl.tensor, block: tl.constexpr
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * block + tl.arange(0, block)
    inside = entry < width
    gate = tl.load(gate_up + token * stride + entry, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + entry, mask=inside).to(tl.float32)
    tl.store(out + token * width + entry, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
