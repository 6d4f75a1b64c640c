"""Compiles CUDA kernels for Hopper without a GPU."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NVCC = shutil.which("nvcc")
OPTIONS = ["-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
REGISTERS_OF_SM = 64 << 10

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports about the kernels of a file."""

    registers: int  # per thread of the first kernel, at launch
    stack_bytes: int  # of all kernels, per thread
    spilled_bytes: int  # of all kernels, per thread
    serialized: bool  # a kernel waits for every single product of a warpgroup


def compile_with_nvcc(source: Path, constants: dict[str, int], folder: Path, arch: str = "90a") -> Compiled:
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    command = [str(NVCC), f"-gencode=arch=compute_{arch},code=sm_{arch}", *OPTIONS, *macros, str(source)]
    done = subprocess.run([*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    def numbers_before(words: str) -> list[int]:
        numbers = [int(part.split()[-1]) for part in done.stderr.split(words)[:-1]]
        assert numbers, done.stderr
        return numbers

    return Compiled(
        numbers_before(" registers,")[0],
        sum(numbers_before(" bytes stack frame")),
        sum(numbers_before(" bytes spill stores")),
        "serialized" in done.stderr,
    )
