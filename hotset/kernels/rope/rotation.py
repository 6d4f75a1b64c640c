"""The angles of one step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's positions: [rows, 1, dim / 2], to be broadcast over heads."""

    cos: Tensor
    sin: Tensor

    @property
    def dim(self) -> int:
        """How many values of a head turn."""
        return 2 * self.cos.shape[-1]
