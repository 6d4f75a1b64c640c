"""Tests that the Triton kernels compile for sm_90 with the expected instructions and resources.

The tests need no GPU. They run this file as a program, which compiles a group of cases and prints the results. There is
one process for each group, because Triton is slow to import. Each process runs without TRITON_INTERPRET
and starts with an empty cache, so that no result comes from an earlier run.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fp8_experts_cases
import fp8_linear_cases
import pytest
from matrix import slow_if

from hotset.kernels.sparse_attention.launch import PORTABLE, LaunchConfig

ROOT = Path(__file__).resolve().parents[2]
MAX_SHARED = 227 << 10  # bytes per program
SHARED_OF_TWO = (228 << 10) // 2 - 1024  # bytes per program if two share a multiprocessor

# The first test compiles all kernels; the limit is several times the duration on an overloaded machine.
pytestmark = [pytest.mark.not_interpreted, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel."""

    module: str  # below hotset.kernels
    kernel: str
    types: dict[str, str]  # by Triton type: the names of parameters, separated by spaces; other parameters are int32
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: tuple[str, ...] = ()  # name suffixes of the parameters that are multiples of 16, as all pointers are


@dataclass(frozen=True)
class CompiledKernel:
    ptx: str
    shared_bytes: int
    stack_bytes: int  # stack frame of a thread, which holds spilled registers


EXPERTS = (
    "gate_up of 4096 x 1536, decoding",
    "down of 4096 x 1536, decoding",
    "gate_up of 4096 x 1536, many tokens",
    "down of 4096 x 1536, many tokens",
    "gate_up of the demo model",
    "down of the demo model",
    "sort of one chunk",
    "sort of several chunks",
    "sort: counts of a chunk",
    "sum",
    "router",
    "select of 64",
    "select of 256 in groups",
    "swiglu",
)
ONE_TOKEN = ("gate_up of one token", "down of one token")
SMALL_OPS = (
    "add and norm",
    "rope",
    "mla append",
    "index append",
    "gqa append",
    "fp32 linear",
    "linear of few tokens",
    "linear of few normed tokens",
    "linear and fp32 linear of few tokens",
    "product per head of few tokens",
    "decode",
    "prompts",
    "merge",
    "decode rows",
    "page table lookup",
    "save last topk",
)
SLICES = {  # (alignment in bytes, unpack, parts of a page)
    "slices of 16 bytes": (16, False, 1),
    "slices of 16 bytes in parts": (16, False, 3),
    "slices of 16 bytes, unpacked": (16, True, 1),
    "slices of 4 bytes": (4, False, 1),
    "slices of 1 byte, unpacked": (1, True, 1),
}
INDEX_TOPK = ("score fp8", "score bf16", "score shared context", "count", "gather", "finish")
ALL = (*EXPERTS, *ONE_TOKEN, *SMALL_OPS, *SLICES, *fp8_linear_cases.NAMES, *fp8_experts_cases.NAMES, *INDEX_TOPK)
# Kernels that are launched early, and wait for the launch before them.
EARLY = (
    *("sort of one chunk", "sort of several chunks", "sort: counts of a chunk", "sum", "quantise pairs", "router"),
    *("select of 64", "select of 256 in groups", "add and norm", "rope", "mla append", "index append"),
    *("fp32 linear", "linear of few tokens", "linear of few normed tokens", "linear and fp32 linear of few tokens"),
    *("product per head of few tokens", "page table lookup"),
    *("quantise", "swiglu", "fp8 linear, 16 tokens, early", *ONE_TOKEN),
)
# Kernels that are launched in order, and let the next launch start early.
STARTS_NEXT = (
    *(name for name in EXPERTS if name.startswith("down")),
    *("fp8 down, decoding", "fp8 linear, 16 tokens", "fp8 linear, 64 tokens"),
)
# Small kernels that compile within a second, so `make test` compiles them. All others are compiled by `make test-all`.
SAMPLE = ("sum", "swiglu", "add and norm", "rope", "mla append", "decode rows", "page table lookup", "save last topk")
SPARSE_ATTENTION = ("16 heads", "16 heads, fp8", "32 heads", "64 heads")


def experts_cases() -> dict[str, Case]:
    """Returns the cases of the kernels of a routed layer."""
    types = {
        "*i64": "expert_ids seats",
        "*i32": "chunk_counts pairs sorted_index ends block_expert block_first num_blocks",
        "*fp32": "weights router partial correction",
        "*bf16": "x gate_up down activation results out",
        "fp32": "scale",
    }

    def case(op: str, kernel: str, constants: dict[str, int], warps: int, stages: int = 3) -> Case:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        return Case(f"{op}.triton_impl", kernel, types, constants, options, ("stride", "width"))

    def products(name: str, tiles: Any, hidden: int, width: int) -> dict[str, Case]:
        cases = {}
        for product, tile in (("gate_up", tiles.gate_up), ("down", tiles.down)):
            sizes = {"hidden": hidden, "width": width, "block_pairs": tiles.block_pairs}
            sizes |= {"tile_out": tile.outputs, "tile_in": tile.inputs} | ({"k": 6} if product == "gate_up" else {})
            cases[f"{product} of {name}"] = case("experts", f"_{product}_kernel", sizes, tile.warps, tile.stages)
        return cases

    def one_token(kernel: str, tile: dict[str, int], warps: int) -> Case:
        sizes = {"experts": 64, "hidden": 4096, "width": 1536} | tile
        return replace(case("experts", kernel, sizes, warps), module="experts.triton_one_token")

    def select(parts: int, groups: int, group_size: int, topk_group: int, k: int, warps: int) -> Case:
        sizes = {"parts": parts, "groups": groups, "group_size": group_size, "topk_group": topk_group}
        sizes |= {"experts_per_token": k, "normalise": 1, "with_seats": 1}
        sizes |= {"tile_parts": parts, "tile_groups": groups, "tile_group_size": group_size}  # powers of two here
        return case("route", "_select_kernel", sizes, warps)

    small, *_, large = importlib.import_module("hotset.kernels.experts.triton_impl").TILES.values()
    sort = {"experts": 64, "bins": 128, "chunk": 4096}
    router = {"hidden": 4096, "part": 128, "experts": 64, "tile_tokens": 16, "tile_experts": 64, "tile_in": 64}
    router_types = {"*bf16": "x", "*fp32": "router out"}
    return {
        **products("4096 x 1536, decoding", small, 4096, 1536),
        **products("4096 x 1536, many tokens", large, 4096, 1536),
        **products("the demo model", small, 256, 160),
        "gate_up of one token": one_token("_gate_up_kernel", {"tile_inputs": 4096}, 4),
        "down of one token": one_token("_down_kernel", {"k": 6, "tile_pairs": 8, "tile_inputs": 2048}, 2),
        "sort of one chunk": case("experts", "_sort_kernel", sort | {"one_chunk": True}, 16),
        "sort of several chunks": case("experts", "_sort_kernel", sort | {"one_chunk": False}, 16),
        "sort: counts of a chunk": case("experts", "_count_pairs_kernel", sort, 16),
        "sum": case("experts", "_sum_kernel", {"experts": 64, "hidden": 4096, "k": 6, "block": 2048}, 4),
        "router": replace(case("route", "_product_kernel", router, 4), types=router_types),
        "select of 64": select(32, 1, 64, 1, 6, warps=1),
        "select of 256 in groups": select(32, 8, 32, 4, 8, warps=4),
        "swiglu": case("swiglu", "_swiglu_kernel", {"block": 1024}, 4),
    }


def small_op_cases() -> dict[str, Case]:
    """Returns the cases of the small ops, with the sizes of dsa-50b, or with 32 heads and 8 KV heads of 128 for GQA."""

    def case(
        op: str, kernel: str, types: dict[str, str], constants: dict[str, Any], warps: int, fusion: bool = False
    ) -> Case:
        options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": fusion}
        return Case(f"{op}.triton_impl", kernel, types | {"fp32": "eps scale"}, constants, options, ("stride",))

    def few_tokens_case(*, has_norm: bool) -> Case:
        of_linear = case(
            "linear",
            "_few_tokens_kernel",
            {"*bf16": "x weight bias gain out", "fp32": "eps"},
            {"outputs": 2240, "inputs": 4096, "has_bias": True, "has_norm": has_norm}
            | {"tile_outputs": 4, "tile_inputs": 4096},
            warps=4,
            fusion=True,
        )
        return replace(of_linear, module="linear.triton_few")

    rotated = {"half": 32, "interleaved": False, "block_half": 32}
    return {
        "add and norm": case(
            "norm",
            "_rms_norm_kernel",
            {"*bf16": "x delta weight total normed"},
            {"heads": 1, "width": 4096, "block": 4096, "adds": True},
            warps=8,
        ),
        "rope": case(
            "rope",
            "_rotate_kernel",
            {"*bf16": "x cos sin out"},
            rotated | {"plain": 64, "block_heads": 8, "block_plain": 64},
            warps=2,
        ),
        "mla append": case(
            "mla_append",
            "_append_kernel",
            {"*bf16": "kv weight cos sin", "*u8": "device_rows", "*i64": "new_rows"},
            {
                "rank": 512,
                "half": 32,
                "row_bytes": 656,
                "stride_bytes": 656,
                "fp8": True,
                "blocks": 4,
                "block_half": 32,
            },
            warps=4,
        ),
        "index append": case(
            "index_append",
            "_append_kernel",
            {"*bf16": "query rotated key weight bias cos sin", "*u8": "blocks", "*i64": "table seat_of positions"},
            rotated
            | {"parts": 26, "step": 7, "block_rows": 318, "row_bytes": 132, "stride_bytes": 132, "fp8": True}
            | {"heads": 64, "block_heads": 8, "plain": 64, "block_plain": 64},
            warps=2,
        ),
        "gqa append": case(
            "gqa_append",
            "_append_kernel",
            {"*bf16": "qkv q_gain k_gain cos sin q device_rows", "*i64": "new_rows"},
            {"heads": 32, "kv_heads": 8, "half": 64, "padding": 0, "normed": True, "block_half": 64},
            warps=1,
        ),
        "fp32 linear": case(
            "linear",
            "_fp32_linear_kernel",
            {"*bf16": "x", "*fp32": "weight out partial", "*i32": "counters"},
            {"inputs": 7168, "outputs": 64, "splits": 7, "tile_tokens": 8, "tile_outputs": 4, "tile_inputs": 1024},
            warps=4,
            fusion=True,
        ),
        "linear of few tokens": few_tokens_case(has_norm=False),
        "linear of few normed tokens": few_tokens_case(has_norm=True),
        "linear and fp32 linear of few tokens": replace(
            case(
                "linear",
                "_few_tokens_and_fp32_kernel",
                {"*bf16": "x weight bias out", "*fp32": "fp32_weight fp32_out", "fp32": "scale"},
                {"fp32_tiles": 16, "outputs": 2240, "fp32_outputs": 32, "inputs": 4096, "has_bias": True}
                | {"tile_outputs": 4, "fp32_tile_outputs": 2, "tile_inputs": 4096},
                warps=4,
                fusion=True,
            ),
            module="linear.triton_few",
        ),
        "product per head of few tokens": replace(
            case(
                "linear",
                "_few_tokens_per_head_kernel",
                {"*bf16": "x weight out"},
                {"inputs": 512, "outputs": 128, "input_stride": 1, "output_stride": 512}
                | {"tile_outputs": 16, "tile_inputs": 512},
                warps=4,
                fusion=True,
            ),
            module="linear.triton_few",
        ),
        "decode rows": case(
            "decode_rows",
            "_decode_rows_kernel",
            {"*u8": "rows", "*i64": "row_ids", "*bf16": "out"},
            {"quantised": 512, "scales": 4, "others": 64, "block_quantised": 512, "block_others": 64, "block_rows": 8},
            warps=4,
        ),
        "page table lookup": case(
            "page_table_lookup",
            "_page_table_lookup_kernel",
            {"*i64": "positions seat_of table rows"},
            {"page_rows": 64, "block": 512},
            warps=4,
        ),
        "save last topk": case(
            "save_last_topk",
            "_save_last_topk_kernel",
            {"*i64": "seat_of positions", "*i32": "last_topk"},
            {"block": 1024},
            warps=4,
        ),
        "decode": case(
            "paged_attention",
            "_decode_kernel",
            {"*bf16": "q blocks out", "*fp32": "partial lse", "*i64": "table seat_of positions"},
            {"heads": 32, "dim": 128, "block_dim": 128, "group": 4, "block_group": 16}
            | {"page_rows": 64, "block_rows": 64, "one_split": False},
            warps=4,
            fusion=True,
        ),
        "prompts": Case(
            "paged_attention.triton_prefill",
            "_prefill_kernel",
            {"*bf16": "q blocks out", "*i64": "table seat_of segment_of positions", "fp32": "scale"},
            {"heads": 32, "dim": 128, "block_dim": 128, "group": 4}
            | {"page_rows": 64, "block_queries": 64, "block_rows": 64},
            {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True},
            aligned=("stride",),
        ),
        "merge": case(
            "paged_attention",
            "_merge_kernel",
            {"*fp32": "partial lse", "*bf16": "out"},
            {"heads": 32, "dim": 128, "block_dim": 128, "block_splits": 8},
            warps=4,
            fusion=True,
        ),
    }


def slice_case(width: int, unpack: bool, parts: int) -> Case:
    """Returns the case of slices of 512 bytes in pages of 64 rows, aligned to `width` bytes."""
    import triton.language as tl

    word = min(4, width)
    sizes = {"block_rows": 32, "block_words": 512 // word, "part_rows": 64, "parts": parts, "step": parts}
    words = {"word": {4: tl.int32, 2: tl.int16, 1: tl.int8}[word], "word_bytes": word, "vector": width // word}
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
    types = {"*i64": "table pages", "i64": "packed"}
    return Case(
        "slice_pack.triton_impl", "_copy_kernel", types, sizes | words | {"unpack": unpack}, options, ("stride",)
    )


def index_topk_cases() -> dict[str, Case]:
    import triton.language as tl

    score = importlib.import_module("hotset.kernels.index_topk.triton_score")
    select = importlib.import_module("hotset.kernels.index_topk.triton_select")
    types = {
        "*bf16": "q",
        "*fp32": "weights values moments bins_at listed",
        "*i64": "table seat_of positions out",
        "*i32": "counts listed_positions totals shares",
        "fp32": "scale",
        "i64": "part_stride",
    }
    aligned = ("heads", "query_stride", "head_stride", "part_stride", "page_stride", "value_stride", "room")

    def score_case(tuning: Any, fp8: bool, parts: int = 1, step: int = 1, operand: Any = None) -> Case:
        constants = {
            "tile_queries": max(1, tuning.columns // 32),
            "heads_padded": 32,
            "head_dim": 128,
            "key_stride": 132 if fp8 else 128,
            "scaled": fp8,
            "operand": operand or (tl.float16 if fp8 else tl.bfloat16),
            "parts": parts,
            "step": step,
            "block_rows": 318 if fp8 else 164,
            "tile_keys": tuning.keys,
            "stages": tuning.stages,
        }
        blocks = {"*fp8e4nv": "blocks"} if fp8 else {"*bf16": "q blocks"}
        options = score.launch_options(tuning) | {"num_warps": tuning.warps}
        return Case("index_topk.triton_score", "_score_kernel", types | blocks, constants, options, aligned)

    def select_case(kernel: str, constants: dict[str, int], warps: int) -> Case:
        options = select.OPTIONS | {"num_warps": warps}
        return Case("index_topk.triton_select", kernel, types, constants, options, aligned)

    tuning = select.TUNED
    sizes = {"block": tuning.block, "bins": tuning.bins}
    return {
        "score fp8": score_case(score.OWN_CONTEXT[32], fp8=True, parts=26, step=7),  # 21 groups in 78 layers
        "score bf16": score_case(score.OWN_CONTEXT_PLAIN[64], fp8=False),
        "score shared context": score_case(score.SHARED_CONTEXT, fp8=True, operand=tl.float8e4nv),
        "count": select_case("_count_kernel", sizes, tuning.warps),
        "gather": select_case("_gather_kernel", sizes | {"max_splits": 8}, tuning.warps),
        "finish": select_case("_finish_kernel", {"block": 4096}, tuning.finish_warps),
    }


def sparse_attention_launch(name: str) -> tuple[LaunchConfig, bool]:
    """Returns the launch of a case of SPARSE_ATTENTION, and whether the rows of the case are fp8."""
    fp8, heads = name.endswith("fp8"), int(name.split()[0])
    return PORTABLE[fp8, heads], fp8


def sparse_attention_case(name: str) -> Case:
    launch, fp8 = sparse_attention_launch(name)
    module = "sparse_attention.triton_impl"
    constants = {"split": True, "rank": 512, "rope": 64, "group": 128, "fp8": fp8, "interpreted": False}
    constants |= {"block_h": launch.block_heads, "block_k": launch.block_keys, "stages": launch.stages}
    constants |= {"scan": importlib.import_module(f"hotset.kernels.{module}").SCAN}
    return Case(
        module,
        "_attend_kernel",
        types={"*bf16": "q", "*u8": "rows", "*i64": "row_ids", "*fp32": "out lse", "fp32": "scale"},
        constants=constants,
        options={"num_warps": launch.warps, "enable_fp_fusion": True},
        aligned=("query_stride", "head_stride", "row_stride"),
    )


def in_sample(names: Sequence[str]) -> list[Any]:
    return slow_if(names, {*names} - {*SAMPLE})


def compile_for_sm90(case: Case) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"hotset.kernels.{case.module}"), case.kernel)
    types = {name: kind for kind, names in case.types.items() for name in names.split()}
    signature = {name: "constexpr" if name in case.constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name.endswith(case.aligned) and kind != "constexpr")
    }
    source = ASTSource(kernel, signature, case.constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=case.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def dump(option: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, option, cubin.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        stack = re.search(r"STACK:(\d+)", dump("--dump-resource-usage"))
    assert stack is not None
    return CompiledKernel(
        ptx=str(compiled.asm["ptx"]),
        shared_bytes=int(compiled.metadata.shared),
        stack_bytes=int(stack[1]),
    )


def compile_in_new_process(group: str, cache: Path) -> dict[str, CompiledKernel]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "error", __file__, group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[0])
    return {name: CompiledKernel(**result) for name, result in printed.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, CompiledKernel]:
    group = "sample" if "not slow" in pytestconfig.getoption("markexpr") else "all"
    return compile_in_new_process(group, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def compiled_attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompiledKernel]:
    return compile_in_new_process("sparse_attention", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", in_sample(ALL))
def test_kernel_compiles_for_sm_90_without_spilling(compiled: dict[str, CompiledKernel], name: str) -> None:
    kernel = compiled[name]
    assert ".target sm_90" in kernel.ptx
    assert kernel.stack_bytes <= fp8_experts_cases.MAX_STACK_BYTES.get(name, 0), f"{kernel.stack_bytes} B of stack"
    assert kernel.shared_bytes <= MAX_SHARED, f"{kernel.shared_bytes} B shared"


@pytest.mark.parametrize("name", in_sample(EARLY))
def test_a_kernel_that_is_launched_early_waits_before_it_writes_or_returns(
    compiled: dict[str, CompiledKernel], name: str
) -> None:
    before, *after = compiled[name].ptx.split("griddepcontrol.wait")
    paths = 2 if name == "linear and fp32 linear of few tokens" else 1  # a program takes one of them
    assert len(after) == paths, f"{len(after)} waits"
    assert len(re.findall(r"\bbra\b", before)) == paths - 1
    assert not re.search(r"\bst\.global|\batom\.|\bred\.|\bret;", before)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS_NEXT)
def test_a_kernel_that_is_launched_in_order_can_let_the_next_one_start_early(
    compiled: dict[str, CompiledKernel], name: str
) -> None:
    ptx = compiled[name].ptx
    assert "griddepcontrol.launch_dependents" in ptx and "griddepcontrol.wait" not in ptx


@pytest.mark.slow
def test_experts_use_wgmma_and_asynchronous_16_byte_copies(compiled: dict[str, CompiledKernel]) -> None:
    products = [name for name in EXPERTS if name.startswith(("gate_up", "down"))]
    assert len(products) == 6
    for name in products:
        ptx = compiled[name].ptx
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx, name
        assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx, name


@pytest.mark.slow
def test_two_programs_of_a_routed_layer_fit_on_a_multiprocessor(compiled: dict[str, CompiledKernel]) -> None:
    for name in EXPERTS:
        assert compiled[name].shared_bytes <= SHARED_OF_TWO, f"{name}: {compiled[name].shared_bytes} B"


def test_sum_and_swiglu_use_16_byte_accesses(compiled: dict[str, CompiledKernel]) -> None:
    for name in ("sum", "swiglu"):
        assert "ld.global.v4.b32" in compiled[name].ptx and "st.global.v4.b32" in compiled[name].ptx, name


@pytest.mark.slow
def test_decoding_prefetches_rows_with_16_byte_copies_and_uses_tensor_cores(
    compiled: dict[str, CompiledKernel],
) -> None:
    ptx = compiled["decode"].ptx
    assert "cp.async.cg.shared.global" in ptx and "mma.sync" in ptx and "cp.async.ca" not in ptx


@pytest.mark.slow
def test_attention_of_prompts_prefetches_rows_and_uses_wgmma(compiled: dict[str, CompiledKernel]) -> None:
    ptx = compiled["prompts"].ptx
    assert "cp.async.cg.shared.global" in ptx and "wgmma.mma_async" in ptx and "cp.async.ca" not in ptx


@pytest.mark.slow
def test_fp8_values_are_divided_exactly_and_rounded_by_the_hardware(compiled: dict[str, CompiledKernel]) -> None:
    for name in ("mla append", "index append", "quantise", "fp8 linear, 16 tokens", "quantise pairs"):
        ptx = compiled[name].ptx
        assert "div.rn.f32" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.full" not in ptx


@pytest.mark.slow
def test_fp8_products_use_wgmma_and_read_codes_and_scales_asynchronously(compiled: dict[str, CompiledKernel]) -> None:
    operands = {"fp8 linear, 16 tokens": "n16k32", "fp8 linear, 64 tokens": "n64k32"}
    operands |= dict.fromkeys(fp8_experts_cases.DECODING, "n16k32")
    for name, operand in operands.items():
        ptx = compiled[name].ptx
        assert f"wgmma.mma_async.sync.aligned.m64{operand}.f32.e4m3.e4m3" in ptx and "mma.sync.aligned.m16" not in ptx
        for copied in (16, 4):  # codes, scales
            assert re.search(rf"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x{copied:x}", ptx), name
        assert compiled[name].shared_bytes <= SHARED_OF_TWO, f"{name}: {compiled[name].shared_bytes} B"


@pytest.mark.slow
def test_chunks_score_fp8_keys_without_conversion(compiled: dict[str, CompiledKernel]) -> None:
    ptx = compiled["score shared context"].ptx
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx and ".f16.f16" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_slices_are_copied_in_the_widest_accesses_that_alignment_allows(
    compiled: dict[str, CompiledKernel], name: str
) -> None:
    width, *_ = SLICES[name]
    suffix = {16: "v4.b32", 4: "b32", 1: "b8"}[width]
    for access in ("ld", "st"):
        # The 128 threads copy 32 slices of 512 bytes. The loop is unrolled, so all accesses of a thread are in flight
        # at the same time.
        assert compiled[name].ptx.count(f"{access}.global.{suffix} ") == 32 * 512 // 128 // width


@pytest.mark.slow
def test_scoring_prefetches_keys_and_uses_wgmma(compiled: dict[str, CompiledKernel]) -> None:
    for name, copied in (("score fp8", 4), ("score shared context", 4), ("score bf16", 16)):
        ptx = compiled[name].ptx
        assert re.search(rf"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x{copied:x}", ptx), name
        assert "wgmma.mma_async" in ptx, name


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE_ATTENTION)
def test_sparse_attention_compiles_for_sm_90(compiled_attention: dict[str, CompiledKernel], name: str) -> None:
    launch, fp8 = sparse_attention_launch(name)
    kernel = compiled_attention[name]
    assert ".target sm_90" in kernel.ptx
    max_shared = SHARED_OF_TWO if launch.programs_per_sm == 2 else MAX_SHARED
    assert kernel.shared_bytes <= max_shared, f"{kernel.shared_bytes} B shared"
    assert kernel.stack_bytes <= 384, f"{kernel.stack_bytes} B of registers spilled"  # with Triton 3.6: at most 40
    assert ("cvt.rn.f16x2.e4m3x2" in kernel.ptx) == fp8
    assert "cp.async.cg.shared.global" in kernel.ptx


def all_cases(group: str) -> dict[str, Case]:
    if group == "sparse_attention":
        return {name: sparse_attention_case(name) for name in SPARSE_ATTENTION}
    slices = {name: slice_case(*options) for name, options in SLICES.items()}
    fp8 = fp8_linear_cases.cases() | fp8_experts_cases.cases()
    fp8_cases = {name: Case(**fields) for name, fields in fp8.items()}
    cases = experts_cases() | small_op_cases() | slices | fp8_cases | index_topk_cases()
    return {name: cases[name] for name in (SAMPLE if group == "sample" else cases)}


if __name__ == "__main__":
    # As on a Hopper GPU.
    launches = importlib.import_module("hotset.kernels.early_launch.triton_launch")
    launches.EARLY = importlib.import_module("triton.language").constexpr(True)
    print(json.dumps({name: asdict(compile_for_sm90(case)) for name, case in all_cases(sys.argv[1]).items()}))
