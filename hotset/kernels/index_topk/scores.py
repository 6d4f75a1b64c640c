"""The result of scoring, which selection reads."""

from dataclasses import dataclass

from torch import Tensor

CONTEXT_MULTIPLE = 4096  # each query has memory for a multiple of this many scores, so that blocks are whole
MAX_SPLITS = 1024  # programs that share the context of one query


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a batch of queries. The values of unseen positions and of unscored queries are not written."""

    values: Tensor  # [queries, context] float32
    moments: Tensor  # [queries, splits, 2] float32: sums of the scores and of their squares, per share of the context
    shares: Tensor  # [queries] int32: number of `moments` of the query that were written
