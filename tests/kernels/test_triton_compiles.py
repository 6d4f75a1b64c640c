"""The Triton kernels compile for the GPUs that they are meant for; no GPU is needed.

Run as a program, this file compiles every case and prints the PTX: in a process of its own, because Triton reads
TRITON_INTERPRET only once, and with a cache of its own, so that nothing is taken from an earlier run.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGE_TABLES = "row_pages host_pages slot_pages tail_pages map_pages"
POINTERS = {
    "_plan_kernel": {
        "*i64": f"positions seats stamps tail_first {PAGE_TABLES} counts rows missing_host",
        "*i32": "words victims",
        "*i16": "halves",
        "*i1": "tiered",
    },
    "_copy_kernel": {"*i64": "rows missing_host", "*u8": "host device"},
}


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel of swap_in: its constants, and whether its strides are multiples of 16."""

    kernel: str
    warps: int
    constants: dict[str, int | str]
    aligned: bool = True


def plan_case(k: int, slots: int, page_rows: int, words_per_page: int) -> Case:
    sizes: dict[str, int | str] = {"k": k, "slots": slots, "page_rows": page_rows, "words_per_page": words_per_page}
    block_k, block_s = 1 << (k - 1).bit_length(), min(2048, 1 << (slots - 1).bit_length())
    return Case("_plan_kernel", max(4, block_k // 256), sizes | {"block_k": block_k, "block_s": block_s})


CASES = {
    "plan of 2048 of 4096 slots": plan_case(2048, 4096, 64, 4096),
    "plan of 5 of 11 slots": plan_case(5, 11, 3, 7),
    "copy in 16-byte units": Case("_copy_kernel", 1, {"word": "int64", "words_in_unit": 2, "block": 128}),
    "copy of one unit and one byte": Case(
        "_copy_kernel", 1, {"word": "int64", "words_in_unit": 2, "block": 2, "units": 1, "tail_bytes": 1}
    ),
    "copy in bytes": Case("_copy_kernel", 1, {"word": "int8", "words_in_unit": 1, "block": 512}, aligned=False),
}


def compile_for_sm90(case: Case) -> str:
    """PTX of one case, from which a cubin could be made."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hotset.kernels.swap_in import triton_impl

    kernel = getattr(triton_impl, case.kernel)
    types = {name: kind for kind, names in POINTERS[case.kernel].items() for name in names.split()}
    constants = {name: getattr(tl, of) if isinstance(of, str) else of for name, of in case.constants.items()}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    multiples = [name in types or name.endswith("_stride") for name in kernel.arg_names] if case.aligned else []
    attributes = {(i,): [["tt.divisibility", 16]] for i, multiple in enumerate(multiples) if multiple}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    return str(compiled.asm["ptx"])


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed: dict[str, str] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize("name", CASES)
def test_kernel_of_swap_in_compiles_for_sm_90(ptx: dict[str, str], name: str) -> None:
    assert ".target sm_90" in ptx[name]


def test_plan_orders_the_threads_of_a_program_and_reads_no_map_through_the_read_only_cache(ptx: dict[str, str]) -> None:
    plan = ptx["plan of 2048 of 4096 slots"]
    assert plan.count("bar.sync") >= 5 and "relaxed.min.s32" in plan
    assert "ld.global.nc" not in plan


def test_copy_of_aligned_rows_moves_16_bytes_per_access(ptx: dict[str, str]) -> None:
    copy = ptx["copy in 16-byte units"]
    assert "ld.global.v2.b64" in copy and "st.global.v2.b64" in copy


if __name__ == "__main__":
    print(json.dumps({name: compile_for_sm90(case) for name, case in CASES.items()}))
