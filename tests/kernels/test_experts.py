"""Compares the op `experts` with a loop over tokens and experts, and tests EMPTY expert ids.

Tests without a marker run with the reference. With TRITON_INTERPRET=1 they run with the Triton kernels on CPU tensors
instead (see test_interpreted.py).
"""

from dataclasses import replace

import pytest
import torch
from examples import examples
from experts_cases import Case, draw_tokens, relative_error
from hypothesis import Phase, given
from hypothesis import strategies as st
from interpreted import INTERPRETED
from kernel_tensors import poison_free_memory
from matrix import matrix
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels import EMPTY
from hotset.kernels.experts import MAX_EXPERTS, experts, reference
from hotset.kernels.fast_path import kernels_of

needs_interpreter = pytest.mark.interpreted
pytestmark = pytest.mark.usefixtures("poisoned_memory")
# The interpreter is slow: few examples, and no shrinking of failing ones.
EXAMPLES = examples(4, phases=[Phase.generate]) if INTERPRETED else examples(20)

# The limit of the relative error. The kernels round at most four times to 8 significant bits: the first product (only
# with torch's grouped product), the activation, the result of each expert, and the sum. The roundings are independent.
# Each has an error of about 2**-9, all together about 4e-3. A wrong expert, token or weight causes an error of about 1.
BF16_ERROR = 1e-2


def draw_weights(count: int, hidden: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(count, 2 * width, hidden, dtype=dtype, device=device).mul_(hidden**-0.5)
    down = torch.randn(count, hidden, width, dtype=dtype, device=device).mul_(width**-0.5)
    return gate_up, down


def draw_case(tokens: int, k: int, gate_up: Tensor, down: Tensor) -> Case:
    case = draw_tokens(tokens, k, gate_up, down)
    return replace(case, x=case.x.to(gate_up.dtype))


def widened(case: Case) -> Case:
    return Case(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in case.arguments))


def expected_output(case: Case) -> Tensor:
    out = torch.zeros_like(case.x, dtype=torch.float64)
    for token, ids in enumerate(case.expert_ids.tolist()):
        for expert, weight in zip(ids, case.weights[token].tolist(), strict=True):
            if expert != EMPTY:
                gate, up = (case.gate_up[expert].double() @ case.x[token].double()).chunk(2)
                out[token] += weight * (case.down[expert].double() @ (F.silu(gate) * up))
    return out


def run_op(case: Case, first_expert: int = 0) -> Tensor:
    """Runs the implementation under test."""
    if not INTERPRETED:
        return reference.experts(*case.arguments, first_expert)
    out: Tensor = kernels_of("experts").experts(*case.arguments, pairs_per_expert=1, first_expert=first_expert)
    return out


@EXAMPLES
@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 2**31), st.data())
def test_empty_expert_ids_add_nothing_and_read_nothing(tokens: int, count: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, count))
    case = draw_case(tokens, k, *draw_weights(count, 12, 5, torch.float32, "cpu"))
    case.expert_ids[torch.rand(tokens, k) < 0.4] = EMPTY
    case.expert_ids[0] = EMPTY  # a padded token
    unused = sorted(set(range(count)) - set(case.expert_ids.flatten().tolist()))
    case.gate_up[unused], case.down[unused] = float("nan"), float("nan")
    out = run_op(case)
    torch.testing.assert_close(out.double(), expected_output(case), atol=1e-5, rtol=1e-5)
    assert not out[0].any()


@pytest.mark.parametrize("first", [0, 5])
def test_experts_of_other_ranks_add_nothing(first: int) -> None:
    torch.manual_seed(4)
    case = draw_case(12, 3, *draw_weights(7, 12, 5, torch.float32, "cpu"))
    case.expert_ids[torch.rand(12, 3) < 0.2] = EMPTY
    held = slice(first, first + 2)
    local = (case.expert_ids >= held.start) & (case.expert_ids < held.stop)
    expected = expected_output(replace(case, expert_ids=torch.where(local, case.expert_ids, EMPTY)))
    case.weights[~local] = float("nan")  # these are not used
    out = run_op(replace(case, gate_up=case.gate_up[held], down=case.down[held]), first)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_experts_of_another_dtype_are_refused() -> None:
    gate_up, down = draw_weights(2, 8, 6, torch.bfloat16, "cpu")
    case = draw_case(3, 2, gate_up, down)
    with pytest.raises(InternalError, match=r"x is torch\.float32, but the experts are torch\.bfloat16"):
        experts(case.x.float(), case.expert_ids, case.weights, gate_up, down)


@needs_interpreter
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(12, 64, 32), (12, 17, 5), (12, 33, 40), (1, 33, 40)])
def test_tiled_products_equal_a_loop_over_tokens(tokens: int, hidden: int, width: int) -> None:
    impl = kernels_of("experts")
    tiles = impl.Tiles(16, impl.Tile(32, 16, 4, 2), impl.Tile(16, 32, 4, 2))
    torch.manual_seed(tokens + hidden)
    case = draw_case(tokens, 3, *draw_weights(5, hidden, width, torch.float32, "cpu"))
    out = impl.experts_in_tiles(*case.arguments, tiles)
    torch.testing.assert_close(out.double(), expected_output(case), atol=1e-5, rtol=1e-5)


@needs_interpreter
@pytest.mark.parametrize(("hidden", "width", "first"), matrix([(17, 5), (33, 12)], [0, 2], together=1))
def test_a_single_token_equals_a_loop_over_its_experts(hidden: int, width: int, first: int) -> None:
    torch.manual_seed(hidden + first)
    case = draw_case(1, 5, *draw_weights(7, hidden, width, torch.bfloat16, "cpu"))
    case.expert_ids[0, 1] = EMPTY
    held = slice(first, first + 4)
    local = (case.expert_ids >= held.start) & (case.expert_ids < held.stop)
    expected = expected_output(replace(case, expert_ids=torch.where(local, case.expert_ids, EMPTY)))
    case.weights[~local] = float("nan")  # these are not used
    unused = sorted(set(range(7)) - set(case.expert_ids[local].tolist()))
    case.gate_up[unused], case.down[unused] = float("nan"), float("nan")
    part = replace(case, gate_up=case.gate_up[held], down=case.down[held])
    assert kernels_of("experts", "triton_one_token").supports(part.x, part.down)
    inputs = (torch.stack((tensor, torch.full_like(tensor, 77)), dim=2)[:, :, 0] for tensor in part.arguments[:3])
    strided = Case(*inputs, part.gate_up, part.down)
    assert not (strided.x.is_contiguous() or strided.expert_ids.is_contiguous() or strided.weights.is_contiguous())
    for each in (part, strided):
        assert relative_error(run_op(each, first), expected) <= BF16_ERROR
    part.expert_ids[:] = EMPTY
    assert not run_op(part, first).any()


@needs_interpreter
def test_an_expert_that_every_token_selects_is_computed_in_several_blocks() -> None:
    torch.manual_seed(1)
    case = draw_case(37, 1, *draw_weights(5, 20, 12, torch.float32, "cpu"))
    case.expert_ids[:] = 3
    case.gate_up[[0, 1, 2, 4]] = float("nan")
    torch.testing.assert_close(run_op(case).double(), expected_output(case), atol=1e-5, rtol=1e-5)


@needs_interpreter
def test_grouped_product_of_torch_equals_a_loop_over_tokens() -> None:
    torch.manual_seed(2)
    case = draw_case(40, 3, *draw_weights(5, 16, 8, torch.float32, "cpu"))
    case.expert_ids[torch.rand(40, 3) < 0.3] = EMPTY
    out = kernels_of("experts").experts_by_torch(*case.arguments)
    torch.testing.assert_close(out.double(), expected_output(case), atol=1e-5, rtol=1e-5)


@needs_interpreter
def test_inputs_need_not_be_contiguous() -> None:
    torch.manual_seed(3)
    case = draw_case(3, 2, *draw_weights(4, 20, 12, torch.float32, "cpu"))
    for strided in (with_other_strides(case), with_other_strides(case, transposed=True)):
        torch.testing.assert_close(run_op(strided), run_op(case), atol=0, rtol=0)


@needs_interpreter
@pytest.mark.parametrize(("tokens", "k", "count"), [(1, 1, 1), (3, 2, 7), (40, 3, 20), (1300, 4, 3)], ids=str)
def test_pairs_are_sorted_by_expert_stably_and_divided_into_blocks(tokens: int, k: int, count: int) -> None:
    torch.manual_seed(tokens)
    check_sort(torch.randint(EMPTY, count, (tokens, k)), count, block_pairs=16)


@needs_interpreter
@pytest.mark.parametrize("routing", ["random", "one expert", "only EMPTY", "two whole chunks"])
def test_pairs_of_several_chunks_are_sorted_stably(monkeypatch: pytest.MonkeyPatch, routing: str) -> None:
    # The 313 pairs are five chunks, of which the last is not full. The kernel reads the counts of two chunks at a time.
    monkeypatch.setattr(kernels_of("experts"), "CHUNK_SIZES", (16, 64))
    torch.manual_seed(6)
    expert_ids = torch.randint(EMPTY, 3, (313, 1))
    if routing == "one expert":
        expert_ids[:] = 1
    elif routing == "only EMPTY":
        expert_ids[:] = EMPTY
    elif routing == "two whole chunks":
        expert_ids = expert_ids[:128]
    check_sort(expert_ids, 3, block_pairs=4)


@needs_interpreter
def test_results_are_added_in_the_order_of_the_pairs() -> None:
    torch.manual_seed(7)
    expert_ids, weights = torch.randint(EMPTY, 4, (9, 3)), torch.rand(9, 3)
    by_expert = kernels_of("experts").sort_by_expert(expert_ids, 4, 16)
    results = torch.randn(27, 40)
    results[int(by_expert.ends[-1]) :] = float("nan")  # of EMPTY pairs
    expected = torch.zeros(9, 40)
    for token, column in (expert_ids != EMPTY).nonzero().tolist():
        expected[token] += weights[token, column] * results[by_expert.sorted_index[token * 3 + column]]
    assert torch.equal(kernels_of("experts").weighted_sum(results, by_expert, weights), expected)


def check_sort(expert_ids: Tensor, count: int, block_pairs: int) -> None:
    """Compares the sort with torch's."""
    order = kernels_of("experts").sort_by_expert(expert_ids, count, block_pairs)
    bins = torch.where(expert_ids == EMPTY, count, expert_ids).flatten()
    pairs = torch.sort(bins, stable=True).indices
    assert torch.equal(order.pairs.long(), pairs)
    assert torch.equal(order.pairs[order.sorted_index.long()].long(), torch.arange(len(bins), device=bins.device))
    counts = torch.bincount(bins, minlength=count + 1)[:count]
    ends = counts.cumsum(0)
    assert torch.equal(order.ends.long(), ends)
    runs = enumerate(zip((ends - counts).tolist(), ends.tolist(), strict=True))
    blocks = [(expert, first) for expert, (start, end) in runs for first in range(start, end, block_pairs)]
    got = zip(order.block_expert.tolist(), order.block_first.tolist(), strict=True)
    assert [(expert, first) for expert, first in got if expert != EMPTY] == blocks
    assert (order.block_expert[len(blocks) :] == EMPTY).all()
    assert order.num_blocks.tolist() == [len(blocks)]


def with_other_strides(case: Case, *, transposed: bool = False) -> Case:
    """Returns a case with the same values, with gaps between the tokens or (if `transposed`) transposed in memory."""

    def strided(tensor: Tensor) -> Tensor:
        if transposed:
            return tensor.t().contiguous().t()
        return torch.stack((torch.full_like(tensor, 77), tensor), dim=1)[:, 1]

    return Case(strided(case.x), strided(case.expert_ids), strided(case.weights), case.gate_up, case.down)


def check_on_gpu(case: Case, tolerance: float = BF16_ERROR) -> Tensor:
    expected = reference.experts(*widened(case).arguments)
    poison_free_memory()
    out = experts(*case.arguments)
    assert out.dtype == case.x.dtype and relative_error(out, expected) <= tolerance
    return out


@pytest.fixture(scope="module")
def production() -> tuple[Tensor, Tensor]:
    """Returns weights of 64 experts with 4096 inputs and a width of 1536."""
    torch.manual_seed(4)
    return draw_weights(64, 4096, 1536, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 64, 130, 256, 512, 700, 2048])
def test_on_a_gpu_production_sizes_equal_float32(production: tuple[Tensor, Tensor], tokens: int) -> None:
    check_on_gpu(draw_case(tokens, 6, *production))


@pytest.mark.gpu
def test_on_a_gpu_both_implementations_equal_float32_in_a_long_prefill(production: tuple[Tensor, Tensor]) -> None:
    case = draw_case(1500, 6, *production)
    case.expert_ids[::7] = EMPTY
    expected = reference.experts(*widened(case).arguments)
    impl = kernels_of("experts")
    for run in (
        lambda: impl.experts_by_torch(*case.arguments),
        lambda: impl.experts_in_tiles(*case.arguments, impl.tiles_for(torch.bfloat16, 1500)),
    ):
        poison_free_memory()
        assert relative_error(run(), expected) <= BF16_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "hidden", "width", "k", "tokens", "dtype"),
    [
        (8, 256, 160, 2, 1, torch.bfloat16),  # the sizes of the demo model
        (8, 256, 160, 2, 3, torch.bfloat16),
        (8, 256, 160, 2, 40, torch.bfloat16),
        (5, 72, 24, 3, 33, torch.bfloat16),
        (5, 72, 24, 3, 33, torch.float32),
        (3, 250, 37, 1, 100, torch.bfloat16),  # not aligned for 16-byte copies
        (3, 250, 37, 3, 1, torch.bfloat16),
        (5, 7168, 8192, 5, 1, torch.bfloat16),
        (256, 512, 64, 8, 17, torch.bfloat16),
    ],
    ids=str,
)
def test_on_a_gpu_odd_sizes_equal_float32(
    count: int, hidden: int, width: int, k: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    case = draw_case(tokens, k, *draw_weights(count, hidden, width, dtype, "cuda"))
    tolerance = 1e-5 if dtype == torch.float32 else BF16_ERROR
    out = check_on_gpu(case, tolerance)
    for strided in (with_other_strides(case), with_other_strides(case, transposed=True)):
        assert relative_error(experts(*strided.arguments), out) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "count"), [(512, 32), (513, 32), (16384, 32), (16384, 256)], ids=str)
def test_on_a_gpu_pairs_are_sorted_as_by_torch(tokens: int, count: int) -> None:
    torch.manual_seed(tokens)
    expert_ids = torch.randint(EMPTY, count, (tokens, 8), device="cuda")
    expert_ids[torch.rand(tokens, 8, device="cuda") < 0.5] = EMPTY  # experts of other ranks
    poison_free_memory()
    check_sort(expert_ids, count, block_pairs=64)
    poison_free_memory()
    check_sort(torch.full_like(expert_ids, count - 1), count, block_pairs=64)


@pytest.mark.gpu
def test_on_a_gpu_only_the_selected_expert_is_read(production: tuple[Tensor, Tensor]) -> None:
    gate_up, down = (weight[:4].clone() for weight in production)
    case = draw_case(70, 1, gate_up, down)
    case.expert_ids[:] = 2
    case.expert_ids[::5] = EMPTY
    gate_up[[0, 1, 3]], down[[0, 1, 3]] = float("nan"), float("nan")
    out = check_on_gpu(case)
    assert not out[::5].any()
    assert not experts(*case.first(1).arguments).any()


@pytest.mark.gpu
def test_on_a_gpu_a_token_has_the_same_result_in_every_decode_batch(production: tuple[Tensor, Tensor]) -> None:
    case = draw_case(256, 6, *production)
    whole = experts(*case.arguments)
    for tokens in (2, 16, 64, 128):
        part = experts(*case.first(tokens).arguments)
        assert torch.equal(part, whole[:tokens]), f"tokens have other results in a batch of {tokens}"


@pytest.mark.gpu
def test_on_a_gpu_too_many_experts_are_refused_before_launch() -> None:
    gate_up, down = draw_weights(MAX_EXPERTS + 1, 8, 8, torch.bfloat16, "cuda")
    with pytest.raises(ConfigError, match=f"{MAX_EXPERTS + 1} experts are more than the {MAX_EXPERTS}"):
        experts(*draw_case(2, 2, gate_up, down).arguments)
