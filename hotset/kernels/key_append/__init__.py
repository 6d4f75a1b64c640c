"""key_append: this step's index keys, from the key projection's output to their places on the device."""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.key_append import reference
from hotset.kernels.rope.rotation import Rotation
from hotset.kernels.rows import SCALE_BLOCK, PagedRows

MAX_FAST_DIM = 1024  # one program holds a key in registers


def key_append(
    key: Tensor,  # [rows, dim]; rows may lie apart
    weight: Tensor,  # [dim]: of the layer norm
    bias: Tensor,  # [dim]
    eps: float,
    rotation: Rotation,  # of the first values of a key
    interleaved: bool,  # as in `rope`
    keys: PagedRows,  # the index group's keys, one context per query row (`keys.seat_of`; EMPTY: stored nowhere)
    positions: Tensor,  # [rows] int64: each key's position in its context
) -> None:
    """Stores the normed and turned keys, encoded, into the pages of `keys`; nothing else is written.

    Raises ConfigError before launch for keys that the fast path cannot write.
    """
    dim = key.shape[1]
    assert dim == keys.layout.width, f"keys of {dim} values in a layout of {keys.layout.width}"
    assert rotation.dim <= dim, f"{rotation.dim} values of {dim} cannot turn"
    if not served_fast(key):
        reference.key_append(key, weight, bias, eps, rotation, interleaved, keys, positions)
        return
    if keys.layout.quantised not in (0, dim) or keys.layout.quantised > SCALE_BLOCK or keys.layout.quantised % 4:
        raise ConfigError(
            f"an index key with {keys.layout.quantised} of {dim} values in fp8: "
            f"a GPU stores none or all, in multiples of 4 up to {SCALE_BLOCK}"
        )
    if dim > MAX_FAST_DIM:
        raise ConfigError(f"an index key of {dim} values is more than the {MAX_FAST_DIM} that a GPU appends")
    kernels_of("key_append").key_append(key, weight, bias, eps, rotation, interleaved, keys, positions)
