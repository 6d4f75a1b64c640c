"""A source that reads nothing: it returns tensors without memory, and counts what the real source would read."""

import math

import torch

from hotset.kernels.fp8 import Fp8Weight, Weight
from hotset.models.checkpoint.source import WeightSource, kept_shape
from hotset.models.split import TensorSlice

META = torch.device("meta")


class PlannedSource:
    """Stands in for the source `weights`, whose files are open, and returns tensors on the meta device.

    They have the formats in which `weights` would return them. `read_bytes` counts the bytes that `weights` would read.
    """

    def __init__(self, weights: WeightSource, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype
        self._planned: set[str] = set()
        self.read_bytes = 0

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        """Raises `CheckpointError` if the tensor is missing. Does not check its shape or its values."""
        local_shape = shape if tensor_slice is None else tensor_slice.shape(shape)
        self._count(name, shape, local_shape)
        return torch.empty(local_shape, dtype=self._dtype, device=META) if out is None else out

    def is_fp8(self, name: str) -> bool:
        return self._weights.is_fp8(name)

    def load_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: Weight | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> Weight:
        if isinstance(out, torch.Tensor) or not self.is_fp8(name):
            assert not isinstance(out, Fp8Weight), f"{name} is not in fp8, but its place is"
            return self.load(name, shape, out=out, tensor_slice=tensor_slice)
        local_shape, block_rows = kept_shape(shape, tensor_slice)
        self._count(name, shape, local_shape)
        return Fp8Weight.empty(local_shape, META, block_rows) if out is None else out

    def stored_bytes(self, name: str) -> int:
        return self._weights.stored_bytes(name)

    def skip(self, name: str) -> None:
        """Does nothing: another worker loads the tensor."""

    def finish(self) -> None:
        """Does nothing: the files stay open for the real source."""

    def _count(self, name: str, shape: tuple[int, ...], local_shape: tuple[int, ...]) -> None:
        if name not in self._planned:
            self._planned.add(name)
            self.read_bytes += self._weights.stored_bytes(name) * math.prod(local_shape) // max(1, math.prod(shape))
