"""The kernels of the small ops, of decoding over pages and of slices compile for sm_90; no GPU is needed.

Run as a program, this file compiles every case and prints the PTX: in a process of its own, because Triton reads
TRITON_INTERPRET only once, and with a cache of its own, so that nothing is taken from an earlier run.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_SHARED_BYTES = 227 << 10  # that a program may use on sm_90


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel, as dsa-50b does (or, for GQA, a model of 32 heads on 8 KV heads of 128)."""

    op: str
    kernel: str
    pointers: dict[str, str]  # dtype: names
    constants: dict[str, int | bool]
    warps: int
    stages: int = 3
    floats: tuple[str, ...] = ("eps",)
    fusion: bool = False


ROTATED = {"half": 32, "interleaved": False, "block_half": 32}
CASES = {
    "add and norm": Case(
        "norm", "_rms_norm_kernel", {"*bf16": "x delta weight total normed"},
        {"heads": 1, "width": 4096, "block": 4096, "adds": True}, 8,
    ),
    "rope": Case(
        "rope", "_rotate_kernel", {"*bf16": "x cos sin out"},
        ROTATED | {"plain": 64, "block_heads": 8, "block_plain": 64}, 2,
    ),
    "mla append": Case(
        "mla_append", "_append_kernel", {"*bf16": "kv weight cos sin", "*u8": "device_rows", "*i64": "new_rows"},
        {"rank": 512, "half": 32, "row_bytes": 656, "stride_bytes": 656, "fp8": True, "blocks": 4, "block_half": 32}, 4,
    ),
    "key append": Case(
        "key_append", "_append_kernel",
        {"*bf16": "key weight bias cos sin", "*u8": "blocks", "*i64": "table seat_of positions"},
        ROTATED | {"parts": 1, "block_rows": 318, "plain": 64, "row_bytes": 132, "stride_bytes": 132, "fp8": True,
                   "block_plain": 64}, 1,
    ),
    "gqa append": Case(
        "gqa_append", "_append_kernel", {"*bf16": "qkv q_gain k_gain cos sin q device_rows", "*i64": "new_rows"},
        {"heads": 32, "kv_heads": 8, "half": 64, "padding": 0, "normed": True, "block_half": 64}, 1,
    ),
    "wide linear": Case(
        "linear", "_fp32_linear_kernel", {"*bf16": "x", "*fp32": "weight out"},
        {"width": 4096, "outputs": 32, "block_tokens": 8, "block_outputs": 2, "block_values": 1024}, 8,
        floats=("scale",), fusion=True,
    ),
    "decode": Case(
        "paged_attention", "_decode_kernel",
        {"*bf16": "q blocks out", "*fp32": "partial weight", "*i64": "table seat_of positions"},
        {"heads": 32, "dim": 128, "block_dim": 128, "group": 4, "page_rows": 64, "whole": False, "block_group": 16,
         "block_rows": 64}, 4, floats=("scale",), fusion=True,
    ),
    "merge": Case(
        "paged_attention", "_merge_kernel", {"*fp32": "partial weight", "*bf16": "out"},
        {"heads": 32, "dim": 128, "block_dim": 128, "block_parts": 8}, 4, fusion=True,
    ),
}  # fmt: skip

UNITS = {16: "v4.b32", 4: "b32", 1: "b8"}  # of a load, by what everything is aligned to
SLICES = [(16, False), (16, True), (4, False), (1, True)]


def slice_case(width: int, unpack: bool) -> Case:
    """Slices of 512 bytes, in pages of 64 rows."""
    word = min(4, width)
    kind = {4: "*i32", 2: "*i16", 1: "*u8"}[word]
    shape = {"block_rows": 32, "block_words": 512 // word, "page_rows": 64, "vector": width // word, "unpack": unpack}
    return Case("slice_pack", "_copy_kernel", {"*i64": "table pages", kind: "packed"}, shape, warps=4)


def compile_for_sm90(case: Case) -> dict[str, str | int]:
    """PTX of one case, from which a cubin was made, and the shared memory of a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"hotset.kernels.{case.op}.triton_impl"), case.kernel)
    types = {name: kind for kind, names in case.pointers.items() for name in names.split()}
    types |= dict.fromkeys(case.floats, "fp32")
    signature = {name: "constexpr" if name in case.constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [signature[name].startswith("*") or name.endswith("stride") for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, multiple in enumerate(aligned) if multiple}
    source = ASTSource(fn=kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": case.fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    return {"ptx": str(compiled.asm["ptx"]), "shared": int(compiled.metadata.shared)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed: dict[str, dict[str, str | int]] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_sm_90_within_its_shared_memory(
    compiled: dict[str, dict[str, str | int]], name: str
) -> None:
    assert ".target sm_90" in str(compiled[name]["ptx"]) and int(compiled[name]["shared"]) <= MAX_SHARED_BYTES


def test_decoding_copies_rows_16_bytes_at_a_time_ahead_of_the_matrix_units(
    compiled: dict[str, dict[str, str | int]],
) -> None:
    decode = str(compiled["decode"]["ptx"])
    assert "cp.async.cg.shared.global" in decode and "mma.sync" in decode and "cp.async.ca" not in decode


def test_scales_and_codes_of_fp8_rows_are_divided_exactly_and_rounded_by_the_hardware(
    compiled: dict[str, dict[str, str | int]],
) -> None:
    for name in ("mla append", "key append"):
        ptx = str(compiled[name]["ptx"])
        assert "div.rn.f32" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.full" not in ptx


@pytest.mark.parametrize(("width", "unpack"), SLICES)
def test_slices_move_in_the_widest_unit_that_alignment_allows(
    compiled: dict[str, dict[str, str | int]], width: int, unpack: bool
) -> None:
    ptx = str(compiled[f"slices {width} {unpack}"]["ptx"])
    assert ".target sm_90" in ptx
    for way in ("ld", "st"):
        assert ptx.count(f"{way}.global.{UNITS[width]} ") == 32 * 512 // 128 // width, "of a thread, all at once"


if __name__ == "__main__":
    slices = {f"slices {width} {unpack}": slice_case(width, unpack) for width, unpack in SLICES}
    print(json.dumps({name: compile_for_sm90(case) for name, case in (CASES | slices).items()}))
