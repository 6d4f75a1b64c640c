"""The part of a model that one worker holds, and the slices of tensors in it. This module does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a model that one worker holds.

    Tensor parallel ranks divide the attention heads, the columns of MLPs, the experts and the vocabulary among
    themselves; every rank computes every token. Data parallel ranks divide only the experts; every rank computes its
    own tokens. A pipeline stage holds only the layers in `layers`, numbered as in the whole model. None stands for all
    layers.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    layers: range | None = None

    def __post_init__(self) -> None:
        if not (self.tp_size == 1 or self.dp_size == 1):
            raise InternalError(f"{self}: tensor and data parallelism are not combined")

    @property
    def rank(self) -> int:
        """This worker's rank among the workers that hold the same layers."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """The number of workers that hold the same layers."""
        return self.dp_size * self.tp_size

    @property
    def first_layer(self) -> int:
        return 0 if self.layers is None else self.layers.start

    def tp_shard(self, count: int) -> range:
        """Returns which of `count` heads or columns this rank holds."""
        return _shard(count, self.tp_rank, self.tp_size)

    def kv_heads(self, count: int) -> range:
        """Returns which of `count` KV heads this rank holds.

        If there are more ranks than KV heads, `tp_size / count` consecutive ranks hold the same KV head.
        """
        if self.tp_size <= count:
            return self.tp_shard(count)
        head = self.tp_rank // (self.tp_size // count)
        return range(head, head + 1)

    def experts(self, count: int) -> range:
        """Returns which of `count` experts this rank holds."""
        return _shard(count, self.rank, self.size)

    def vocabulary_shard_size(self, vocab: int) -> int:
        """Returns how many vocabulary entries each rank's embedding and LM head have, including padding at the end."""
        return ceil_div(vocab, self.tp_size)

    def vocabulary(self, vocab: int) -> range:
        """Returns the token ids of this rank: at most `vocabulary_shard_size`."""
        size = self.vocabulary_shard_size(vocab)
        first = self.tp_rank * size
        return range(min(first, vocab), min(first + size, vocab))

    def layer_range(self, num_layers: int) -> range:
        """Returns which of the model's `num_layers` layers this worker holds."""
        return range(num_layers) if self.layers is None else self.layers


WHOLE_MODEL = Split()


def _shard(count: int, rank: int, size: int) -> range:
    shard = count // size
    return range(rank * shard, (rank + 1) * shard)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The entries [first, last) of a tensor along dimension `dim`: the slice that one worker holds."""

    dim: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the slice of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def of(self, values: "Tensor") -> "Tensor":
        """Returns a view of the slice of `values`."""
        return values.narrow(self.dim, self.first, self.size)
