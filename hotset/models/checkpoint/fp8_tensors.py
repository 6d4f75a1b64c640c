"""Slices of fp8 weights as checkpoints store them: codes, and one scale for each block of FP8_BLOCK x FP8_BLOCK."""

import torch
from torch import Tensor

from hotset.base.errors import CheckpointError, ConfigError, InternalError
from hotset.base.units import ceil_div
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight
from hotset.models.checkpoint.source import BLOCK_BYTES, kept_shape, sliced
from hotset.models.formats.fp8_blocks import FP8_BLOCK
from hotset.models.split import TensorSlice

if FP8_BLOCK != SCALE_BLOCK:
    raise InternalError("the kernels and the configuration reader must agree on the size of a block")
MAGNITUDE_BITS, NAN_MAGNITUDE = 0x7F, 0x7F  # of a code: a sign, then the magnitude, whose largest value is NaN


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix of shape `shape`. Blocks at the lower and right edge are partial."""
    return tuple(ceil_div(size, FP8_BLOCK) for size in shape)


def check_scales(tensor: str, scales: Tensor) -> None:
    """Raises `CheckpointError` unless all scales are finite and above 0. `tensor` is the file and the tensor's name."""
    bad = int((~((scales > 0) & scales.isfinite())).sum())
    if bad:
        raise CheckpointError(
            f"{tensor}: {bad} of {scales.numel()} scales are NaN, infinite, zero or negative; download the model again"
        )


def check_input_slice(tensor: str, shape: tuple[int, ...], tensor_slice: TensorSlice | None) -> None:
    """Raises `ConfigError` if a slice of an fp8 weight divides the inputs inside a block.

    Activations are quantised in the same blocks of inputs as the weight. Ranks that divide a block would quantise them
    with other scales than one rank.
    """
    if tensor_slice is None or tensor_slice.dim == 0:
        return
    first, last, inputs = tensor_slice.first, tensor_slice.last, shape[1]
    if first % FP8_BLOCK or (last % FP8_BLOCK and last != inputs):
        raise ConfigError(
            f"{tensor}: a rank would have inputs {first} to {last} of {inputs}, but fp8 weights can only be divided at "
            f"multiples of {FP8_BLOCK} inputs, here among ranks whose number divides {max(1, inputs // FP8_BLOCK)}; "
            "change --tensor-parallel-size, or use --weight-dtype bfloat16"
        )


def copy_fp8(
    tensor: str, out: Fp8Weight | None, stored: Fp8Weight, tensor_slice: TensorSlice | None, device: torch.device
) -> Fp8Weight:
    """Copies the slice of `stored` to `out`, or to a new weight on `device`.

    Raises `CheckpointError` if a code is NaN, and `ConfigError` for a slice that `check_input_slice` refuses. Only the
    slice is read. On a CPU, each block of codes is checked while it is in the cache.
    """
    check_input_slice(tensor, tuple(stored.shape), tensor_slice)
    shape, block_rows = kept_shape(tuple(stored.shape), tensor_slice)
    target = Fp8Weight.empty(shape, device, block_rows) if out is None else out
    if block_rows % target.block_rows != 0:
        raise InternalError(
            f"{tensor}: the slice needs a scale per {block_rows} outputs, and its place has one per {target.block_rows}"
        )
    target.scales.copy_(_slice_scales(stored.scales, shape, tensor_slice, target.block_rows))
    codes = sliced(stored.codes, tensor_slice)
    rows = max(1, BLOCK_BYTES // max(1, shape[1])) if target.device.type == "cpu" else max(1, shape[0])
    blocks = zip(target.codes.split(rows), codes.split(rows), strict=True)
    largest = [_largest_magnitude(block.copy_(read)) for block, read in blocks if block.numel()]
    if largest and int(torch.stack(largest).amax()) == NAN_MAGNITUDE:
        bad = int(target.codes.isnan().sum())
        raise CheckpointError(f"{tensor}: {bad} of {target.codes.numel()} values are NaN; download the model again")
    return target


def _slice_scales(scales: Tensor, shape: tuple[int, ...], tensor_slice: TensorSlice | None, block_rows: int) -> Tensor:
    """Returns the scales of a slice of shape `shape`, with one row of scales for every `block_rows` outputs."""
    first_row, first_column = 0, 0
    if tensor_slice is not None:
        first_row, first_column = (tensor_slice.first, 0) if tensor_slice.dim == 0 else (0, tensor_slice.first)
    columns = slice(first_column // FP8_BLOCK, first_column // FP8_BLOCK + ceil_div(shape[1], FP8_BLOCK))
    rows = torch.arange(first_row, first_row + shape[0], block_rows, device=scales.device) // FP8_BLOCK
    return scales[rows, columns]


def _largest_magnitude(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).bitwise_and(MAGNITUDE_BITS).amax()


def expand(
    stored: Fp8Weight,
    tensor_slice: TensorSlice | None,
    out: Tensor,  # of the shape of the slice, any float dtype
) -> list[Tensor]:
    """Writes the values of the slice to `out`, at most FP8_BLOCK rows at a time, so that no other copy of them exists.

    Returns sums that add up to the sum of all values. They are not finite if a value is not.
    """
    rows, columns = (range(size) for size in stored.shape)
    if tensor_slice is not None:
        kept = range(tensor_slice.first, tensor_slice.last)
        rows, columns = (kept, columns) if tensor_slice.dim == 0 else (rows, kept)
    codes = sliced(stored.codes, tensor_slice).to(out.device)
    column_blocks = torch.arange(columns.start, columns.stop, device=stored.device) // FP8_BLOCK
    scales = stored.scales[:, column_blocks].to(out.device)
    sums = []
    for block in range(rows.start // FP8_BLOCK, ceil_div(rows.stop, FP8_BLOCK)):
        part = slice(max(block * FP8_BLOCK - rows.start, 0), (block + 1) * FP8_BLOCK - rows.start)
        sums.append(out[part].copy_(codes[part].float() * scales[block]).sum())
    return sums
