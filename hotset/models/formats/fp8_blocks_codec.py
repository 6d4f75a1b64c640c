"""Reads matrices in fp8: codes, and one scale for each block of SCALE_BLOCK x SCALE_BLOCK values.

`value[i, j] = weight[i, j] * scale[i // SCALE_BLOCK, j // SCALE_BLOCK]`; the scales are in a tensor `weight_scale_inv`.
Blocks at the lower and right edge may be partial.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hotset.base.errors import CheckpointError, InternalError
from hotset.base.units import ceil_div
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight, common_block_rows
from hotset.models.checkpoint.stored_tensors import check_finite, pieces, sliced
from hotset.models.formats.weight_format import WeightFormat
from hotset.models.split import TensorSlice

MAGNITUDE_BITS, NAN_MAGNITUDE = 0x7F, 0x7F  # a code is a sign and a magnitude; the largest magnitude is NaN
FINITE_CODES = 254  # the codes of e4m3 that are not NaN
CODES_RMS = 100.06  # the root mean square of all finite codes


class Fp8BlocksCodec:
    """Implements `MatrixCodec`."""

    def __init__(self, format: WeightFormat) -> None:
        if format.input_block != SCALE_BLOCK:
            raise InternalError("the kernels and the format must agree on the size of a block")
        self._format = format

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: Mapping[str, Tensor],
        title: Callable[[str], str],
        rows: range | None = None,
    ) -> Fp8Weight:
        codes, (_, scale_name) = stored[name], self._format.stored_names(name)
        if codes.dim() != 2:
            raise CheckpointError(f"{title(name)} is fp8 of shape {list(codes.shape)}; supported: matrices")
        if scale_name not in stored:
            raise CheckpointError(f"{title(name)} is fp8, but {scale_name} is missing; download the model again")
        scales = _checked_scales(title(scale_name), stored[scale_name], _scale_shape(shape))
        if rows is not None:
            scales = scales[rows.start // SCALE_BLOCK : ceil_div(rows.stop, SCALE_BLOCK)]
        return Fp8Weight(codes, scales)

    def random(self, shape: tuple[int, ...], std: float, generator: torch.Generator) -> Fp8Weight:
        """Draws every finite code with the same probability, and scales that differ by a factor of up to 3."""
        device = generator.device
        codes = torch.randint(FINITE_CODES, shape, generator=generator, dtype=torch.uint8, device=device)
        codes += codes >= 0x7F  # skips 0x7F and 0xFF, which are NaN
        scales = torch.rand(_scale_shape(shape), generator=generator, device=device).add_(0.5).mul_(std / CODES_RMS)
        return Fp8Weight(codes.view(torch.float8_e4m3fn), scales)

    def empty(self, shape: tuple[int, ...], device: torch.device, boundaries: Iterable[int]) -> Fp8Weight:
        return Fp8Weight.empty(shape, device, common_block_rows(*boundaries))

    def copy(self, title: str, target: Fp8Weight, stored: Fp8Weight, tensor_slice: TensorSlice | None) -> None:
        """Copies the slice. If it begins inside a block of outputs, it keeps the scale of each block that it touches,
        and its own blocks have fewer outputs."""
        first_output, first_input = _first_entries(tensor_slice)
        block_rows = common_block_rows(first_output)
        if block_rows % target.block_rows != 0:
            raise InternalError(
                f"{title}: the slice needs a scale per {block_rows} outputs, but its target has one per "
                f"{target.block_rows}"
            )
        outputs, inputs = target.shape
        columns = slice(first_input // SCALE_BLOCK, first_input // SCALE_BLOCK + ceil_div(inputs, SCALE_BLOCK))
        last_output = first_output + outputs
        rows = torch.arange(first_output, last_output, target.block_rows, device=stored.device) // SCALE_BLOCK
        target.scales.copy_(stored.scales[rows, columns])
        largest = [
            piece.copy_(codes).view(torch.uint8).bitwise_and(MAGNITUDE_BITS).amax()
            for piece, codes in pieces(target.codes, sliced(stored.codes, tensor_slice))
            if piece.numel()
        ]
        if largest and int(torch.stack(largest).amax()) == NAN_MAGNITUDE:
            bad = int(target.codes.isnan().sum())
            raise CheckpointError(f"{title}: {bad} of {target.codes.numel()} values are NaN; download the model again")

    def expand(self, title: str, target: Tensor, stored: Fp8Weight, tensor_slice: TensorSlice | None) -> None:
        """Writes at most SCALE_BLOCK rows at a time."""
        first_output, first_input = _first_entries(tensor_slice)
        outputs, inputs = target.shape
        codes = sliced(stored.codes, tensor_slice).to(target.device)
        column_blocks = torch.arange(first_input, first_input + inputs, device=stored.device) // SCALE_BLOCK
        scales = stored.scales[:, column_blocks].to(target.device)
        sums = []
        for block in range(first_output // SCALE_BLOCK, ceil_div(first_output + outputs, SCALE_BLOCK)):
            part = slice(max(block * SCALE_BLOCK - first_output, 0), (block + 1) * SCALE_BLOCK - first_output)
            sums.append(target[part].copy_(codes[part].float() * scales[block]).sum())
        check_finite(title, target, sums)


def _checked_scales(title: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the scales in float32. Raises `CheckpointError` if their shape, type or values are not valid."""
    if tuple(stored.shape) != shape:
        raise CheckpointError(
            f"{title} has shape {list(stored.shape)}, but blocks of {SCALE_BLOCK} x {SCALE_BLOCK} require {list(shape)}"
        )
    if not stored.is_floating_point():
        kind = str(stored.dtype).removeprefix("torch.")
        raise CheckpointError(f"{title} is of type {kind}; supported: floats")
    scales = stored.float()
    bad = int((~((scales > 0) & scales.isfinite())).sum())
    if bad:
        raise CheckpointError(
            f"{title}: {bad} of {scales.numel()} scales are NaN, infinite, zero or negative; download the model again"
        )
    return scales


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix of shape `shape`."""
    return tuple(ceil_div(size, SCALE_BLOCK) for size in shape)


def _first_entries(tensor_slice: TensorSlice | None) -> tuple[int, int]:
    """Returns the first output and the first input of a slice."""
    if tensor_slice is None:
        return 0, 0
    return (tensor_slice.first, 0) if tensor_slice.dim == 0 else (0, tensor_slice.first)
