"""A codec turns the stored tensors of a matrix into a weight for the kernels. Each format of weights has one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hotset.kernels.weights import QuantisedWeight
from hotset.models.split import TensorSlice


class MatrixCodec(Protocol):
    """Reads, slices and expands the matrices of one format. `title` is the file and the tensor's name, for errors."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: Mapping[str, Tensor],
        title: Callable[[str], str],
        rows: range | None = None,
    ) -> QuantisedWeight:
        """Returns a matrix of shape `shape` as views of its stored tensors. `title` returns the title of each.

        With `rows`, which are whole blocks of outputs, `stored[name]` contains only these, and only they are returned.
        All other tensors are whole.

        Raises `CheckpointError` if a tensor is missing, or if shapes, types or scales are not valid.
        """
        ...

    def random(self, shape: tuple[int, ...], std: float, generator: torch.Generator) -> QuantisedWeight:
        """Returns a random matrix, with about this standard deviation, on the device of `generator`."""
        ...

    def empty(self, shape: tuple[int, ...], device: torch.device, boundaries: Iterable[int]) -> QuantisedWeight:
        """Returns memory for a weight [..., outputs, inputs]. A block of scales begins at each of the `boundaries`
        between outputs."""
        ...

    def copy(self, title: str, target: Any, stored: Any, tensor_slice: TensorSlice | None) -> None:
        """Copies the slice to `target`, and reads nothing else. Raises `CheckpointError` if a code is NaN."""
        ...

    def expand(self, title: str, target: Tensor, stored: Any, tensor_slice: TensorSlice | None) -> None:
        """Writes the values of the slice to `target`, piece by piece, so that no other copy of them exists.

        Raises `CheckpointError` if a value is not finite.
        """
        ...
