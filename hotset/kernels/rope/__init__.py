"""rope: rotary position embedding of queries and keys."""

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.linear import per_head_matmul_into
from hotset.kernels.rope import reference
from hotset.kernels.rope.reference import Rotation

__all__ = ["Rotation", "rope_query"]


def rope_query(
    q: Tensor,  # [tokens, heads, nope + rope]
    key_up: Tensor,  # [heads, nope, rank]
    rotation: Rotation,  # of the rope values
) -> Tensor:  # [tokens, heads, rank + rope]
    """Computes MLA queries in the absorbed form, as `sparse_attention` expects them.

    Each head's matrix maps the nope part into the latent space, and the rope part is rotated as by `rotate` of
    reference.py with `interleaved`.
    """
    heads, nope, rank = key_up.shape
    if q.shape[1:] != (heads, nope + rotation.dim):
        raise InternalError(f"queries {tuple(q.shape)} for matrices {tuple(key_up.shape)}")
    if not has_fast_path(q):
        return reference.rope_query(q, key_up, rotation)
    out = q.new_empty(q.shape[0], heads, rank + rotation.dim)
    kernels_of("rope").rotate_pairs_into(out[..., rank:], q[..., nope:], rotation)
    per_head_matmul_into(out[..., :rank], q[..., :nope], key_up)
    return out
