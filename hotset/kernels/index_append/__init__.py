"""index_append: writes this step's index keys to the device and rotates its index queries, given their projections."""

from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.fp8 import SCALE_BLOCK
from hotset.kernels.index_append import reference
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import PagedRows

MAX_FAST_DIM = 1024  # one program holds a key in registers


def index_append(
    query: Tensor,  # [tokens, heads, dim]; tokens and heads may have any stride
    key: Tensor,  # [tokens, dim]; tokens may have any stride
    weight: Tensor,  # [dim], of the layer norm
    bias: Tensor,  # [dim]
    eps: float,
    rotation: Rotation,  # of the first values of a query and of a key
    interleaved: bool,  # as in `rotate` of rope/reference.py
    keys: PagedRows,  # of the index group; the key of a token whose `keys.seat_of` is EMPTY is not stored
    positions: Tensor,  # [tokens] int64: the position of each token in its context
) -> Tensor:  # like query
    """Normalises, rotates and encodes the keys and writes them into the pages of `keys`. Returns the rotated queries.

    Raises ConfigError before launch if the fast path does not support the layout or the width of the keys.
    """
    dim = key.shape[1]
    if query.shape[::2] != key.shape:
        raise InternalError(f"queries {tuple(query.shape)} for keys {tuple(key.shape)}")
    if dim != keys.layout.width:
        raise InternalError(f"keys have {dim} values, but their layout has {keys.layout.width}")
    if rotation.dim > dim:
        raise InternalError(f"{rotation.dim} values cannot be rotated in a key of {dim}")
    if not has_fast_path(key):
        return reference.index_append(query, key, weight, bias, eps, rotation, interleaved, keys, positions)
    if keys.layout.quantised not in (0, dim) or keys.layout.quantised > SCALE_BLOCK or keys.layout.quantised % 4:
        raise ConfigError(
            f"an index key has {keys.layout.quantised} of {dim} values in fp8, but on a GPU "
            f"none or all values must be in fp8, and their number must be a multiple of 4 up to {SCALE_BLOCK}"
        )
    if dim > MAX_FAST_DIM:
        raise ConfigError(f"an index key has {dim} values; on a GPU, at most {MAX_FAST_DIM} are supported")
    kernels = kernels_of("index_append")
    rotated: Tensor = kernels.index_append(query, key, weight, bias, eps, rotation, interleaved, keys, positions)
    return rotated
