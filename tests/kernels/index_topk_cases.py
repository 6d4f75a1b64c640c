"""Inputs for the tests of index_topk's kernels, the scores of the reference, and a check of selections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.fp8 import round_to_fp8
from hotset.kernels.index_topk import reference
from hotset.kernels.index_topk.scores import Scores
from hotset.kernels.rows import PagedRows, index_key_row
from hotset.kernels.segments import Segments, make_segments
from hotset.kernels.stable_topk import stable_topk

SCALE = 0.0883
NAN, INFINITY = float("nan"), float("inf")
# The kinds of scores that `draw_scores` draws.
KINDS = ["normal", "ties", "all equal", "zeros of both signs", "mostly zero", "NaN and infinities", "few finite"]
KINDS += ["one outlier", "heavy tail", "huge", "tiny", "large mean", "ascending", "descending"]


@dataclass(frozen=True)
class Case:
    """Queries of several contexts, whose index keys are scattered over a pool of pages."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 32
    dim: int = 128
    fp8: bool = True
    dtype: torch.dtype = torch.bfloat16
    block_rows: int = 318
    parts: int = 1
    step: int = 1  # above 1: other index groups use the parts between
    first_part: int = 0

    @property
    def decoding(self) -> bool:
        return len(self.counts) == sum(self.counts)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    weights: Tensor
    keys: PagedRows
    segments: Segments

    def captured(self) -> "Inputs":
        """Returns the inputs as in a captured graph: without host-side data (lengths, runs of pages)."""
        segments = Segments((), (), self.segments.positions, self.segments.segment_of)
        return replace(self, segments=segments, keys=replace(self.keys, runs=()))


def make_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Makes inputs. The pool is NaN wherever it has no key. Queries and pool are views of larger tensors."""
    torch.manual_seed(seed)
    layout = index_key_row(case.dim, case.dtype, case.fp8)
    pages_of = [-(-(-(-length // case.block_rows) * case.step) // case.parts) for length in case.lengths]
    order = torch.randperm(sum(pages_of) + 3)
    used = case.block_rows * layout.stored_width
    block_values = -(-used // 16) * 16 + 16
    pool = torch.empty(case.parts, len(order), block_values, dtype=layout.stored_dtype, device=device)
    pool.view(torch.uint8).fill_(0xFF)  # NaN in e4m3, bfloat16, float16 and float32
    blocks = pool[:, :, :used].unflatten(2, (case.block_rows, layout.stored_width))
    seats = torch.randperm(len(case.lengths) + 2)[: len(case.lengths)]
    table = torch.full((len(case.lengths) + 2, max(pages_of) + 1), EMPTY)
    runs, taken = [], 0
    for seat, length, count in zip(seats.tolist(), case.lengths, pages_of, strict=True):
        pages = order[taken : taken + count]
        taken += count
        table[seat, :count] = pages
        runs.append([(page, 1) for page in pages.tolist()])
        position, pages = torch.arange(length, device=device), pages.to(device)
        stored = layout.encode(torch.randn(length, case.dim, device=device).to(case.dtype))
        part = position // case.block_rows * case.step + case.first_part
        blocks[part % case.parts, pages[part // case.parts], position % case.block_rows] = stored
    rows = sum(case.counts)
    wide = torch.randn(rows, case.heads + 1, case.dim + 16, device=device)
    wide *= torch.logspace(-3, 3, case.heads + 1, device=device)[:, None]  # heads of very different magnitude
    starts = [length - count for length, count in zip(case.lengths, case.counts, strict=True)]
    return Inputs(
        wide.to(case.dtype)[:, 1:, 16:],
        torch.randn(rows, case.heads, device=device) * torch.logspace(3, -3, case.heads, device=device),
        PagedRows(
            blocks,
            runs,
            layout,
            table.to(device),
            seats.repeat_interleave(torch.tensor(case.counts)).to(device),
            step=case.step,
            first_part=case.first_part,
        ),
        make_segments(starts, case.counts, device),
    )


def with_padding(inputs: Inputs) -> Inputs:
    """Adds a padded query before the first query and one after the last. Their positions are meaningless."""
    rows = inputs.q.shape[0]
    order = torch.tensor([0, *range(rows), rows - 1], device=inputs.q.device)
    seat_of, positions = inputs.keys.seat_of[order], inputs.segments.positions[order]
    seat_of[[0, -1]] = EMPTY
    positions[0] = 1 << 40
    return Inputs(
        inputs.q[order],
        inputs.weights[order],
        replace(inputs.keys, seat_of=seat_of, runs=()),
        Segments((), (), positions, torch.zeros_like(positions)),
    )


def reference_scores(inputs: Inputs) -> list[Tensor]:
    """Returns the float32 scores of each query, for all positions up to the query's position."""
    q = round_to_fp8(inputs.q) if inputs.keys.layout.quantised else inputs.q
    rows: list[Tensor] = []
    for segment, first, last, length in inputs.segments:
        context = inputs.keys.gather(segment, length, torch.float32)
        positions = inputs.segments.positions[first:last]
        scores = reference.index_scores(q[first:last], inputs.weights[first:last], context, positions, SCALE)
        rows.extend(row[: int(position) + 1] for row, position in zip(scores, positions, strict=True))
    return rows


def draw_scores(kind: str, rows: int, context: int) -> Tensor:
    x = torch.randn(rows, context)
    quarter = torch.randint(0, 4, x.shape)
    return {
        "normal": x,
        "ties": (2 * x).round(),
        "all equal": torch.full_like(x, -3.25),
        "zeros of both signs": torch.where(x > 2.5, x, torch.where(quarter > 1, 0.0, -0.0)),
        "mostly zero": torch.relu(x - 1.0),
        "one outlier": torch.where(torch.arange(context) == 17, 1e9, x),
        "heavy tail": x.exp().pow(4),
        "huge": x * 1e37,
        "tiny": x * 1e-42,
        "large mean": 1e6 + x,
        "ascending": torch.arange(context).float().expand(rows, -1).contiguous(),
        "descending": -torch.arange(context).float().expand(rows, -1).contiguous(),
        "NaN and infinities": torch.where(
            quarter == 0, NAN, torch.where(quarter == 1, -INFINITY, torch.where(x > 1, INFINITY, x))
        ),
        "few finite": torch.where(x > 3.2, x, -INFINITY),
    }[kind]


def check_selection(
    device: torch.device,
    select: Callable[[Scores, Tensor, Tensor, int, Tensor], None],
    values: Tensor,
    lengths: Sequence[int],
    k: int,
    moments: Tensor | None = None,
) -> None:
    """Checks that `select` selects the same positions as stable_topk from each row of `values`, up to its length.

    A padded query is added before the first row and after the last. If `moments` is None, the correct moments are used.
    """
    rows, context = len(lengths), values.shape[1]
    visible = torch.arange(context) < torch.tensor(lengths)[:, None]
    comparable = torch.where(visible & ~values.isnan(), values, -INFINITY)
    if moments is None:
        finite = torch.where(visible & values.isfinite(), values, 0.0).double()
        moments = torch.stack((finite.sum(1), finite.square().sum(1)), 1)[:, None].float()
    expected = torch.full((rows + 2, k), EMPTY)
    for row, length in enumerate(lengths):
        # A query of at most k positions selects them all, whatever their scores.
        expected[row + 1] = stable_topk(comparable[row : row + 1], k) if length > k else all_positions(length, k)
    poisoned = torch.where(visible, values, torch.where(torch.rand(values.shape) < 0.5, NAN, INFINITY))
    seats = torch.tensor([EMPTY, *range(rows), EMPTY], device=device)
    positions = torch.tensor([5, *(length - 1 for length in lengths), context - 1], device=device)
    scores = Scores(
        torch.cat((poisoned[:1], poisoned, poisoned[:1])).to(device),
        torch.cat((moments[:1], moments, moments[:1])).to(device),
        torch.full((rows + 2,), moments.shape[1], dtype=torch.int32, device=device),
    )
    out = torch.full((rows + 2, k), -7, device=device)
    select(scores, seats, positions, k, out)
    assert torch.equal(out.cpu(), expected)


def all_positions(length: int, k: int) -> Tensor:
    return torch.where(torch.arange(k) < length, torch.arange(k), EMPTY)
