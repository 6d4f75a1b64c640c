"""What the workers that share a model say to each other during a step."""

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor


class Ranks(Protocol):
    """The ranks among which one model, or one stage of it, is split. Every rank makes the same calls in the same order.

    Results are the same on every rank, to the bit. `sum` and `own_sum` may write over what they are given; a result
    belongs to the caller.
    """

    rank: int
    size: int
    rows: Sequence[int]  # data parallel: how many rows each rank computes in this step; set by the runner

    def sum(self, x: Tensor) -> Tensor:
        """Of every rank's x."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """[rows, w] of every rank side by side: [rows, size * w]."""
        ...

    def stack(self, x: Tensor) -> Tensor:
        """Data parallel: every rank's rows, one above the other, `rows[r]` of rank r."""
        ...

    def own_sum(self, x: Tensor) -> Tensor:
        """Data parallel: the sum over ranks of [sum(rows), w], of which this rank's own rows are returned."""
        ...

    def meet(self) -> None:
        """Returns when every rank has done all that it was told before."""
        ...


class _Alone:
    """A worker that has nobody to talk to."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.rows: Sequence[int] = ()

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        return x

    def stack(self, x: Tensor) -> Tensor:
        return x

    def own_sum(self, x: Tensor) -> Tensor:
        return x

    def meet(self) -> None:
        pass


ALONE: Final[Ranks] = _Alone()
