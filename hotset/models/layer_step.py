"""What a decoder and its layers exchange in a step. A decoder knows no kind of attention and no kind of MLP."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from hotset.kernels.rope import Rotation
from hotset.memory.view import View


class Residual(NamedTuple):
    """The residual stream between two layers: x + delta. The next norm adds them."""

    x: Tensor  # [tokens, hidden]
    delta: Tensor | None = None  # [tokens, hidden]; None before the first layer

    @property
    def total(self) -> Tensor:
        return self.x if self.delta is None else self.x + self.delta


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of a step get, besides the residual stream and the selected positions."""

    rotation: Rotation
    view: View
    # False: no indexer runs, and all layers attend to the positions that the caller passes as `selected`
    selects: bool = True


class Attention(Protocol):
    """The attention of one layer."""

    def __call__(self, x: Tensor, step: StepInputs, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Maps [tokens, hidden] to [tokens, hidden].

        `previous` are the positions that the last indexer before this layer selected. Also returns the positions that
        this layer attended to: those of its own indexer, else `previous`. They are None in full attention.
        """
        ...


class Layer(Protocol):
    """One layer of a decoder."""

    def __call__(self, residual: Residual, step: StepInputs, selected: Tensor | None) -> tuple[Residual, Tensor | None]:
        """Computes the layer. Takes and returns the selected positions as `Attention` does."""
        ...

    def idle(self, no_tokens: Tensor) -> None:
        """Data parallel: computes what other ranks need of this layer in a step in which this rank has no tokens."""
        ...
