"""The facts of a format of weights, and which format each matrix of a checkpoint has. Does not import torch."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from hotset.base.errors import ConfigError
from hotset.base.units import ceil_div
from hotset.models.split import TensorSlice

if TYPE_CHECKING:
    from hotset.models.formats.codec import MatrixCodec

ProductType = Literal["fp8", "bf16", "fp32"]  # what the tensor cores multiply


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format in which checkpoints store matrices [outputs, inputs]. The base class is plain: the model's dtype."""

    name: ClassVar[str] = "plain"  # in messages
    product_type: ClassVar[ProductType] = "bf16"  # the type of products with such a weight
    input_block: ClassVar[int] = 1  # a slice of the inputs must begin and end at multiples of this
    output_block: ClassVar[int] = 1  # stored outputs are read in multiples of this

    @property
    def blocks(self) -> str:
        """The blocks that a slice of the inputs must not divide, for messages."""
        return f"{self.name} blocks of {self.input_block}"

    def matrix_bytes(self, outputs: int, inputs: int, dtype_bytes: int) -> int:
        """Returns the bytes of a matrix in memory, in a model whose dtype takes `dtype_bytes` per value."""
        return outputs * inputs * dtype_bytes

    def rows_around(self, tensor_slice: TensorSlice | None, outputs: int) -> range | None:
        """Returns the outputs to read for a slice, in whole blocks. None if all of them are needed."""
        if tensor_slice is None or tensor_slice.dim != 0:
            return None
        block = self.output_block
        rows = range(tensor_slice.first // block * block, min(ceil_div(tensor_slice.last, block) * block, outputs))
        return None if len(rows) == outputs else rows

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Returns the names of the tensors that hold the matrix `name` in a checkpoint."""
        return (name,)


PLAIN = WeightFormat()


class QuantisedFormat(WeightFormat, ABC):
    """A format of few bits. Subclasses are frozen dataclasses."""

    @abstractmethod
    def is_stored(self, name: str, stored_type: Callable[[str], str | None]) -> bool:
        """Returns whether a checkpoint stores the matrix `name` in this format.

        `stored_type` returns the type of a stored tensor as safetensors files name it, or None if there is no tensor
        of that name.
        """

    @abstractmethod
    def codec(self) -> "MatrixCodec":
        """Returns the codec of this format. Imports torch."""

    def check_input_slice(self, title: str, inputs: int, tensor_slice: TensorSlice | None) -> None:
        """Raises `ConfigError` if a slice of a weight divides the inputs inside a block.

        `title` is the file and the tensor's name, for the error message.
        """
        if tensor_slice is None or tensor_slice.dim == 0:
            return
        first, last, block = tensor_slice.first, tensor_slice.last, self.input_block
        if first % block or (last % block and last != inputs):
            raise ConfigError(
                f"{title}: a rank would have inputs {first} to {last} of {inputs}, but {self.name} weights can only be "
                f"divided at multiples of {block} inputs, here among ranks whose number divides "
                f"{max(1, inputs // block)}; change --tensor-parallel-size, or use --weight-dtype bfloat16"
            )


@dataclass(frozen=True, slots=True)
class FormatRule:
    """The format of the matrices whose names match a regular expression."""

    pattern: str
    format: QuantisedFormat


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a checkpoint's matrices by name, as its configuration or its publisher describes them.

    Loading takes the format of a stored matrix from the files. The rules apply where no files are read: in plans, and
    for random weights.
    """

    rules: tuple[FormatRule, ...] = ()  # the first rule that matches a name applies; other names are plain
    expanded: bool = False  # whether loading expands all weights to the model's dtype

    @property
    def kept_formats(self) -> tuple[QuantisedFormat, ...]:
        """The quantised formats in which weights stay in memory."""
        return () if self.expanded else tuple(rule.format for rule in self.rules)

    def expand(self) -> "WeightFormats":
        """Returns the same checkpoint, whose weights are all expanded to the model's dtype at load."""
        return replace(self, expanded=True)

    def of(self, name: str) -> WeightFormat:
        """Returns the format that the matrix `name` has in memory."""
        if not self.expanded:
            for rule in self.rules:
                if re.fullmatch(rule.pattern, name):
                    return rule.format
        return PLAIN


PLAIN_WEIGHTS = WeightFormats()
