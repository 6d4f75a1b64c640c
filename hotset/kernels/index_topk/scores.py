"""The result of scoring, which selection reads."""

from dataclasses import dataclass

from torch import Tensor

from hotset.base.errors import InternalError

CONTEXT_MULTIPLE = 4096  # each query has memory for a multiple of this many scores, so that blocks are whole
MAX_SPLITS = 1024  # programs that share the context of one query


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a batch of queries. The values of unseen positions and of unscored queries are not written."""

    values: Tensor  # [queries, context] float32
    moments: Tensor  # [queries, splits, 2] float32: sums of the scores and of their squares, per share of the context
    shares: Tensor  # [queries] int32: number of `moments` of the query that were written

    def check_selection(self, out: Tensor) -> None:
        """Raises InternalError if kernels cannot select from these scores, or cannot write to `out`."""
        context = self.values.shape[1]
        if context % CONTEXT_MULTIPLE != 0:
            raise InternalError(f"{context} scores per query are not a multiple of {CONTEXT_MULTIPLE}")
        if not out.is_contiguous():
            raise InternalError(f"the output must be contiguous, but has strides {out.stride()}")
