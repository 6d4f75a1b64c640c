"""Tests sparse_attention's Triton and CUDA kernels, and how a call is divided into programs.

The tests on a GPU are marked `gpu`. Without a GPU, the Triton kernel runs under Triton's interpreter (see
test_interpreted.py). test_sparse_attention_cuda.py tests the CUDA kernels without a GPU.
"""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreted import INTERPRETED
from interpreted import triton_impl as interpreted_impl
from sparse_attention_cases import DEVICE, Case, Inputs, make_inputs
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, mla_row
from hotset.kernels.sparse_attention import check, sparse_attention
from hotset.kernels.sparse_attention.launch import (
    HOPPER,
    PORTABLE,
    WARPGROUP,
    AttentionShape,
    GpuTraits,
    LaunchConfig,
    choose_launch,
    cost,
)

ROOT = Path(__file__).resolve().parents[2]
H200 = GpuTraits(132, hopper=True)

if INTERPRETED:  # numpy warns of NaN, which is intended
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return test if INTERPRETED else pytest.mark.gpu(test)


def run(inputs: Inputs, launch: LaunchConfig | None = None) -> Tensor:
    """Runs the fast path, with NaN in all memory that it allocates."""
    impl = interpreted_impl("sparse_attention") if INTERPRETED else fast_path()
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        out: Tensor = impl.sparse_attention(*inputs.arguments, launch=launch)
    finally:
        torch.use_deterministic_algorithms(False)
    return out


def fast_path() -> ModuleType:
    return importlib.import_module("hotset.kernels.sparse_attention.triton_impl")


SMALL_CASES = {
    "plain": (Case(3, 5, 70, 128, 32), LaunchConfig("triton", 16, 32)),
    "fp8": (Case(3, 5, 70, 128, 32, fp8=True), LaunchConfig("triton", 16, 32)),
    "plain, more heads than a block": (Case(2, 20, 40, 64, 16), LaunchConfig("triton", 16, 16, splits=2)),
    "fp8, masked heads": (Case(2, 20, 40, 64, 16, fp8=True), LaunchConfig("triton", 32, 32, splits=2)),
    "plain, model sizes": (Case(2, 8, 50), LaunchConfig("triton", 16, 32)),
    "fp8, model sizes": (Case(2, 8, 50, fp8=True), LaunchConfig("triton", 16, 32)),
    "plain, empty splits": (Case(2, 4, 96, 64, 16, used=3), LaunchConfig("triton", 16, 16, splits=4)),
    "fp8, empty splits": (Case(2, 4, 96, 64, 16, fp8=True, used=3), LaunchConfig("triton", 16, 16, splits=4)),
    "fp8, large": (Case(2, 4, 40, 256, 64, fp8=True, magnitude=3e4), LaunchConfig("triton", 16, 32)),
    "fp8, small": (Case(2, 4, 40, 256, 64, fp8=True, magnitude=1e-4), LaunchConfig("triton", 16, 32)),
    "fp8, uneven scales": (Case(2, 4, 20, 256, 16, fp8=True, uneven=True), LaunchConfig("triton", 16, 32)),
    "one entry": (Case(2, 1, 1, 64, 16), LaunchConfig("triton", 16, 16)),
    "gaps between rows": (Case(2, 3, 20, 64, 16, fp8=True, spare_bytes=48), LaunchConfig("triton", 16, 16)),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SMALL_CASES)
def test_triton_kernel_equals_the_reference_under_the_interpreter(name: str) -> None:
    case, launch = SMALL_CASES[name]
    inputs = make_inputs(case)
    inputs.check(run(inputs, launch))


def test_a_query_without_selected_rows_results_in_zeros_even_if_its_q_is_nan() -> None:
    inputs = make_inputs(Case(3, 2, 7, 64, 16), device=torch.device("cpu"))
    out = sparse_attention(*inputs.arguments)
    assert bool((out[2] == 0).all()) and bool((out[:2] != 0).any())


@pytest.mark.parametrize("k", [1, 64, 100, 2048, 4096])
def test_splits_cover_every_entry_once_and_none_is_empty(k: int) -> None:
    for queries, heads, fp8 in itertools.product((1, 3, 8, 32, 128, 500, 4096), (8, 32, 128), (False, True)):
        shape = AttentionShape(queries, heads, k, 512, 64, fp8)
        launch = choose_launch(shape, H200)
        split_keys = launch.split_keys(shape)
        assert split_keys % launch.block_keys == 0
        assert (launch.splits - 1) * split_keys < k <= launch.splits * split_keys, f"{launch} for {shape}"


# By (fp8 rows, heads): the numbers of splits for 1, 2, 4, ..., 256 queries, as the cost model in launch.py returns
# them. With 64 and 128 heads, no other number that was tried was measurably faster on an H200 for 4, 8, 16, 32 and 64
# queries, and with 16 heads per block for 1 to 16 queries.
SPLITS = {
    (False, 16): (32, 32, 32, 16, 8, 4, 4, 2, 1),
    (False, 32): (32, 32, 16, 11, 8, 4, 2, 1, 1),
    (False, 64): (32, 16, 16, 11, 8, 4, 2, 1, 1),
    (False, 128): (16, 16, 11, 8, 4, 2, 1, 1, 1),
    (True, 16): (32, 32, 32, 16, 8, 4, 4, 2, 1),
    (True, 32): (32, 32, 16, 8, 8, 8, 4, 2, 1),
    (True, 64): (32, 16, 8, 16, 8, 4, 2, 1, 1),
    (True, 128): (16, 8, 16, 8, 4, 2, 1, 1, 1),
}


@pytest.mark.parametrize(("fp8", "heads"), SPLITS)
def test_the_cost_model_returns_the_recorded_numbers_of_splits(fp8: bool, heads: int) -> None:
    expected = SPLITS[fp8, heads]
    shapes = [AttentionShape(1 << n, heads, 2048, 512, 64, fp8) for n in range(len(expected))]
    assert tuple(choose_launch(shape, H200).splits for shape in shapes) == expected
    assert choose_launch(AttentionShape(2048, heads, 2048, 512, 64, fp8), H200).splits == 1


MEASURED_US = {  # the warpgroup kernel on an H200, by (fp8 rows, queries, heads, splits)
    (False, 8, 64, 8): 20.4,
    (False, 8, 64, 16): 20.7,
    (False, 8, 128, 8): 23.9,
    (False, 32, 128, 2): 47.5,
    (False, 64, 128, 1): 68.0,
    (True, 8, 64, 8): 24.9,
    (True, 8, 64, 16): 23.6,
    (True, 8, 128, 8): 27.8,
    (True, 32, 128, 2): 56.1,
    (True, 64, 128, 1): 82.3,
}


@pytest.mark.parametrize("case", MEASURED_US)
def test_costs_of_the_warpgroup_kernel_are_proportional_to_measured_times(case: tuple[bool, int, int, int]) -> None:
    fp8, queries, heads, splits = case
    shape, us_of_key = AttentionShape(queries, heads, 2048, 512, 64, fp8), 0.038 if fp8 else 0.032
    found = cost(replace(WARPGROUP, splits=splits), shape, H200) * us_of_key
    assert found == pytest.approx(MEASURED_US[case], rel=0.05)


@pytest.mark.parametrize(("fp8", "most"), [(False, 8), (True, 16)])
def test_a_call_with_few_heads_in_all_uses_blocks_of_16_heads(fp8: bool, most: int) -> None:
    for heads in (16, 32, 64, 128):
        shape = AttentionShape(16 * most // heads, heads, 2048, 512, 64, fp8)
        assert choose_launch(shape, H200).block_heads == 16
        assert heads == 16 or choose_launch(replace(shape, queries=shape.queries + 1), H200).block_heads > 16
        assert choose_launch(shape, GpuTraits(108, hopper=False)).block_heads == min(heads, 64)


def test_a_call_that_would_need_two_waves_without_splits_has_at_most_four_splits() -> None:
    """Without splits, the calls have 134 to 262 programs for 132 multiprocessors.

    More than four splits would use the multiprocessors more evenly. Storing and merging the additional sums would take
    longer than that saves.
    """
    for queries in range(67, 132):
        shape = AttentionShape(queries, 128, 2048, 512, 64, False)
        assert choose_launch(shape, H200).splits <= 4, f"{queries} queries"


def test_hopper_kernels_run_only_on_hopper_and_only_at_model_sizes() -> None:
    shape = AttentionShape(4, 128, 2048, 512, 64, True)
    assert choose_launch(shape, H200).kernel == "warpgroup"
    assert choose_launch(replace(shape, heads=32), H200).kernel == "cuda"
    assert choose_launch(shape, GpuTraits(108, hopper=False)).kernel == "triton"
    assert choose_launch(replace(shape, rank=256), H200).kernel == "triton"
    assert choose_launch(replace(shape, rope=32), H200).kernel == "triton"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 96}, "latent rank of 64, 128, 256 or 512, not 96"),
        ({"rank": 1024}, "not 1024"),
        ({"rope": 8}, "16, 32, 64 or 128 rope values, not 8"),
        ({"rope": 96}, "not 96"),
    ],
    ids=str,
)
def test_sizes_that_no_kernel_supports_are_refused(changes: dict[str, int], message: str) -> None:
    sizes = {"rank": 512, "rope": 64} | changes
    layout = mla_row(sizes["rank"], sizes["rope"], torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        check(torch.zeros(4, layout.stored_width, dtype=torch.bfloat16), layout, sizes["rank"], 0.1)


def test_rows_that_no_kernel_can_read_are_refused() -> None:
    layout = mla_row(512, 64, torch.bfloat16)
    pool = torch.zeros(5, layout.stored_width + 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="stride 1160: it must be a multiple of 16"):
        check(pool[:, : layout.stored_width], layout, 512, 0.1)
    with pytest.raises(ConfigError, match=r"not torch\.float32"):
        check(torch.zeros(4, layout.stored_width), layout, 512, 0.1)
    with pytest.raises(ConfigError, match="100 values of a row are fp8"):
        check(torch.zeros(4, 1200, dtype=torch.uint8), RowLayout(576, torch.bfloat16, quantised=100), 512, 0.1)
    with pytest.raises(ConfigError, match="scale of 0"):
        check(torch.zeros(4, layout.stored_width, dtype=torch.bfloat16), layout, 512, 0)
    with pytest.raises(ConfigError, match="device rows, not 0"):
        check(torch.zeros(0, layout.stored_width, dtype=torch.bfloat16), layout, 512, 0.1)


GPU_CASES = [
    *(Case(5, heads, 2048, fp8=fp8) for fp8 in (False, True) for heads in (8, 16, 20, 32, 64, 128)),
    *(Case(140, heads, 300, fp8=fp8) for fp8 in (False, True) for heads in (24, 96)),  # no splits
    *(Case(3, 16, 4096, fp8=fp8, used=700) for fp8 in (False, True)),
    *(Case(queries, 128, 1, fp8=fp8) for queries in (2, 3) for fp8 in (False, True)),
    *(Case(queries, 128, 130, fp8=True, magnitude=magnitude) for queries in (2, 3) for magnitude in (1e-4, 3e4)),
    *(Case(3, heads, 130, fp8=True, uneven=True) for heads in (16, 128)),
    *(Case(3, 40, 500, 256, 64, fp8=fp8, spare_bytes=48) for fp8 in (False, True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_fast_path_on_a_gpu_equals_the_reference(case: Case) -> None:
    for seed in range(2):
        inputs = make_inputs(case, seed)
        inputs.check(run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_every_kernel_on_a_gpu_equals_the_reference(fp8: bool) -> None:
    """Launches of the table HOPPER run with and without splits, those of PORTABLE with splits only."""
    hopper = {launch for (is_fp8, _), launch in HOPPER.items() if is_fp8 == fp8}
    portable = {launch for (is_fp8, _), launch in PORTABLE.items() if is_fp8 == fp8}
    for launch in sorted(hopper | portable, key=str):
        if launch.kernel != "triton" and torch.cuda.get_device_capability()[0] != 9:
            continue
        inputs = make_inputs(Case(3, launch.block_heads + 4, 700, fp8=fp8))
        for splits in (1, 5) if launch in hopper else (5,):
            inputs.check(run(inputs, replace(launch, splits=splits)))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_inputs_need_not_be_contiguous(heads: int, fp8: bool) -> None:
    inputs = make_inputs(Case(6, heads, 333, fp8=fp8))
    q = torch.full((6, heads + 3, 2 * inputs.q.shape[2]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    q[:, 1:-2, : inputs.q.shape[2]] = inputs.q
    row_ids = torch.full((6, 1000), 1 << 40, device=DEVICE)
    row_ids[:, 7:340] = inputs.row_ids
    strided = replace(inputs, q=q[:, 1:-2, : inputs.q.shape[2]], row_ids=row_ids[:, 7:340])
    strided.check(run(strided))
    transposed = replace(
        inputs, q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2), row_ids=inputs.row_ids.T.contiguous().T
    )
    transposed.check(run(transposed))
    misaligned = torch.full((6, heads, inputs.q.shape[2] + 1), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    misaligned[:, :, 1:] = inputs.q
    inputs.check(run(replace(inputs, q=misaligned[:, :, 1:])))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_byte_offsets_beyond_32_bits_are_exact(heads: int, fp8: bool) -> None:
    case = Case(3, heads, 100, fp8=fp8)  # 128 heads are too many for blocks of 16
    layout = case.layout
    count = (5 << 30) // layout.stride_bytes
    pool = torch.empty(count, layout.stored_width, dtype=layout.stored_dtype, device=DEVICE)
    inputs = make_inputs(case, pool_rows=4096)
    pool[-4096:] = inputs.pool
    row_ids = torch.where(inputs.row_ids == EMPTY, EMPTY, inputs.row_ids + (count - 4096))
    out = run(replace(inputs, pool=pool, row_ids=row_ids))
    inputs.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_call_reads_its_inputs_at_replay(heads: int, fp8: bool) -> None:
    all_inputs = [make_inputs(Case(5, heads, 512, fp8=fp8), seed) for seed in range(3)]
    q, pool, row_ids = (tensor.clone() for tensor in (all_inputs[0].q, all_inputs[0].pool, all_inputs[0].row_ids))
    static = replace(all_inputs[0], q=q, pool=pool, row_ids=row_ids)
    run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(*static.arguments)
    for inputs in all_inputs:
        q.copy_(inputs.q)
        pool.copy_(inputs.pool)
        row_ids.copy_(inputs.row_ids)
        out.fill_(float("nan"))
        graph.replay()
        inputs.check(out)


@pytest.mark.gpu
def test_repeated_calls_return_the_same_bits() -> None:
    for fp8 in (False, True):
        for heads in (16, 32, 128):
            inputs = make_inputs(Case(9, heads, 2048, fp8=fp8))
            first = run(inputs)
            assert all(torch.equal(run(inputs), first) for _ in range(20)), f"a race: {heads} heads, fp8={fp8}"


@pytest.mark.gpu
def test_an_empty_batch_and_other_dtypes_are_supported() -> None:
    inputs = make_inputs(Case(2, 4, 9))
    empty = sparse_attention(inputs.q[:0], inputs.pool, inputs.row_ids[:0], *inputs.arguments[3:])
    assert empty.shape == (0, 4, 512)
    wide = sparse_attention(inputs.q.double(), inputs.pool, *inputs.arguments[2:])
    assert wide.dtype == torch.float64 and bool((wide[1] == 0).all())
