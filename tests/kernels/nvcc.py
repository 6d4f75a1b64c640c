"""Records launches of CUDA kernels, and compiles the kernels for Hopper, without a GPU."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape

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


def recorded(call: Callable[[], object]) -> tuple[Path, dict[str, int], LaunchShape]:
    """Returns the source and the constants of the kernel that a call launches, and the shape of the launch."""
    recorder = mock.Mock()
    with mock.patch.object(cuda_source, "kernel", recorder):
        call()
    (source, _), constants = recorder.call_args
    return source, constants, recorder.return_value.launch.call_args.args[0]


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
