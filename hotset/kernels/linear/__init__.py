"""linear: x @ weight.T + bias.

`reference.py` is `torch.nn.functional.linear`. On a CPU in float32 a small batch (2 to about 64 rows) is served by
oneDNN from a copy of the weight in blocked order (`packed.py`): BLAS re-packs the weight at every call, which at those
sizes costs more than the product (8 rows, 3072 x 576, two Neoverse-N1 cores: 0.87 ms against 0.62 ms, 2026-11-15).
The price is a second copy of the weight in memory.
"""

from torch import Tensor

from hotset.kernels.linear import packed, reference


class Linear:
    """A weight [out, in] with an optional bias [out], ready to be applied to [rows, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed = packed.pack(weight) if packed.usable(weight) else None

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        if self._packed is not None and packed.pays(x):
            return packed.linear(x, self._packed, self.bias)
        return reference.linear(x, self.weight, self.bias)
