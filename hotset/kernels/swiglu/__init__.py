"""swiglu: the gated activation of a feed-forward layer whose gate and up products lie side by side."""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.swiglu import reference


def swiglu(
    gate_up: Tensor,  # [rows, 2 * width]: gate, then up
) -> Tensor:  # [rows, width], contiguous
    """silu(gate) * up. Raises ConfigError if the row cannot be halved."""
    if gate_up.shape[-1] % 2:
        raise ConfigError(f"a row of {gate_up.shape[-1]} values has no gate and up halves")
    op = kernels_of("swiglu") if served_fast(gate_up) else reference
    out: Tensor = op.swiglu(gate_up)
    return out
