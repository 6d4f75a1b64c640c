"""swiglu: the gated activation of a feed-forward layer."""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.swiglu import reference


def swiglu(
    gate_up: Tensor,  # [tokens, 2 * width]: gate | up
) -> Tensor:  # [tokens, width], contiguous
    """Returns silu(gate) * up. Raises ConfigError if the number of values per token is odd."""
    if gate_up.shape[-1] % 2:
        raise ConfigError(f"{gate_up.shape[-1]} values per token cannot be divided into gate and up")
    op = kernels_of("swiglu") if has_fast_path(gate_up) else reference
    out: Tensor = op.swiglu(gate_up)
    return out
