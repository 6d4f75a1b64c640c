"""Stored tensors: the interface that reads them, and functions that copy them piece by piece and check them."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from hotset.base.errors import CheckpointError
from hotset.kernels.weights import Weight, output_range
from hotset.models.formats.weight_format import WeightFormat
from hotset.models.model_tensors import is_unused
from hotset.models.spec import ModelSpec
from hotset.models.split import TensorSlice
from hotset.models.tensors import layer_of

LOGGER = logging.getLogger("hotset.models")
Progress = Callable[[int], None]  # is called with the number of bytes that were read so far

PIECE_BYTES = 1 << 20  # of a piece, which is copied and then checked; it fits into the cache of a core


class TensorSource(Protocol):
    """The stored tensors of a checkpoint, under the names of Hugging Face checkpoints."""

    def format_of(self, name: str) -> WeightFormat:
        """Returns the format in which the matrix `name` is stored: PLAIN if there is no such tensor."""
        ...

    def announce(self, name: str, shape: tuple[int, ...], rows: range | None) -> None:
        """Says that `read` will be called with these arguments, after the calls that were announced before."""
        ...

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Weight:
        """Returns the tensor of shape `shape` as it is stored, or only these of its rows: whole blocks of outputs.

        The result is valid until the next call: it can be a view of the mapped file, or of memory that is used again.
        Raises `CheckpointError`, with file and tensor name, if the tensor or its scales are missing or damaged, or if
        shape or type are wrong. Does not check all values.
        """
        ...

    def stored_bytes(self, name: str) -> int:
        """Returns the size of the tensor `name` in the files, with its scales: 0 if it is not read from a file.

        Reads no values. Raises `CheckpointError` if the tensor is missing.
        """
        ...

    def title(self, name: str) -> str:
        """Returns the file and the name of the tensor, with which error messages begin."""
        ...

    def finish(self) -> None:
        """Closes the files. Raises `CheckpointError` if they hold tensors that do not belong to the model."""
        ...


def rows_of(stored: Weight, rows: range | None) -> Weight:
    """Returns a view of some rows, or the whole tensor if `rows` is None."""
    if rows is None:
        return stored
    return stored[rows.start : rows.stop] if isinstance(stored, Tensor) else output_range(stored, rows.start, rows.stop)


def sliced(values: Tensor, tensor_slice: TensorSlice | None) -> Tensor:
    """Returns a view of the slice, or the whole tensor if `tensor_slice` is None."""
    return values if tensor_slice is None else tensor_slice.of(values)


def pieces(target: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the rows of both tensors in pieces.

    On a CPU, each piece is checked while it is in the cache, so the check reads no memory again. A GPU gets all rows
    at once.
    """
    piece_bytes = PIECE_BYTES if target.device.type == "cpu" else target.nbytes
    rows = max(1, piece_bytes * target.shape[0] // max(1, target.nbytes))
    return zip(target.split(rows), stored.split(rows), strict=True)


def copy_finite(title: str, target: Tensor, stored: Tensor) -> None:
    """Copies the values to `target`. Raises `CheckpointError` if the result contains NaN or infinity."""
    check_finite(title, target, [piece.copy_(values).sum() for piece, values in pieces(target, stored)])


def check_finite(title: str, values: Tensor, piece_sums: list[Tensor]) -> None:
    """Raises `CheckpointError` if `values` contain NaN or infinity. `piece_sums` add up to the sum of the values.

    A sum that contains NaN or infinity is not finite. A sum of finite values can overflow too, so the values decide.
    """
    total = torch.stack([values.new_zeros(()), *piece_sums]).sum()
    if not math.isfinite(total.item()) and not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        kind = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(f"{title}: {bad} of {values.numel()} values are NaN or infinite as {kind}")


def check_shape(title: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{title} has shape {list(found)}, but the configuration requires {list(expected)}")


def check_unused_tensors(file: str, unused: Iterable[str], spec: ModelSpec) -> None:
    """Raises `CheckpointError` if `unused` contains tensors that do not belong to the model.

    Layers beyond the model's last layer are reported in one log line. Tensors that `is_unused` knows are ignored.
    """
    foreign = [name for name in unused if not is_unused(spec, name)]
    layers = {name: layer_of(name) for name in foreign}
    extra_layers = sorted({layer for layer in layers.values() if layer is not None and layer >= spec.layers})
    foreign = sorted(name for name in foreign if layers[name] not in extra_layers)
    if foreign:
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors do not belong to a {spec.architecture} model: {', '.join(foreign[:3])}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in extra_layers)
        LOGGER.info("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)
