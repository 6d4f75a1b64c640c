"""The Triton kernels of a routed layer compile for sm_90 as they are meant to; no GPU is needed.

Run as a program, this file compiles every case and prints what became of it: in a process of its own, because Triton
reads TRITON_INTERPRET only once, and with a cache of its own, so that nothing is taken from an earlier run.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_SHARED = 227 << 10  # bytes that one program may have
SHARED_OF_TWO = (228 << 10) // 2 - 1024  # of which this much leaves room for a second one on a multiprocessor

POINTERS = {
    "*i64": "expert_ids seats",
    "*i32": "pairs sorted_index ends block_expert block_first",
    "*fp32": "weights router partial correction",
    "*bf16": "x gate_up down activation results",
}
NUMBERS = {"scale": "fp32"}  # others are int32
ALIGNED = ("x_stride", "stride", "width")


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel."""

    op: str
    kernel: str
    constants: dict[str, int]
    warps: int
    stages: int = 3
    out: str = "*bf16"


@dataclass(frozen=True)
class Made:
    """What the compiler made of a case."""

    ptx: str
    shared: int
    stack: int  # bytes per thread: what did not fit into registers


def product_cases(name: str, tiles: Any, hidden: int, width: int) -> dict[str, Case]:
    cases = {}
    for which, tile in (("gate_up", tiles.gate_up), ("down", tiles.down)):
        sizes = {"hidden": hidden, "width": width, "block_pairs": tiles.block_pairs}
        sizes |= {"tile_out": tile.outputs, "tile_in": tile.inputs} | ({"k": 6} if which == "gate_up" else {})
        cases[f"{which} {name}"] = Case("experts", f"_{which}_kernel", sizes, tile.warps, tile.stages)
    return cases


def select_case(parts: int, groups: int, group_size: int, topk_group: int, k: int, warps: int) -> Case:
    sizes = {"parts": parts, "groups": groups, "group_size": group_size, "topk_group": topk_group}
    sizes |= {"experts_per_token": k}
    tile = {"tile_parts": parts, "tile_groups": groups, "tile_group_size": group_size}  # powers of two here
    return Case("route", "_select_kernel", sizes | tile | {"normalise": 1, "with_seats": 1}, warps)


def all_cases() -> dict[str, Case]:
    impl = importlib.import_module("hotset.kernels.experts.triton_impl")
    small, *_, large = impl.TILES.values()
    product = {"hidden": 4096, "part": 128, "experts": 64, "tile_tokens": 16, "tile_experts": 64, "tile_in": 64}
    return {
        **product_cases("of 4096 x 1536, decoding", small, 4096, 1536),
        **product_cases("of 4096 x 1536, many rows", large, 4096, 1536),
        **product_cases("of the demo model", small, 256, 160),
        "sort": Case("experts", "_sort_kernel", {"experts": 64, "bins": 128, "chunk": 4096}, 16),
        "sum": Case("experts", "_sum_kernel", {"hidden": 4096, "k": 6, "block": 1024}, 4),
        "router": Case("route", "_product_kernel", product, 4, out="*fp32"),
        "select of 64": select_case(32, 1, 64, 1, 6, warps=1),
        "select of 256 in groups": select_case(32, 8, 32, 4, 8, warps=4),
        "swiglu": Case("swiglu", "_swiglu_kernel", {"block": 1024}, 4),
    }


def compile_for_sm90(case: Case) -> Made:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"hotset.kernels.{case.op}.triton_impl"), case.kernel)
    types = {name: kind for kind, names in POINTERS.items() for name in names.split()} | NUMBERS | {"out": case.out}
    signature = {name: "constexpr" if name in case.constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [kind.startswith("*") or (name in ALIGNED and kind == "i32") for name, kind in signature.items()]
    attributes = {(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    return Made(str(compiled.asm["ptx"]), compiled.metadata.shared, int(stack[1]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {name: Made(**each) for name, each in json.loads(done.stdout).items()}


def test_every_kernel_compiles_for_sm_90_within_its_registers_and_shared_memory(made: dict[str, Made]) -> None:
    for name, each in made.items():
        assert ".target sm_90" in each.ptx, name
        assert each.stack == 0 and each.shared <= MAX_SHARED, f"{name}: {each.stack} B stack, {each.shared} B shared"


def test_products_use_wide_matrix_instructions_and_asynchronous_16_byte_copies(made: dict[str, Made]) -> None:
    products = {name: each for name, each in made.items() if name.startswith(("gate_up", "down"))}
    assert len(products) == 6
    for name, each in products.items():
        assert "wgmma.mma_async" in each.ptx and "mma.sync" not in each.ptx, name
        assert "cp.async.cg.shared.global" in each.ptx and "cp.async.ca" not in each.ptx, name


def test_two_programs_of_a_product_fit_on_a_multiprocessor(made: dict[str, Made]) -> None:
    for name, each in made.items():
        assert each.shared <= SHARED_OF_TWO, f"{name}: {each.shared} B"


def test_rows_are_moved_in_16_byte_accesses(made: dict[str, Made]) -> None:
    for name in ("sum", "swiglu"):
        assert "ld.global.v4.b32" in made[name].ptx and "st.global.v4.b32" in made[name].ptx, name


if __name__ == "__main__":
    results = {name: compile_for_sm90(case) for name, case in all_cases().items()}
    print(json.dumps({name: {"ptx": m.ptx, "shared": m.shared, "stack": m.stack} for name, m in results.items()}))
