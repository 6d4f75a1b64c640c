"""paged_attention: full causal attention with grouped heads, over contexts found through page tables.

On a GPU, in bfloat16 and float32, kernels read only the page table, seats and positions on the device. A step in which
every segment has one query can therefore be captured in a graph. A padding query (seat EMPTY) gets zeros. Decoding is
in Triton; prompts have a kernel for Hopper, and one in Triton. All other calls use the reference, which reads
`PagedRows.runs`.
"""

from dataclasses import replace
from itertools import takewhile
from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.paged_attention import reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments

MAX_FAST_DIM = 256
MAX_FAST_GROUP = 64  # heads that share a KV head
MAX_DECODED = 16  # tokens of a request, drafts included, that are computed one by one, each reading the whole context


def paged_attention(
    q: Tensor,  # [queries, heads, head_dim]
    context: PagedRows,  # rows of [K of every head | V of every head], including those of this step
    segments: Segments,
    kv_heads: int,
    scale: float,
) -> Tensor:  # [queries, heads, head_dim]
    """Computes the attention of each query over its context, up to and including its own position.

    Raises ConfigError before any launch if the fast path does not support the sizes of the heads.
    """
    heads, head_dim = q.shape[1:]
    if heads % kv_heads != 0:
        raise InternalError(f"{heads} heads are not a multiple of {kv_heads} KV heads")
    if context.layout.width != 2 * kv_heads * head_dim:
        raise InternalError(f"rows of {context.layout.width} values cannot hold K and V")
    if not has_fast_path(q):
        return reference.paged_attention(q, context, segments, kv_heads, scale)
    if head_dim > MAX_FAST_DIM or head_dim % 8:
        raise ConfigError(f"heads of {head_dim} values: a GPU supports multiples of 8 up to {MAX_FAST_DIM}")
    if heads // kv_heads > MAX_FAST_GROUP:
        raise ConfigError(f"{heads // kv_heads} heads share a KV head: a GPU supports up to {MAX_FAST_GROUP}")
    _check_strides(q, context, segments.positions)
    # Decoding requests precede prompts in a step. A prompt's tile would have only a few tokens of such a request.
    short = sum(takewhile(lambda count: count <= MAX_DECODED, segments.counts))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    positions, seat_of = segments.positions, context.seat_of
    decoding, prompts = (replace(context, seat_of=part) for part in (seat_of[:short], seat_of[short:]))
    kernels_of("paged_attention").decode(q[:short], decoding, positions[:short], kv_heads, scale, out[:short])
    _prefill_kernels(q, context).prefill(
        q[short:], prompts, positions[short:], segments.segment_of[short:], kv_heads, scale, out[short:]
    )
    return out


def _prefill_kernels(q: Tensor, context: PagedRows) -> ModuleType:
    cuda = kernels_of("paged_attention", "cuda_prefill")
    return cuda if cuda.supports(q, context) else kernels_of("paged_attention", "triton_prefill")


def _check_strides(q: Tensor, context: PagedRows, positions: Tensor) -> None:
    """Checks what the kernels assume about the memory of their arguments."""
    blocks, table = context.blocks, context.table
    if blocks.shape[0] != 1:
        raise InternalError(f"pages with {blocks.shape[0]} parts cannot hold KV rows")
    if not (blocks.stride(3) == 1 and table.stride(1) == 1):
        raise InternalError("values and pages must be adjacent")
    if not (q.stride(2) == 1 and context.seat_of.is_contiguous() and positions.is_contiguous()):
        raise InternalError("values of q, seats and positions must be adjacent")
