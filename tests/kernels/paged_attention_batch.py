"""Contexts in pages for tests of paged_attention."""

import torch
from kernel_tensors import paged_rows
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.paged_attention import reference
from hotset.kernels.rows import PagedRows, gqa_row
from hotset.kernels.segments import Segments, make_segments

CPU = torch.device("cpu")


class Batch:
    """The newest tokens of each context (by default one), over a pool that is NaN wherever no context has a row.

    The last query is padding.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        page_rows: int,
        dtype: torch.dtype,
        counts: list[int] | None = None,
    ) -> None:
        self.kv_heads, self.scale, self.lengths = kv_heads, dim**-0.5, lengths
        self.counts = counts or [1] * len(lengths)
        self.layout = gqa_row(kv_heads, dim, dtype)
        contexts = [torch.randn(length, self.layout.width).to(dtype) for length in lengths]
        paged = paged_rows(contexts, self.counts, page_rows, self.layout)
        self.blocks, self.runs = paged.blocks, paged.runs
        # Neither the last seat nor the last page of any seat exists.
        self.table = torch.nn.functional.pad(paged.table, (0, 1, 0, 1), value=EMPTY)
        starts = [length - count for length, count in zip(lengths, self.counts, strict=True)]
        self.real = make_segments(starts, self.counts, CPU)
        self.q = torch.randn(sum(self.counts) + 1, heads + 3, dim).to(dtype)[:, 1 : heads + 1]
        self.positions = torch.cat((self.real.positions, torch.tensor([10**9])))
        self.segment_of = torch.cat((self.real.segment_of, torch.tensor([len(lengths)])))
        self.seat_of = torch.cat((self.real.segment_of, torch.tensor([EMPTY])))

    def context(self, device: torch.device) -> PagedRows:
        """Returns the context as in a captured graph: without runs."""
        return PagedRows(self.blocks.to(device), [], self.layout, self.table.to(device), self.seat_of.to(device))

    def segments(self, device: torch.device) -> Segments:
        counts = [*self.counts, 1]
        return Segments(counts, counts, self.positions.to(device), self.segment_of.to(device))

    def expect(self, wide: torch.dtype) -> Tensor:
        """Returns the result of the reference in a wider dtype, and zeros for the padded query."""
        layout = gqa_row(self.kv_heads, self.q.shape[2], wide)
        context = PagedRows(self.blocks.to(wide), self.runs, layout, self.table, self.seat_of[:-1])
        out = reference.paged_attention(self.q[:-1].to(wide), context, self.real, self.kv_heads, self.scale)
        return torch.cat((out, torch.zeros_like(out[:1])))


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected.double()).norm() / expected.double().norm())
