"""Compares index_topk's Triton kernels: the scores with the reference, the selection with stable_topk.

All tests require a GPU. With TRITON_INTERPRET=1, most of them run with smaller sizes on CPU tensors instead (see
test_interpreted.py).
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from index_topk_cases import (
    KINDS,
    SCALE,
    Case,
    Inputs,
    all_positions,
    check_selection,
    draw_scores,
    make_inputs,
    reference_scores,
    with_padding,
)
from interpreted import INTERPRETED
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.kernels.index_topk import index_topk, reference
from hotset.kernels.stable_topk import stable_topk

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CONTEXT = 4096 if INTERPRETED else 12_288  # positions per query in the tests of the selection
NAN, INFINITY = float("nan"), float("inf")

if INTERPRETED:  # numpy warns of infinities, but these are intended
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return test if INTERPRETED else pytest.mark.gpu(test)


@pytest.fixture
def impl() -> ModuleType:
    if INTERPRETED:  # the interpreter multiplies bfloat16 wrongly; float32 represents the same values
        score = importlib.import_module("hotset.kernels.index_topk.triton_score")
        score.OPERAND[torch.bfloat16] = importlib.import_module("triton.language").float32
    return importlib.import_module("hotset.kernels.index_topk.triton_impl")


def poisoned_empty(*size: int, **options: Any) -> Tensor:
    """Replaces torch.empty. The memory holds NaN if its type has one."""
    tensor = torch.zeros(*size, **options)
    return tensor.fill_(NAN if tensor.is_floating_point() else -77)


def run_score(impl: ModuleType, inputs: Inputs, k: int = 0, *, share_context: bool = False) -> Any:
    context = -(-int(inputs.segments.positions.max() + 1) // 4096) * 4096
    seats, positions = inputs.keys.seat_of, inputs.segments.positions
    arguments = (inputs.q, inputs.weights, inputs.keys, seats, positions, context, k, SCALE)
    with mock.patch.object(torch, "empty", poisoned_empty):
        return impl.score(*arguments, share_context=share_context)


SMALL = [
    Case((1, 1, 1), (300, 77, 150), heads=5, dim=64, block_rows=70, parts=2),
    Case((1, 1), (200, 64), heads=20, dim=32, fp8=False, block_rows=64),
    Case((1,), (40,), heads=16, dim=32, block_rows=11, parts=3),
    Case((1, 6, 2), (90, 95, 40), heads=16, dim=32, block_rows=80),
    Case((1, 1), (333, 70), heads=16, dim=32, block_rows=66, parts=5, step=3, first_part=2),
    Case((5,), (150,), heads=64, dim=32, fp8=False, block_rows=100),
]
LARGE = [
    Case((1,) * 7, (1, 63, 318, 319, 2049, 5000, 40_000)),
    Case((1,) * 3, (3000, 12_345, 700), heads=64, parts=3),
    Case((1,) * 2, (9000, 100), heads=4, dim=64, block_rows=41, parts=2),
    Case((1,) * 3, (4096, 4097, 33), fp8=False, block_rows=164),
    Case((1,) * 2, (1000, 2000), heads=128, fp8=False, dtype=torch.float16, block_rows=288),
    Case((1,) * 2, (1000, 2000), heads=1, dim=32, block_rows=558),
    Case((37, 1, 130), (500, 9000, 2000), heads=32),
    Case((3, 8, 64), (3, 800, 700), heads=64, fp8=False, block_rows=288, parts=2),
    Case((50, 20), (1200, 6000), heads=4, block_rows=318, parts=2),
    Case((1,) * 5, (1, 319, 5000, 40_000, 40_001), parts=26, step=7, first_part=6),
    Case((50, 20), (1200, 9000), heads=64, fp8=False, block_rows=288, parts=26, step=7),
]
CASES = SMALL if INTERPRETED else LARGE


@on_device
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_equal_the_reference(impl: ModuleType, case: Case) -> None:
    # Products of 16-bit (or e4m3) operands are exact in float32: only the order of the sums differs.
    inputs = make_inputs(case, seed=1, device=DEVICE)
    expected = reference_scores(inputs)
    scores = run_score(impl, inputs, share_context=not case.decoding)
    for row, (position, exact) in enumerate(zip(inputs.segments.positions.tolist(), expected, strict=True)):
        got = scores.values[row, : position + 1]
        assert float((got - exact).norm() / exact.norm()) < 1e-3
        sums = scores.moments[row, : int(scores.shares[row])].sum(0)
        assert abs(float(sums[0] - got.sum())) < 1e-3 * float(got.abs().sum())
        torch.testing.assert_close(sums[1], got.square().sum(), rtol=1e-3, atol=0.0)


@on_device
def test_padded_queries_and_queries_that_select_every_position_are_not_scored(impl: ModuleType) -> None:
    case = CASES[0]
    inputs = make_inputs(case, seed=2, device=DEVICE)
    k = sorted(case.lengths)[len(case.lengths) // 2]
    seats = inputs.keys.seat_of.clone()
    seats[0] = EMPTY
    inputs = replace(inputs, keys=replace(inputs.keys, seat_of=seats))
    for row, (length, values) in enumerate(zip(case.lengths, run_score(impl, inputs, k).values, strict=True)):
        assert bool(values.isnan().all()) == (row == 0 or length <= k)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 128, 1000, 2048, 4096])
def test_selection_equals_stable_topk(impl: ModuleType, kind: str, k: int) -> None:
    torch.manual_seed(k)
    lengths = [CONTEXT, CONTEXT - 1, 8192, 7001, 4097, 4097]
    check_selection(DEVICE, impl.select, draw_scores(kind, len(lengths), CONTEXT), lengths, k)


@on_device
@pytest.mark.parametrize("k", [1, 2, 127, 1023, 2048, 4095])
def test_selection_is_exact_at_lengths_around_k_and_around_block_boundaries(impl: ModuleType, k: int) -> None:
    torch.manual_seed(k)
    lengths = sorted({1, k - 1, k, k + 1, 2047, 2048, 2049, 4095, 4096} - {0})
    check_selection(DEVICE, impl.select, draw_scores("ties", len(lengths), CONTEXT), lengths, k)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [0.0, 1.0, -5.0, NAN, INFINITY, 1e38])
def test_wrong_moments_do_not_change_the_selection(impl: ModuleType, wrong: float) -> None:
    torch.manual_seed(3)
    moments = torch.full((2, 3, 2), wrong)
    moments[1, :, 0] *= -1
    check_selection(DEVICE, impl.select, draw_scores("ties", 2, CONTEXT), [3000, CONTEXT], 40, moments)


@pytest.mark.gpu
def test_queries_whose_candidate_list_overflows_do_not_affect_others(impl: ModuleType) -> None:
    torch.manual_seed(8)
    values = draw_scores("normal", 24, CONTEXT)
    values[::2] = 1.5
    check_selection(DEVICE, impl.select, values, [CONTEXT] * 24, 100)


@on_device
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("case", [SMALL[3]] if INTERPRETED else [LARGE[0], LARGE[6], LARGE[8], LARGE[9]], ids=str)
def test_index_topk_selects_the_best_of_the_computed_scores(impl: ModuleType, case: Case, captured: bool) -> None:
    inputs = make_inputs(case, seed=4, device=DEVICE)
    k = 20 if INTERPRETED else 300
    op = impl.index_topk if INTERPRETED else index_topk
    arguments = inputs.captured() if captured else inputs
    out = op(arguments.q, arguments.weights, arguments.keys, arguments.segments, k, SCALE)
    values = run_score(impl, inputs, share_context=not captured and not case.decoding).values
    for row, position in enumerate(inputs.segments.positions.tolist()):
        scores = values[row : row + 1, : position + 1]
        best = stable_topk(scores, k)[0].cpu() if position + 1 > k else all_positions(position + 1, k)
        assert torch.equal(out[row].cpu(), best)
    expected = reference.index_topk(inputs.q, inputs.weights, inputs.keys, inputs.segments, k, SCALE)
    # Rounding may change which of two nearly equal scores is selected.
    assert float((out == expected).all(1).float().mean()) > 0.9


@on_device
def test_queries_beyond_the_workspace_form_batches(impl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((1, 4), (40, 30), heads=16, dim=32, block_rows=80) if INTERPRETED else LARGE[3]
    inputs = with_padding(make_inputs(case, seed=5, device=DEVICE))
    arguments = (inputs.q, inputs.weights, inputs.keys, inputs.segments, 13, SCALE)
    in_one_batch = impl.index_topk(*arguments)
    monkeypatch.setattr(impl, "WORKSPACE_BYTES", 3 * 4 * 4096)
    assert torch.equal(impl.index_topk(*arguments), in_one_batch)
    assert bool((in_one_batch[[0, -1]] == EMPTY).all()) and bool((in_one_batch[1:-1] != EMPTY).any(1).all())


@pytest.mark.gpu
def test_a_graph_reads_tables_seats_and_positions_at_replay() -> None:
    case = Case((1,) * 6, (20_000, 3000, 2049, 2048, 1, 9000))
    inputs = with_padding(make_inputs(case, seed=6, device=DEVICE))
    arguments = (inputs.q, inputs.weights, inputs.keys, inputs.segments, 2048, SCALE)
    index_topk(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_topk(*arguments)
    for _ in range(3):
        order = torch.randperm(8, device=DEVICE)
        inputs.keys.seat_of.copy_(inputs.keys.seat_of[order])
        inputs.segments.positions.copy_(inputs.segments.positions[order])
        inputs.q.copy_(torch.randn_like(inputs.q))
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, index_topk(*arguments))
        assert torch.equal((out == EMPTY).all(1), inputs.keys.seat_of == EMPTY)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changed", "k", "message"),
    [
        ({"dim": 16}, 8, "index_head_dim of 16"),
        ({"heads": 129}, 8, "129 index heads"),
        ({}, 4097, "top-k of 4097"),
        ({"fp8": False, "dtype": torch.float32}, 8, "index keys of torch.float32"),
    ],
)
def test_unsupported_sizes_are_refused(changed: dict[str, Any], k: int, message: str) -> None:
    inputs = make_inputs(replace(Case((1,), (9,), heads=2), **changed), seed=7, device=DEVICE)
    with pytest.raises(ConfigError, match=message):
        index_topk(inputs.q.bfloat16(), inputs.weights, inputs.keys, inputs.segments, k, SCALE)
