"""The base class of weights in formats of few bits."""

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


class QuantisedWeight(ABC):
    """A weight [outputs, inputs], or one per expert [experts, outputs, inputs], in a format of few bits.

    Formats are frozen dataclasses of `codes`, which have the shape of the weight, and further tensors. Views share
    their memory. The GPU kernels of a format are in modules of the same name in the folders of the ops.
    """

    __slots__ = ()
    kernels: ClassVar[str]  # the name of the modules
    codes: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def is_contiguous(self) -> bool:
        return all(tensor.is_contiguous() for tensor in self._tensors().values())

    def __getitem__(self, expert: int) -> Self:
        """Returns a view of the weight of one expert."""
        return replace(self, **{name: tensor[expert] for name, tensor in self._tensors().items()})  # type: ignore[type-var]

    @abstractmethod
    def outputs(self, first: int, last: int) -> Self:
        """Returns a view of the outputs [first, last), if they begin at a block of scales."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the values [..., outputs, inputs]."""

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


Weight = Tensor | QuantisedWeight  # as a checkpoint stores it: plain or quantised


def output_range(weight: Weight, first: int, last: int) -> Weight:
    """Returns a view of the outputs [first, last) of a weight [outputs, inputs]."""
    return weight[first:last] if isinstance(weight, Tensor) else weight.outputs(first, last)
