"""rope: rotary position embedding of queries and keys."""

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.linear import per_head_matmul_into
from hotset.kernels.rope import reference
from hotset.kernels.rope.reference import Rotation

__all__ = ["Rotation", "rope_query", "rotate"]


def rotate(
    x: Tensor,  # [tokens, heads, dim]; tokens and heads may have any stride, the values of a head must be adjacent
    rotation: Rotation,  # of `rotation.dim` values, at most dim
    interleaved: bool,
) -> Tensor:  # like x
    """Rotates the first `rotation.dim` values of every head and copies the remaining ones. x is not changed.

    The pairs are (i, i + rotation.dim / 2), or (2i, 2i + 1) if `interleaved`. Either way, the result has the first
    values of all pairs, then the second values. Queries and keys use the same order, so the order does not affect
    their dot products.
    """
    if rotation.dim > x.shape[-1]:
        raise InternalError(f"{rotation.dim} values cannot be rotated in a head of {x.shape[-1]}")
    if has_fast_path(x):
        out: Tensor = kernels_of("rope").rotate(x, rotation, interleaved)
        return out
    return reference.rotate(x, rotation, interleaved)


def rope_query(
    q: Tensor,  # [tokens, heads, nope + rope]
    key_up: Tensor,  # [heads, nope, rank]
    rotation: Rotation,  # of the rope values
) -> Tensor:  # [tokens, heads, rank + rope]
    """Computes MLA queries in the absorbed form, as `sparse_attention` expects them.

    Each head's matrix maps the nope part into the latent space, and the rope part is rotated as by `rotate` with
    `interleaved`.
    """
    heads, nope, rank = key_up.shape
    if q.shape[1:] != (heads, nope + rotation.dim):
        raise InternalError(f"queries {tuple(q.shape)} for matrices {tuple(key_up.shape)}")
    if not has_fast_path(q):
        return reference.rope_query(q, key_up, rotation)
    out = q.new_empty(q.shape[0], heads, rank + rotation.dim)
    kernels_of("rope").rotate_into(out[..., rank:], q[..., nope:], rotation, True)
    per_head_matmul_into(out[..., :rank], q[..., :nope], key_up)
    return out
