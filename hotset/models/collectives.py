"""What the workers that share a model say to each other during a step."""

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor


class Collectives(Protocol):
    """The ranks among which one model, or one stage of it, is split. Every rank makes the same calls in the same order.

    Every rank gets the same bits. `all_reduce` and `reduce_scatter` may overwrite their argument; the result belongs to
    the caller.
    """

    rank: int
    size: int
    tokens_per_rank: Sequence[int]  # data parallel: how many tokens each rank computes in this step; set by the runner

    def all_reduce(self, x: Tensor) -> Tensor:
        """Of every rank's x."""
        ...

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[rows, w] of every rank side by side: [rows, size * w]."""
        ...

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """Data parallel: every rank's rows, one above the other, `rows[r]` of rank r."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Data parallel: the sum over ranks of [sum(rows), w], of which this rank's own rows are returned."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has done all that it was told before."""
        ...


class _SingleRank:
    """A worker that has nobody to talk to."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.tokens_per_rank: Sequence[int] = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        pass


SINGLE_RANK: Final[Collectives] = _SingleRank()
