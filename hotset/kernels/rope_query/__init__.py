"""rope_query: MLA queries in the absorbed form, as sparse_attention takes them."""

from torch import Tensor

from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.per_head_matmul import per_head_matmul_into
from hotset.kernels.rope import Rotation
from hotset.kernels.rope_query import reference


def rope_query(
    q: Tensor,  # [rows, heads, nope + rope]
    key_up: Tensor,  # [heads, nope, rank]
    rotation: Rotation,  # of the rope values
) -> Tensor:  # [rows, heads, rank + rope]
    """The nope part of each head taken into the latent space by that head's matrix, then the rope part turned.

    Pairs are (2i, 2i + 1), written as two halves.
    """
    heads, nope, rank = key_up.shape
    assert q.shape[1:] == (heads, nope + rotation.dim), f"queries {tuple(q.shape)} for matrices {tuple(key_up.shape)}"
    if not served_fast(q):
        return reference.rope_query(q, key_up, rotation)
    out = q.new_empty(q.shape[0], heads, rank + rotation.dim)
    kernels_of("rope").rotate_into(out[..., rank:], q[..., nope:], rotation, True)
    per_head_matmul_into(out[..., :rank], q[..., :nope], key_up)
    return out
