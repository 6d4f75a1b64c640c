"""The norms that some models put on each head of Q and K."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head."""

    q: Tensor  # [dim]
    k: Tensor  # [dim]
    eps: float
