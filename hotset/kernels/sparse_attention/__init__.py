"""sparse_attention: absorbed MLA attention of each query row over its own list of device rows."""

from torch import Tensor

from hotset.kernels.rows import RowLayout
from hotset.kernels.sparse_attention import reference


def sparse_attention(
    q: Tensor,  # [rows, heads, rank + rope]: latent part absorbed through the key up-projection, then the rope part
    rows: Tensor,  # [device rows, stored width]: latent | rope key, as `layout` stores them
    chosen: Tensor,  # [rows, k] int64 device rows, EMPTY-padded; at least one is not EMPTY
    layout: RowLayout,
    rank: int,
    scale: float,
) -> Tensor:  # [rows, heads, rank]: attention-weighted latents, before the value up-projection
    """softmax(scale * q . row) over the chosen rows, applied to their latents. Their order does not matter."""
    assert q.shape[2] == layout.width, f"queries of {q.shape[2]} values cannot score rows of {layout.width}"
    assert chosen.shape[0] == q.shape[0], f"{chosen.shape[0]} selections for {q.shape[0]} query rows"
    return reference.sparse_attention(q, rows, chosen, layout, rank, scale)
