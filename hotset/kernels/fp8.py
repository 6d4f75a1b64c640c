"""Numbers in fp8 (e4m3), each with a float32 scale that it shares with its neighbours.

Activations and rows share a scale per SCALE_BLOCK consecutive values of one token, weights per block of SCALE_BLOCK x
SCALE_BLOCK values: value = code * scale.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.weights import QuantisedWeight

SCALE_BLOCK = 128  # the number of consecutive values that share one scale
E4M3_MAX = 448.0
MIN_SCALE = 1e-30  # the lower bound of scales; a block of zeros has this scale


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes [..., width] in float8_e4m3fn and the scales [..., ceil(width / SCALE_BLOCK)] in float32.

    Divides every group of up to SCALE_BLOCK values by its scale, which makes its largest magnitude E4M3_MAX.
    """
    width = values.shape[-1]
    groups = ceil_div(width, SCALE_BLOCK)
    blocks = F.pad(values.float(), (0, groups * SCALE_BLOCK - width)).unflatten(-1, (groups, SCALE_BLOCK))
    largest = blocks.abs().amax(-1)
    # A GPU divides by a Python number by multiplying with its inverse, which rounds differently than a division.
    scales = (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(MIN_SCALE)
    codes = (blocks / scales[..., None]).flatten(-2)[..., :width].to(torch.float8_e4m3fn)
    return codes, scales


def round_to_fp8(values: Tensor) -> Tensor:
    """Returns the values [..., width] as fp8 represents them: code * scale, in float32."""
    codes, scales = quantise(values)
    return codes.float() * scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : values.shape[-1]]


@dataclass(frozen=True, slots=True)
class Fp8Weight(QuantisedWeight):
    """A weight [out, in], or one per expert [experts, out, in], in fp8. Views of it share its memory.

    `block_rows` outputs by SCALE_BLOCK inputs share one scale. In checkpoints, `block_rows` is SCALE_BLOCK. If a slice
    begins inside a block, or weights are merged there, blocks are divided into smaller ones that repeat the scale:
    `block_rows` then is a smaller divisor of SCALE_BLOCK.
    """

    codes: Tensor  # [..., out, in] float8_e4m3fn
    scales: Tensor  # [..., ceil(out / block_rows), ceil(in / SCALE_BLOCK)] float32
    block_rows: int = SCALE_BLOCK

    kernels = "triton_fp8"

    def __post_init__(self) -> None:
        if SCALE_BLOCK % self.block_rows != 0:
            raise InternalError(f"{self.block_rows} does not divide {SCALE_BLOCK}")
        *_, outputs, inputs = self.codes.shape
        expected = (*self.codes.shape[:-2], ceil_div(outputs, self.block_rows), ceil_div(inputs, SCALE_BLOCK))
        if tuple(self.scales.shape) != expected:
            raise InternalError(f"scales {tuple(self.scales.shape)}, expected {expected}")

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device, block_rows: int = SCALE_BLOCK) -> "Fp8Weight":
        scales_shape = (*shape[:-2], ceil_div(shape[-2], block_rows), ceil_div(shape[-1], SCALE_BLOCK))
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        return Fp8Weight(codes, torch.empty(scales_shape, dtype=torch.float32, device=device), block_rows)

    def outputs(self, first: int, last: int) -> "Fp8Weight":
        """Returns a view of the outputs [first, last). `first` must be a multiple of `block_rows`."""
        if first % self.block_rows != 0:
            raise InternalError(f"output {first} is inside a block of {self.block_rows}")
        scales = slice(first // self.block_rows, ceil_div(last, self.block_rows))
        return Fp8Weight(self.codes[..., first:last, :], self.scales[..., scales, :], self.block_rows)

    def output_scales(self) -> Tensor:
        """Returns the scales of each output [..., out, ceil(in / SCALE_BLOCK)]."""
        return self.scales.repeat_interleave(self.block_rows, dim=-2)[..., : self.codes.shape[-2], :]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the values [..., out, in]. Memory: three times that of float32 values."""
        scales = self.output_scales().repeat_interleave(SCALE_BLOCK, dim=-1)[..., : self.codes.shape[-1]]
        return (self.codes.float() * scales).to(dtype)


def common_block_rows(*boundaries: int) -> int:
    """Returns the largest `block_rows` with which all these boundaries between outputs fall between blocks."""
    return gcd(SCALE_BLOCK, *boundaries)
