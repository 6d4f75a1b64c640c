"""Runs the kernels of `.cu` files on CPU tensors: a host compiler builds them together with `cuda_on_cpu.h`.

Tests patch `hotset.kernels.cuda_source.kernel` with the function `kernel` of this module.
"""

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from hotset.kernels.cuda_source import LaunchShape

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no host compiler for C++")

# The kernels use these constants only in arithmetic. The emulation makes them variables, so that one compilation serves
# many sizes.
VARIABLES = ("SLOTS", "PAGE_ROWS", "WORDS_PER_PAGE")

_build_folder = tempfile.TemporaryDirectory(prefix="cuda-on-cpu-")
_seeds = itertools.count()  # the seed of each launch, which determines the order of fibres and blocks


class EmulatedKernel:
    def __init__(self, library: ctypes.CDLL, name: str, variables: dict[str, int]) -> None:
        self._library, self._entry, self._variables = library, getattr(library, name), variables

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        for name, value in self._variables.items():
            ctypes.c_int.in_dll(self._library, f"given_{name}").value = value
        words = [argument.data_ptr() if isinstance(argument, Tensor) else int(argument) for argument in arguments]
        run = self._library.run_on_cpu
        run.restype = ctypes.c_char_p
        entry = ctypes.cast(self._entry, ctypes.c_void_p)
        packed = (ctypes.c_int64 * len(words))(*words)
        failure = run(entry, shape.blocks, shape.threads, shape.shared_bytes, packed, len(words), next(_seeds))
        assert failure is None, failure.decode()

    def write_late(self, target: Tensor, source: Tensor) -> None:
        """Writes `source` to `target` in the next launch, as late as the launch before it could."""
        ctypes.c_void_p.in_dll(self._library, "late_to").value = target.data_ptr()
        ctypes.c_void_p.in_dll(self._library, "late_from").value = source.data_ptr()
        ctypes.c_int64.in_dll(self._library, "late_bytes").value = source.nbytes

    def set_range(self, name: str, first: int, end: int) -> None:
        """Sets a range of addresses that the library checks."""
        (ctypes.c_int64 * 2).in_dll(self._library, name)[:] = [first, end]

    def counter(self, name: str) -> int:
        return ctypes.c_uint.in_dll(self._library, name).value


def kernel(source: Path, name: str, **constants: int) -> EmulatedKernel:
    variables = {name: value for name, value in constants.items() if name in VARIABLES}
    macros = tuple(sorted((name, value) for name, value in constants.items() if name not in VARIABLES))
    return EmulatedKernel(library(source, macros), name, variables)


@cache
def library(source: Path, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(dir=_build_folder.name))
    variables = "".join(f'extern "C" {{ int given_{name}; }}\n#define {name} given_{name}\n' for name in VARIABLES)
    (folder / "prelude.h").write_text(f'#include "{HEADER}"\n{variables}')
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    options += ["-include", str(folder / "prelude.h")]
    options += [f"-D{name}={value}" for name, value in macros]
    command = [COMPILER, *options, "-x", "c++", str(source), "-o", str(folder / "kernel.so")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "kernel.so"))
