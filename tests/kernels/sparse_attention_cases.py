"""Inputs for the tests of sparse_attention, and the check of its results."""

from dataclasses import dataclass

import torch
from interpreted import INTERPRETED
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, mla_row
from hotset.kernels.sparse_attention import reference
from hotset.kernels.sparse_attention.launch import AttentionShape

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The upper limit of the relative error of all outputs together. Rounding one operand or result to 8 significant bits
# causes a relative error of at most 1/256.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Case:
    """Queries with k entries (row ids) each. Half of the rows of the pool are NaN, and no query selects one of these.

    If there are several queries, the last one is padding: its entries are EMPTY and its q is NaN. Some entries of the
    other queries are EMPTY, and so are all entries from `used` on (if it is not None).
    """

    queries: int
    heads: int
    k: int
    rank: int = 512
    rope: int = 64
    fp8: bool = False
    used: int | None = None
    magnitude: float = 1.0  # factor of the latents; the latent part of q is divided by it
    uneven: bool = False  # in each row, one block of 128 latents is 2**18 times as large as the others
    spare_bytes: int = 0  # gap between one row and the next

    @property
    def layout(self) -> RowLayout:
        return mla_row(self.rank, self.rope, torch.bfloat16, self.fp8)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.queries, self.heads, self.k, self.rank, self.rope, self.fp8)

    @property
    def scale(self) -> float:
        return float((self.rank + self.rope) ** -0.5)


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: Tensor
    pool: Tensor
    row_ids: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, RowLayout, int, float]:
        return self.q, self.pool, self.row_ids, self.case.layout, self.case.rank, self.case.scale

    def expected(self) -> Tensor:
        q, pool, row_ids, layout, rank, scale = self.arguments
        return reference.sparse_attention(q.float(), pool, row_ids, layout, rank, scale)

    def check(self, out: Tensor) -> None:
        live = max(1, self.case.queries - 1)
        expected = self.expected()
        assert bool(torch.isfinite(out).all()), "an output was not written, or NaN was read"
        error = float((out[:live].double() - expected[:live].double()).norm() / expected[:live].double().norm())
        assert error < TOLERANCE, f"the relative error is {error:.4f}, not below {TOLERANCE}"
        assert bool((out[live:] == 0).all()), "the output of a padded query is not zero"


def make_inputs(case: Case, seed: int = 0, device: torch.device = DEVICE, pool_rows: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    layout, live = case.layout, max(1, case.queries - 1)
    count = pool_rows or max(64, min(live * case.k, 1 << 15))
    usable = count // 2
    values = torch.randn(usable, layout.width, device=device, generator=generator)
    latents = values[:, : case.rank]
    latents *= case.magnitude
    if case.uneven:
        blocks = latents.unflatten(1, (-1, 128))  # one fp8 scale per block
        largest = torch.arange(usable, device=device) % blocks.shape[1]
        blocks[torch.arange(blocks.shape[1], device=device) != largest[:, None]] *= 2.0**-18
    stride = layout.stride_bytes + case.spare_bytes
    memory = torch.full((count, stride), 0xFF, dtype=torch.uint8, device=device)  # NaN in fp8 and in bfloat16
    pool = memory.view(layout.stored_dtype)[:, : layout.stored_width]
    # Row 0 stays NaN, to notice a kernel that clamps EMPTY to 0.
    filled = 1 + torch.randperm(count - 1, device=device, generator=generator)[:usable]
    pool[filled] = layout.encode(values.to(torch.bfloat16))
    row_ids = filled[torch.randint(usable, (case.queries, case.k), device=device, generator=generator)]
    row_ids[torch.rand(row_ids.shape, device=device, generator=generator) < 0.2] = EMPTY
    row_ids[:, 0] = filled[0]
    row_ids[:, case.k if case.used is None else case.used :] = EMPTY
    row_ids[live:] = EMPTY
    q = torch.randn(case.queries, case.heads, layout.width, device=device, generator=generator)
    q[:, :, : case.rank] /= case.magnitude
    q[live:] = float("nan")
    return Inputs(case, q.to(torch.bfloat16), pool, row_ids)
