"""sparse_attention: absorbed MLA attention of each query row over its own list of device rows."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.rows import ROW_ALIGN, RowLayout
from hotset.kernels.sparse_attention import cpu_impl, reference

RANKS = (64, 128, 256, 512)  # that the kernels for GPUs can take, as the next two
ROPES = (16, 32, 64, 128)
MAX_ROWS = 2**31 - 1


def sparse_attention(
    q: Tensor,  # [rows, heads, rank + rope]: latent part absorbed through the key up-projection, then the rope part
    rows: Tensor,  # [device rows, stored width]: latent | rope key, as `layout` stores them
    row_ids: Tensor,  # [rows, k] int64 device rows, EMPTY-padded anywhere
    layout: RowLayout,
    rank: int,
    scale: float,
) -> Tensor:  # [rows, heads, rank]: attention-weighted latents, before the value up-projection
    """softmax(scale * q . row) over the chosen rows, applied to their latents. Their order does not matter.

    A query row without a chosen row (a padded batch row) gives zeros, whatever its q holds. bfloat16 tensors on a GPU
    take the fast path, which can be captured in a graph; it serves any number of heads and of chosen rows, ranks RANKS,
    ropes ROPES, plain rows and rows whose latent is fp8. Raises ConfigError, naming the value, for any other size.
    Other dtypes take the reference there.
    """
    assert q.shape[2] == layout.width, f"queries of {q.shape[2]} values cannot score rows of {layout.width}"
    assert row_ids.shape[0] == q.shape[0], f"{row_ids.shape[0]} selections for {q.shape[0]} query rows"
    if q.device.type == "cpu":
        return cpu_impl.sparse_attention(q, rows, row_ids, layout, rank, scale)
    if q.dtype != torch.bfloat16:
        return reference.sparse_attention(q, rows, row_ids, layout, rank, scale)
    check(rows, layout, rank, scale)
    attended: Tensor = kernels_of("sparse_attention").sparse_attention(q, rows, row_ids, layout, rank, scale)
    return attended


def check(rows: Tensor, layout: RowLayout, rank: int, scale: float) -> None:
    """Raises ConfigError for what the kernels for GPUs cannot take."""
    rope = layout.width - rank
    if rank not in RANKS:
        raise ConfigError(f"sparse attention on a GPU takes a latent rank of {_listed(RANKS)}, not {rank}")
    if rope not in ROPES:
        raise ConfigError(f"sparse attention on a GPU takes {_listed(ROPES)} rope values, not {rope}")
    if layout.quantised not in (0, rank):
        raise ConfigError(
            f"{layout.quantised} values of a row are fp8; the GPU kernels take none or the {rank} latents"
        )
    if layout.dtype != torch.bfloat16 or rows.dtype != layout.stored_dtype:
        raise ConfigError(f"sparse attention on a GPU takes bfloat16 rows or rows of bytes, not {rows.dtype}")
    if not scale > 0:
        raise ConfigError(f"a softmax scale of {scale} is not positive")
    if not 0 < rows.shape[0] <= MAX_ROWS:
        raise ConfigError(f"sparse attention on a GPU takes 1 to {MAX_ROWS} device rows, not {rows.shape[0]}")
    assert rows.stride(1) == 1, f"the values of a row are {rows.stride(1)} apart"
    for name, number in (("stride", rows.stride(0) * rows.element_size()), ("address", rows.data_ptr())):
        if number % ROW_ALIGN:
            raise ConfigError(f"rows at {name} {number}: it must be a multiple of {ROW_ALIGN} bytes")


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
