"""Descriptions of tensors, from which loading, sizes and matrix products follow. This module does not import torch."""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from hotset.models.split import TensorSlice

Storage = Literal["matrix", "plain", "fp32"]


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A tensor of a checkpoint, and the slice of it that one rank holds."""

    name: str  # in the checkpoint; "*" stands for the numbers of experts
    shape: tuple[int, ...]  # of the whole tensor: [outputs, inputs], or [values]
    product: str | None = None  # the name of its matrix product; None if it is no matrix
    tensor_slice: TensorSlice | None = None  # None: every rank holds the whole tensor
    # "matrix": in the format that the checkpoint has for it; "plain": in the model's dtype; "fp32": in the accumulation
    # dtype
    storage: Storage = "matrix"
    bias: bool = False  # whether there is a bias of the outputs too
    copies: int = 1  # how many such tensors a rank holds: one for each of its experts
    tokens: float = 1.0  # tokens that each copy is multiplied with, for each token of a rank

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape if self.tensor_slice is None else self.tensor_slice.shape(self.shape)

    @property
    def values(self) -> int:
        """The number of values that a rank holds, without the bias."""
        return prod(self.local_shape) * self.copies

    @property
    def bias_name(self) -> str:
        return self.name.removesuffix("weight") + "bias"

    @property
    def first_boundary(self) -> int:
        """A divisor of the first output of every rank's slice, so that all ranks have blocks of the same size."""
        return 0 if self.local_shape == self.shape else self.local_shape[0]

    def expert_name(self, expert: int) -> str:
        return self.name.replace("*", str(expert))

    def of_expert(self, expert: int) -> "WeightTensor":
        return replace(self, name=self.expert_name(expert), copies=1)


def layer_of(name: str) -> int | None:
    """Returns the layer to which the tensor `name` of a checkpoint belongs."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return None if layer is None else int(layer[1])


def is_of_expert(name: str) -> bool:
    """Returns whether the tensor `name` of a checkpoint belongs to a routed expert, which only one rank holds."""
    return re.search(r"\.experts\.\d+\.", name) is not None


def shard_slice(dim: int, shard: range, width: int = 1) -> TensorSlice:
    """Returns the slice for `shard` of a tensor that has `width` entries along `dim` for each head or column."""
    return TensorSlice(dim, shard.start * width, shard.stop * width)


def vector(name: str, values: int, *, bias: bool = False) -> WeightTensor:
    """Describes the weight of a norm, which every rank holds."""
    return WeightTensor(name, (values,), storage="plain", bias=bias)
