"""What the rest of Hotset asks about a kind of attention. This module does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self

from hotset.models.split import Split
from hotset.models.tensors import WeightTensor


class AttentionSpec(ABC):
    """The attention of a model. Subclasses are frozen dataclasses. The defaults are those of full attention."""

    heads: int

    @property
    def topk(self) -> int | None:
        """How many rows a token reads at most; None if it reads all."""
        return None

    @property
    def index_layers(self) -> tuple[int, ...]:
        """The layers that run an indexer. The layers after each one reuse its selection."""
        return ()

    @property
    def has_fp8_rows(self) -> bool:
        """Whether rows and index keys can be stored in fp8."""
        return False

    @property
    def divided_kv_heads(self) -> int:
        """The KV heads that tensor parallel ranks divide; 1 if every rank stores the same rows."""
        return 1

    @property
    @abstractmethod
    def output_columns(self) -> int:
        """The inputs of the output projection, which tensor parallel ranks divide."""

    @property
    def score_flops(self) -> int:
        """The operations of one indexer for each token and position before it."""
        return 0

    def local_index_layers(self, layers: range) -> tuple[int, ...]:
        """Returns the layers in `layers` that run an indexer, numbered from the first layer of the range."""
        return tuple(layer - layers.start for layer in self.index_layers if layer in layers)

    def stage_starts(self, layers: int) -> tuple[int, ...]:
        """Returns at which of the model's layers a pipeline stage can begin."""
        return tuple(range(layers))

    def with_mtp_layer(self, layer: int) -> Self:
        """Returns the attention of the model with layer `layer`, the MTP layer, as its last layer."""
        return self

    def is_unused(self, name: str, layer: int) -> bool:
        """Returns whether a checkpoint may have the tensor `name` in this layer although nothing reads it."""
        return False

    @abstractmethod
    def tensors(self, hidden: int, layer: int, split: Split) -> Iterable[WeightTensor | None]:
        """Returns the tensors of one layer's attention. `hidden` is the width of the residual stream."""

    @abstractmethod
    def row_flops(self, split: Split) -> int:
        """Returns the operations of one layer's attention for each token and row that it reads."""

    @abstractmethod
    def step_values(self, split: Split, tokens: int, context: int) -> int:
        """Estimates how many values exist at once in one layer's attention, for `tokens` tokens of a step."""
