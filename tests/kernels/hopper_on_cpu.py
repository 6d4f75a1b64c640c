"""Emulates CUDA kernels that use instructions of Hopper on the CPU: a header emulates these instructions."""

import tempfile
from functools import cache
from pathlib import Path

import cuda_on_cpu

_folder = tempfile.TemporaryDirectory(prefix="hopper-on-cpu-")


@cache
def _with_header(header: str, source: Path) -> Path:
    joined = Path(_folder.name) / f"{source.parent.name}-{source.stem}.cpp"
    joined.write_text(f'#include "{Path(__file__).with_name(header)}"\n#include "{source}"\n')
    return joined


def emulated_attention(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
    return cuda_on_cpu.kernel(_with_header("attention_warpgroup_on_cpu.h", source), name, **constants)


def emulated_scoring(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
    return cuda_on_cpu.kernel(_with_header("warpgroup_on_cpu.h", source), name, **constants)
