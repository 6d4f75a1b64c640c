"""The specification of index_append."""

from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.rope.reference import Rotation, rotate
from hotset.kernels.rows import PagedRows


def index_append(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rotation: Rotation,
    interleaved: bool,
    keys: PagedRows,
    positions: Tensor,
) -> Tensor:
    values = index_keys(key, weight, bias, eps, rotation, interleaved)
    keys.store(positions, values)
    return rotate(query, rotation, interleaved)


def index_keys(
    key: Tensor, weight: Tensor, bias: Tensor, eps: float, rotation: Rotation, interleaved: bool
) -> Tensor:  # [tokens, dim], not encoded yet
    normed = F.layer_norm(key, weight.shape, weight, bias, eps)
    return rotate(normed[:, None], rotation, interleaved)[:, 0]
