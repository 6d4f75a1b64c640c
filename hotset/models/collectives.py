"""The collective operations between the workers that share a model."""

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor


class Collectives(Protocol):
    """Collective operations among the ranks that share one model, or one pipeline stage of it.

    Every rank must make the same calls in the same order. A sum has the same bits on every rank. `all_reduce`,
    `reduce_scatter` and `broadcast` may overwrite their argument; the result belongs to the caller.
    """

    rank: int
    size: int
    tokens_per_rank: Sequence[int]  # data parallel: number of tokens of each rank in this step; set by `Worker`

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks."""
        ...

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """Concatenates the [tokens, w] of all ranks along the columns and returns [tokens, size * w]."""
        ...

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Data parallel: concatenates each of the [tokens, w] of all ranks in rank order.

        Rank r has `tokens_per_rank[r]` tokens. One call for several tensors may need fewer messages than several calls.
        """
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Data parallel: sums [sum(tokens_per_rank), w] over all ranks and returns this rank's own tokens."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns rank 0's `x` on every rank. The other ranks pass a tensor of the same shape, which is ignored."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has finished all work that it queued before this call."""
        ...


class _SingleRank:
    """Implements `Collectives` for a worker without peers, whose operations return their argument."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.tokens_per_rank: Sequence[int] = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return tensors

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        pass


SINGLE_RANK: Final[Collectives] = _SingleRank()


def planning_collectives(rank: int, size: int) -> Collectives:
    """Returns collectives for a decoder that is built only to plan one rank's memory, and computes nothing."""
    return _SingleRank(rank, size)
