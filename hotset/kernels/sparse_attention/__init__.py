"""sparse_attention: absorbed MLA attention of each query over its own list of device rows."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.rows import ROW_ALIGN, RowLayout
from hotset.kernels.sparse_attention import cpu_impl, reference

# The limits of the GPU kernels.
RANKS = (64, 128, 256, 512)
ROPES = (16, 32, 64, 128)
MAX_ROWS = 2**31 - 1


def sparse_attention(
    q: Tensor,  # [queries, heads, rank + rope]: latent part absorbed through the key up-projection, then the rope part
    rows: Tensor,  # [device rows, stored width]: latent | rope key, as `layout` stores them
    row_ids: Tensor,  # [queries, k] int64 device rows, EMPTY-padded anywhere
    layout: RowLayout,
    rank: int,
    scale: float,
) -> Tensor:  # [queries, heads, rank]: attention-weighted latents, before the value up-projection
    """Returns the sum of the latents of the rows in `row_ids`, weighted by softmax(scale * q . row).

    The order of row ids is irrelevant. A query without rows (a padding query) gets zeros, whatever its q contains.
    bfloat16 queries on a GPU use the fast path, which can be captured in a graph. It supports any number of heads and
    of row ids, the ranks RANKS, the ropes ROPES, plain rows, and rows whose latent is fp8. For other sizes, it raises a
    ConfigError that contains the value. On a GPU, queries of other dtypes use the reference. On a CPU, all calls use
    `cpu_impl`.
    """
    if q.shape[2] != layout.width:
        raise InternalError(f"queries have {q.shape[2]} values, but rows have {layout.width}")
    if row_ids.shape[0] != q.shape[0]:
        raise InternalError(f"{row_ids.shape[0]} lists of row ids for {q.shape[0]} queries")
    if q.device.type == "cpu":
        return cpu_impl.sparse_attention(q, rows, row_ids, layout, rank, scale)
    if q.dtype != torch.bfloat16:
        return reference.sparse_attention(q, rows, row_ids, layout, rank, scale)
    check(rows, layout, rank, scale)
    attended: Tensor = kernels_of("sparse_attention").sparse_attention(q, rows, row_ids, layout, rank, scale)
    return attended


def check(rows: Tensor, layout: RowLayout, rank: int, scale: float) -> None:
    """Raises ConfigError if the GPU kernels do not support these arguments."""
    rope = layout.width - rank
    if rank not in RANKS:
        raise ConfigError(f"sparse attention on a GPU supports a latent rank of {_listed(RANKS)}, not {rank}")
    if rope not in ROPES:
        raise ConfigError(f"sparse attention on a GPU supports {_listed(ROPES)} rope values, not {rope}")
    if layout.quantised not in (0, rank):
        raise ConfigError(
            f"{layout.quantised} values of a row are fp8; the GPU kernels support none or the {rank} of the latent"
        )
    if layout.dtype != torch.bfloat16 or rows.dtype != layout.stored_dtype:
        raise ConfigError(
            "sparse attention on a GPU supports bfloat16 rows, plain or with an fp8 latent, "
            f"not {rows.dtype} rows in a {layout.dtype} layout"
        )
    if not scale > 0:
        raise ConfigError(f"a softmax scale of {scale} is not supported; it must be positive")
    if not 0 < rows.shape[0] <= MAX_ROWS:
        raise ConfigError(f"sparse attention on a GPU supports 1 to {MAX_ROWS} device rows, not {rows.shape[0]}")
    if rows.stride(1) != 1:
        raise InternalError(f"the values of a row must be adjacent, but their stride is {rows.stride(1)}")
    for name, number in (("stride", rows.stride(0) * rows.element_size()), ("address", rows.data_ptr())):
        if number % ROW_ALIGN:
            raise ConfigError(f"rows have {name} {number}: it must be a multiple of {ROW_ALIGN} bytes")


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
