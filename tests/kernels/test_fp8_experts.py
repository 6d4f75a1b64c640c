"""Compares experts with weights in fp8 with float64 products of the same quantised numbers.

Tests without a marker run with the reference. Those marked `interpreted` run the Triton kernels on CPU tensors.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from examples import examples
from experts_cases import Case, relative_error
from fp8_experts_model import (
    BF16_ERROR,
    check_products,
    dequantised,
    draw_case,
    draw_weights,
    expected_activation,
    expected_output,
    fp8_impl,
    poison,
)
from hypothesis import Phase, given
from hypothesis import strategies as st
from interpreted import INTERPRETED
from kernel_tensors import poison_free_memory
from torch import Tensor

import hotset.kernels.experts as op
from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.experts import experts, reference
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight

needs_interpreter = pytest.mark.interpreted
pytestmark = pytest.mark.usefixtures("poisoned_memory")
# The interpreter is slow: few examples, and no shrinking of failing ones.
EXAMPLES = examples(2, phases=[Phase.generate]) if INTERPRETED else examples(20)


def small_tiles(block_pairs: int, tile_out: int = SCALE_BLOCK, tma: bool = False) -> Any:
    impl = fp8_impl()
    tile = impl.Tile(SCALE_BLOCK, 4, 2, tma)
    return impl.Tiles(block_pairs, block_pairs >= 64, tile, replace(tile, outputs=tile_out))


def run_op(case: Case) -> Tensor:
    """Runs the implementation under test."""
    if not INTERPRETED:
        return reference.experts(*case.arguments)
    out: Tensor = fp8_impl().experts(*case.arguments, pairs_per_expert=1)
    return out


@EXAMPLES
@given(st.integers(1, 12), st.integers(1, 4), st.sampled_from([128, 64, 32]), st.integers(0, 2**31), st.data())
def test_experts_in_fp8_equal_a_loop_over_tokens_and_read_only_the_selected_experts(
    tokens: int, count: int, block_rows: int, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, count))
    hidden = data.draw(st.sampled_from([128, 136, 256]))
    case = draw_case(tokens, k, draw_weights(count, hidden, data.draw(st.sampled_from([32, 96, 160])), block_rows))
    case.expert_ids[torch.rand(tokens, k) < 0.3] = EMPTY
    case.expert_ids[0] = EMPTY  # a padded token
    poison(case, sorted(set(range(count)) - set(case.expert_ids.flatten().tolist())))
    out = run_op(case)
    # In float32, an activation is hardly ever so near the middle of two codes that it is rounded to the other one.
    torch.testing.assert_close(out.double(), expected_output(case), atol=1e-5, rtol=1e-4)
    assert not out[0].any()


@needs_interpreter
@pytest.mark.parametrize(
    ("hidden", "width", "block_rows", "block_pairs", "tile_out", "dtype"),
    [
        pytest.param(256, 128, 128, 16, 128, torch.bfloat16, marks=pytest.mark.slow),
        (200, 96, 32, 16, 128, torch.float32),
        (136, 160, 64, 64, 64, torch.bfloat16),
        pytest.param(576, 256, 64, 32, 64, torch.float32, marks=pytest.mark.slow),
        pytest.param(17, 5, 1, 16, 64, torch.float32, marks=pytest.mark.slow),
        pytest.param(384, 384, 128, 128, 128, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(256, 192, 8, 64, 128, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_product_has_the_error_of_its_own_sums_only(
    hidden: int, width: int, block_rows: int, block_pairs: int, tile_out: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(hidden)
    case = draw_case(21, 2, draw_weights(3, hidden, width, block_rows), dtype)
    case.expert_ids[torch.rand(21, 2) < 0.3] = EMPTY
    case.expert_ids[:5] = torch.tensor([1, EMPTY])
    check_products(case, small_tiles(block_pairs, tile_out))


@needs_interpreter
@pytest.mark.parametrize("block_pairs", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_products_that_read_through_tma_have_the_bits_of_the_others(block_pairs: int) -> None:
    torch.manual_seed(6)
    case = draw_case(5, 2, draw_weights(2, 144, 160, 32))
    case.expert_ids[0] = EMPTY
    impl = fp8_impl()
    plain, tma = (impl.experts_in_tiles(*case.arguments, small_tiles(block_pairs, 64, tma), 9) for tma in (False, True))
    assert torch.equal(plain, tma)


@needs_interpreter
def test_an_expert_with_several_blocks_equals_the_reference() -> None:
    torch.manual_seed(1)
    case = draw_case(35, 1, draw_weights(3, 160, 64, 64), torch.bfloat16)
    case.expert_ids[:] = 1
    case.expert_ids[::9] = EMPTY
    poison(case, [0, 2])
    expected = reference.experts(*case.arguments)
    out = run_op(case)
    assert out.dtype == torch.bfloat16 and relative_error(out, expected) <= BF16_ERROR
    assert not out[::9].any()


@needs_interpreter
def test_every_block_is_multiplied_by_every_tile_of_outputs_once() -> None:
    """More blocks than GROUP_BLOCKS, and a number that is not a multiple of it."""
    torch.manual_seed(2)
    case = draw_case(9, 1, draw_weights(9, 32, 160, 32))
    case = replace(case, expert_ids=torch.randperm(9)[:, None])
    assert len(case.expert_ids) > fp8_impl().GROUP_BLOCKS
    torch.testing.assert_close(run_op(case).double(), expected_output(case), atol=1e-5, rtol=1e-4)


GUARD_BYTES = 1 << 17


def guarded(weight: Fp8Weight) -> Fp8Weight:
    """Returns a copy of the weight, with GUARD_BYTES unused bytes after the codes and after the scales."""

    def copy(tensor: Tensor) -> Tensor:
        buffer = torch.zeros(tensor.nbytes + GUARD_BYTES, dtype=torch.uint8)
        inside = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return inside.copy_(tensor)

    return Fp8Weight(copy(weight.codes), copy(weight.scales), weight.block_rows)


@needs_interpreter
@pytest.mark.parametrize(("hidden", "width"), [(136, 24), (384, 64)])
def test_nothing_is_read_beyond_the_weights(monkeypatch: pytest.MonkeyPatch, hidden: int, width: int) -> None:
    """The last tiles of up and down begin or end beyond the last output of the last expert."""
    torch.manual_seed(7)
    case = draw_case(1, 1, draw_weights(1, hidden, width, 8))
    case = replace(case, gate_up=guarded(case.gate_up), down=guarded(case.down))
    interpreter = importlib.import_module("triton.runtime.interpreter")._interpreter
    load, read = interpreter.load, []

    def recorded_load(pointers: Any, mask: Any, *others: Any) -> Any:
        read.append(torch.from_numpy(pointers[mask].astype("int64")))
        return load(pointers, mask, *others)

    monkeypatch.setattr(interpreter, "load", recorded_load)
    run_op(case)
    addresses = torch.cat(read)
    for tensor in (case.gate_up.codes, case.gate_up.scales, case.down.codes, case.down.scales):
        end = tensor.data_ptr() + tensor.nbytes
        assert ((addresses >= tensor.data_ptr()) & (addresses < end)).any()
        assert not ((addresses >= end) & (addresses < end + GUARD_BYTES)).any()


@needs_interpreter
def test_inputs_need_not_be_contiguous() -> None:
    torch.manual_seed(3)
    case = draw_case(3, 1, draw_weights(1, 40, 24, 8))
    expected = run_op(case)
    for strided in (torch.stack((case.x, case.x), 1)[:, 1], case.x.t().contiguous().t()):
        assert torch.equal(run_op(replace(case, x=strided)), expected)


@pytest.mark.not_interpreted
def test_the_reference_rounds_the_activation_once() -> None:
    """`down` is the identity, so the result shows the activations: rounded to bf16, then quantised."""
    torch.manual_seed(5)
    gate_up, down = draw_weights(1, 256, 128)
    down.codes.copy_(torch.eye(256)[:, :128])
    down.scales.fill_(1)
    case = draw_case(40, 1, (gate_up, down), torch.bfloat16)
    exact = torch.stack([expected_activation(token, gate_up[0]) for token in case.x])
    out = reference.experts(case.x, case.expert_ids, torch.ones(40, 1), gate_up, down)[:, :128]
    # Float64 and float32 rarely differ after rounding to bf16, and then rarely in the code: a bf16 rounding of gate and
    # up changes about one code in 30.
    differ = out != dequantised(exact.bfloat16()).bfloat16()
    assert differ.float().mean() <= 0.002


def test_only_one_weight_in_fp8_is_refused() -> None:
    case = draw_case(2, 1, draw_weights(2, 32, 16, 16))
    plain = case.down.dequantised(torch.float32)
    with pytest.raises(InternalError, match="different formats"):
        experts(case.x, case.expert_ids, case.weights, case.gate_up, plain)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Makes the op call this instead of its kernels, also for tensors on a CPU. Returns twice x."""
    kernels = mock.Mock(side_effect=lambda x, *_: 2 * x)
    monkeypatch.setattr(op, "has_fast_path", lambda x: True)
    monkeypatch.setattr(op, "kernels_of", lambda op, module: SimpleNamespace(experts=kernels))
    return kernels


@pytest.mark.parametrize(("routed", "expected"), [(None, 48), (32, 6)])
def test_expected_pairs_per_expert_count_all_experts(recorded: mock.Mock, routed: int | None, expected: int) -> None:
    """48 tokens with 4 experts each: of 4 experts, or of 32 of which this rank holds 4."""
    experts(*draw_case(48, 4, draw_weights(4, 32, 16, 16)).arguments, routed)
    assert [call.args[5] for call in recorded.call_args_list] == [expected]


def test_a_batch_with_too_many_pairs_is_computed_in_parts(recorded: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MAX_PAIRS", 7)
    case = draw_case(5, 3, draw_weights(3, 32, 16, 16))
    assert torch.equal(experts(*case.arguments), 2 * case.x)
    calls = [call.args for call in recorded.call_args_list]
    assert [len(arguments[0]) for arguments in calls] == [2, 2, 1]
    for number, whole in enumerate(case.arguments[:3]):
        assert torch.equal(torch.cat([arguments[number] for arguments in calls]), whole)


@pytest.fixture(scope="module")
def production() -> tuple[Fp8Weight, Fp8Weight]:
    """Returns the weights of 8 experts of DeepSeek-V3.2."""
    torch.manual_seed(4)
    return draw_weights(8, 7168, 2048, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("block_pairs", [16, 32, 64, 128])
def test_on_a_gpu_each_product_of_production_size_has_the_error_of_its_own_sums_only(
    production: tuple[Fp8Weight, Fp8Weight], block_pairs: int
) -> None:
    in_use = {tiles.block_pairs: tiles for tiles in fp8_impl().TILES.values()}
    case = draw_case(40, 2, production, torch.bfloat16)
    case.expert_ids[::7] = EMPTY
    poison_free_memory()
    check_products(case, in_use[block_pairs])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 64, 130, 700, 3000])
def test_on_a_gpu_production_sizes_equal_the_reference(production: tuple[Fp8Weight, Fp8Weight], tokens: int) -> None:
    case = draw_case(tokens, 2, production, torch.bfloat16)
    case.expert_ids[4::5] = EMPTY
    expected = reference.experts(*case.arguments)
    poison_free_memory()
    out = experts(*case.arguments)
    assert out.dtype == torch.bfloat16 and relative_error(out, expected) <= BF16_ERROR
    assert not out[4::5].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "hidden", "width", "block_rows", "k", "tokens", "dtype"),
    [
        (8, 256, 160, 32, 2, 3, torch.bfloat16),
        (8, 576, 256, 64, 2, 200, torch.bfloat16),
        (5, 72, 24, 8, 3, 33, torch.float32),
        (3, 250, 37, 1, 1, 400, torch.bfloat16),  # not aligned for 16-byte copies
        (256, 512, 128, 128, 8, 17, torch.bfloat16),
    ],
    ids=str,
)
def test_on_a_gpu_odd_sizes_equal_the_reference(
    count: int, hidden: int, width: int, block_rows: int, k: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    case = draw_case(tokens, k, draw_weights(count, hidden, width, block_rows, "cuda"), dtype)
    poison_free_memory()
    out = experts(*case.arguments)
    assert relative_error(out, reference.experts(*case.arguments)) <= BF16_ERROR


@pytest.mark.gpu
def test_on_a_gpu_results_do_not_depend_on_batches_with_the_same_tiles(production: tuple[Fp8Weight, Fp8Weight]) -> None:
    for most, pairs in ((32, 8), (80, 20)):  # two experts per token: `most` tokens are `pairs` pairs per expert
        case = draw_case(most, 2, production, torch.bfloat16)
        whole, tiles = experts(*case.arguments), fp8_impl().tiles_for(pairs)
        for tokens in (1, 7, most // 2):
            part = fp8_impl().experts_in_tiles(*case.first(tokens).arguments, tiles, slots=3)
            assert torch.equal(part, whole[:tokens]), f"tokens have other results in a batch of {tokens}"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 2048])
def test_on_a_gpu_a_graph_reads_its_inputs_at_replay(production: tuple[Fp8Weight, Fp8Weight], tokens: int) -> None:
    case = draw_case(tokens, 2, production, torch.bfloat16)
    experts(*case.arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*case.arguments)
    for _ in range(2):
        other = draw_case(tokens, 2, production, torch.bfloat16)
        other.expert_ids[::3] = EMPTY
        for static, fresh in zip(case.arguments[:3], other.arguments[:3], strict=True):
            static.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, experts(*other.arguments))
