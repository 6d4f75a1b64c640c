"""Emulates the CUDA kernels of attention on the CPU, and compiles them for sm_90 without a GPU."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cuda_on_cpu

HEADER = Path(__file__).with_name("attention_warpgroup_on_cpu.h")
NVCC = shutil.which("nvcc")
SM_90A = ["-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17"]

_folder = tempfile.TemporaryDirectory(prefix="attention-on-cpu-")


@cache
def with_matrix_units(source: Path) -> Path:
    joined = Path(_folder.name) / f"{source.parent.name}-{source.stem}.cpp"
    joined.write_text(f'#include "{HEADER}"\n#include "{source}"\n')
    return joined


def emulated(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
    return cuda_on_cpu.kernel(with_matrix_units(source), name, **constants)


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports about a kernel."""

    registers: int  # per thread, at launch
    spilled_bytes: int
    serialized: bool  # it waits for every single product of a warpgroup


def compile_for_sm_90(source: Path, constants: dict[str, int], folder: Path) -> Compiled:
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    options = [*SM_90A, "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
    command = [str(NVCC), *options, *macros, str(source), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    def number_before(words: str) -> int:
        return int(done.stderr.split(words)[0].split()[-1])

    return Compiled(number_before(" registers,"), number_before(" bytes spill stores"), "serialized" in done.stderr)
