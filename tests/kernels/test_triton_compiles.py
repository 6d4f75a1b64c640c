"""Tests that the Triton kernels compile for sm_90 with the expected instructions and resources.

The tests need no GPU: triton_launches.py compiles the kernels in a process without TRITON_INTERPRET, which starts with
an empty cache, so that no result comes from an earlier run.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import triton_launches
from matrix import slow_if
from triton_launches import CASES, EXPERTS, SLICES, SPARSE_ATTENTION, CompiledKernel

from hotset.kernels.sparse_attention.launch import PORTABLE

ROOT = Path(__file__).resolve().parents[2]
MAX_SHARED = 227 << 10  # bytes per program
SHARED_OF_TWO = (228 << 10) // 2 - 1024  # bytes per program if two share a multiprocessor
# The sums of 128 pairs and two tiles, and a product that is added to them, take 192 of a thread's 255 registers. With
# Triton 3.9 the stack has 16 bytes, outside the loop over groups of inputs. Attention has 40 with Triton 3.6.
MAX_STACK_BYTES = {"fp8 gate_up, many tokens": 32} | dict.fromkeys(SPARSE_ATTENTION, 384)
# Kernels that are launched in order, and let the next launch start early.
STARTS_NEXT = (
    *(name for name in EXPERTS if name.startswith("down")),
    *("fp8 down, decoding", "fp8 linear, 16 tokens", "fp8 linear, 64 tokens"),
)
# `make test` compiles these small kernels. All others are compiled by `make test-all`.
SAMPLE = ("sum", "mla append", "page table lookup")

# The first test compiles all kernels; the limit is several times the duration on an overloaded machine.
pytestmark = [pytest.mark.not_interpreted, pytest.mark.timeout(1800)]
with_each_kernel = pytest.mark.parametrize("name", slow_if(CASES, {*CASES} - {*SAMPLE}))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, CompiledKernel]:
    names: Iterable[str] = SAMPLE if "not slow" in pytestconfig.getoption("markexpr") else CASES
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", triton_launches.__file__, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[0])
    return {name: CompiledKernel(**result) for name, result in results.items()}


@with_each_kernel
def test_kernel_compiles_for_sm_90_without_spilling(compiled: dict[str, CompiledKernel], name: str) -> None:
    kernel = compiled[name]
    assert ".target sm_90" in kernel.ptx
    assert kernel.stack_bytes <= MAX_STACK_BYTES.get(name, 0), f"{kernel.stack_bytes} B of stack"
    assert kernel.shared_bytes <= MAX_SHARED, f"{kernel.shared_bytes} B shared"


@with_each_kernel
def test_a_kernel_launched_early_waits_before_it_writes(compiled: dict[str, CompiledKernel], name: str) -> None:
    before, *after = compiled[name].ptx.split("griddepcontrol.wait")
    paths = 2 if name == "linear and fp32 linear of few tokens" else 1  # a program takes one of them
    assert len(after) == (paths if compiled[name].early else 0), f"{len(after)} waits, {compiled[name].early=}"
    if compiled[name].early:
        assert len(re.findall(r"\bbra\b", before)) == paths - 1
        assert not re.search(r"\bst\.global|\batom\.|\bred\.|\bret;", before)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS_NEXT)
def test_a_kernel_launched_in_order_lets_the_next_start_early(compiled: dict[str, CompiledKernel], name: str) -> None:
    assert "griddepcontrol.launch_dependents" in compiled[name].ptx and not compiled[name].early


WGMMA, WGMMA_FP8 = r"wgmma\.mma_async", r"wgmma\.mma_async\.sync\.aligned\.m64{}\.f32\.e4m3\.e4m3"
COPIES = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x{:x}"  # asynchronous, of so many bytes
ROWS, SMALL_COPIES = r"cp\.async\.cg\.shared\.global", r"cp\.async\.ca"
FROM_FP8 = r"cvt\.rn\.f16x2\.e4m3x2"
PRODUCTS = [name for name in EXPERTS if name.startswith(("gate_up", "down"))]
FP8_OPERANDS = {"fp8 linear, 16 tokens": "n16k32", "fp8 linear, 64 tokens": "n64k32"}
FP8_OPERANDS |= {"fp8 gate_up, decoding": "n16k32", "fp8 down, decoding": "n16k32"}
DIVIDING = ("mla append", "index append", "quantise", "fp8 linear, 16 tokens", "quantise pairs")
INSTRUCTIONS: list[
    tuple[str, list[str], list[str]]
] = [  # patterns that are in a kernel's code, and others that are not
    *((name, [WGMMA, ROWS], [r"mma\.sync", SMALL_COPIES]) for name in PRODUCTS),
    *((name, [r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32"], []) for name in ("sum", "swiglu")),
    ("decode", [ROWS, r"mma\.sync"], [SMALL_COPIES]),
    ("prompts", [ROWS, WGMMA], [SMALL_COPIES]),
    # Divided exactly, and rounded by the hardware.
    *((name, [r"div\.rn\.f32", r"cvt\.rn\.satfinite\.e4m3x2\.f32"], [r"div\.full"]) for name in DIVIDING),
    # Codes and scales are read asynchronously.
    *(
        (name, [WGMMA_FP8.format(operand), COPIES.format(16), COPIES.format(4)], [r"mma\.sync\.aligned\.m16"])
        for name, operand in FP8_OPERANDS.items()
    ),
    ("score fp8", [WGMMA, COPIES.format(4)], []),
    ("score bf16", [WGMMA, COPIES.format(16)], []),
    ("score shared context", [WGMMA_FP8.format("n128k32"), COPIES.format(4)], [r"\.f16\.f16"]),  # no conversion
    *((name, [ROWS, *[FROM_FP8] * fp8], [FROM_FP8] * (not fp8)) for name, (fp8, _) in SPARSE_ATTENTION.items()),
]


@pytest.mark.parametrize(
    ("name", "patterns", "excluded"),
    [pytest.param(*case, id=case[0], marks=() if case[0] in SAMPLE else pytest.mark.slow) for case in INSTRUCTIONS],
)
def test_kernels_use_these_instructions(
    compiled: dict[str, CompiledKernel], name: str, patterns: list[str], excluded: list[str]
) -> None:
    ptx = compiled[name].ptx
    assert [pattern for pattern in (*patterns, *excluded) if re.search(pattern, ptx)] == patterns


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_slices_are_copied_in_the_widest_aligned_accesses(compiled: dict[str, CompiledKernel], name: str) -> None:
    width, *_ = SLICES[name]
    suffix = {16: "v4.b32", 4: "b32", 1: "b8"}[width]
    for access in ("ld", "st"):
        # The 128 threads copy 32 slices of 512 bytes. The loop is unrolled, so all accesses of a thread are in flight
        # at the same time.
        assert compiled[name].ptx.count(f"{access}.global.{suffix} ") == 32 * 512 // 128 // width


@pytest.mark.slow
def test_two_programs_of_these_kernels_fit_on_a_multiprocessor(compiled: dict[str, CompiledKernel]) -> None:
    small_attention = [name for name, case in SPARSE_ATTENTION.items() if PORTABLE[case].programs_per_sm == 2]
    for name in (*EXPERTS, *FP8_OPERANDS, *small_attention):
        assert compiled[name].shared_bytes <= SHARED_OF_TWO, f"{name}: {compiled[name].shared_bytes} B"
