"""Runs the kernels of `.cu` files on CPU tensors: a host compiler builds them with `cuda_on_cpu.h`.

`kernel` stands in for `hotset.kernels.cuda_source.kernel`.
"""

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from hotset.kernels.cuda_source import LaunchShape

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
COMPILER = shutil.which("g++") or shutil.which("c++")

# Constants that only take part in arithmetic: they are variables here, so that few programs serve many sizes.
VARIABLES = ("SLOTS", "PAGE_ROWS", "WORDS_PER_PAGE")

_folder = tempfile.TemporaryDirectory(prefix="cuda-on-cpu-")
_seeds = itertools.count()


class EmulatedKernel:
    def __init__(self, library: ctypes.CDLL, name: str, variables: dict[str, int]) -> None:
        self._library, self._entry, self._variables = library, getattr(library, name), variables

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        for name, value in self._variables.items():
            ctypes.c_int.in_dll(self._library, f"given_{name}").value = value
        words = [each.data_ptr() if isinstance(each, Tensor) else int(each) for each in arguments]
        run = self._library.run_on_cpu
        run.restype = ctypes.c_char_p
        entry = ctypes.cast(self._entry, ctypes.c_void_p)
        packed = (ctypes.c_int64 * len(words))(*words)
        failure = run(entry, shape.blocks, shape.threads, shape.shared_bytes, packed, len(words), next(_seeds))
        assert failure is None, failure.decode()


def kernel(source: Path, name: str, **constants: int) -> EmulatedKernel:
    variables = {each: value for each, value in constants.items() if each in VARIABLES}
    fixed = tuple(sorted((each, value) for each, value in constants.items() if each not in VARIABLES))
    return EmulatedKernel(_library(source, fixed), name, variables)


@cache
def _library(source: Path, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    given = "".join(f'extern "C" {{ int given_{each}; }}\n#define {each} given_{each}\n' for each in VARIABLES)
    (folder / "given.h").write_text(f'#include "{HEADER}"\n{given}')
    defined = [f"-D{each}={value}" for each, value in constants]
    options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-include", str(folder / "given.h")]
    command = [COMPILER, *options, *defined, "-x", "c++", str(source), "-o", str(folder / "kernel.so")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "kernel.so"))
