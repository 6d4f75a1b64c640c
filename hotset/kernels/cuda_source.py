"""Compiles and launches CUDA C++ kernels without a build step.

NVRTC compiles a file on the first use of one of its kernels, once per set of constants and GPU architecture. What it
made is kept on disk for later processes (`compiled_files.py`).
Every parameter of such a kernel is eight bytes wide: a pointer or a `long long`.
"""

import struct
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hotset.base.errors import InternalError, MissingDependency
from hotset.kernels.compiled_files import CompiledFiles, key_of

# Held while a kernel is compiled: cuda-core's first import fails in a thread if another thread is importing it.
_compiling = threading.Lock()
_compiled_files = CompiledFiles()
STANDARD = "c++17"
DEFAULT_MAX_SHARED_BYTES = 48 << 10  # of shared memory per block; a launch that needs more raises its limit


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The grid, the shared memory and the stream order of one launch."""

    blocks: int
    threads: int  # per block
    shared_bytes: int = 0  # dynamic, per block
    # Programmatic dependent launch: the kernel may start before the previous one on the stream has ended. Every block
    # must then wait itself (griddepcontrol.wait), as hotset/kernels/early_launch explains.
    dependent_launch: bool = False


class Kernel(Protocol):
    """A compiled kernel."""

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        """Enqueues the kernel on the current stream of the first CUDA tensor's device. A graph can capture this."""


def kernel(source: Path, name: str, **constants: int) -> Kernel:
    """Returns the kernel `name` of a source file, compiled for the current device with `constants` as macros.

    The first call with these constants loads the kernel, and compiles it if no process has done so before, which takes
    about a second. Neither must happen during graph capture.
    Raises MissingDependency if cuda-core is not installed.
    """
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")  # a: with the instructions of this architecture alone
    with _compiling:
        return _compiled(source, name, tuple(sorted(constants.items())), arch)


def float_bits(value: float) -> int:
    """Returns the bits of a float32, because kernels accept only integers."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


class _LoadedKernel:
    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._max_shared_bytes: dict[int, int] = {}  # by device; only where the limit was raised

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

        device = next(value.device for value in arguments if isinstance(value, Tensor) and value.is_cuda)
        attributes = {"programmatic_stream_serialization": True} if shape.dependent_launch else {}
        config = LaunchConfig(grid=shape.blocks, block=shape.threads, shmem_size=shape.shared_bytes, **attributes)
        words = [value.data_ptr() if isinstance(value, Tensor) else int(value) for value in arguments]
        with torch.cuda.device(device):
            Device(device.index).set_current()  # a thread that has not used CUDA yet has no current context
            if shape.shared_bytes > self._max_shared_bytes.get(device.index, DEFAULT_MAX_SHARED_BYTES):
                self._raise_shared_limit(shape.shared_bytes, device.index)
            handle = torch.cuda.current_stream().cuda_stream
            launch(Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM, config, self._loaded, *words)

    def _raise_shared_limit(self, shared_bytes: int, device: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._loaded.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InternalError(f"the driver refused {shared_bytes} bytes of shared memory per block: {status}")
        self._max_shared_bytes[device] = shared_bytes


def compile_source(source: Path, constants: dict[str, int], arch: str) -> Any:
    """Compiles a file with NVRTC and returns cuda-core's ObjectCode. Needs no GPU."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise MissingDependency(f'{source.parent.name} on a GPU needs cuda-core: pip install "hotset[cuda]"') from error
    macros = [(name, str(value)) for name, value in constants.items()]
    options = ProgramOptions(
        name=f"{source.parent.name}.cu",
        arch=arch,
        std=STANDARD,
        define_macro=macros or None,
        include_path=[str(folder) for folder in _include_folders(source)],
    )
    return Program(source.read_text(), "c++", options).compile("cubin")


def _include_folders(source: Path) -> tuple[Path, ...]:
    return source.parent, Path(__file__).parent


def _load_or_compile(source: Path, constants: dict[str, int], arch: str, files: CompiledFiles) -> Any:
    """Returns the ObjectCode of a file, from disk if a process has compiled it before."""
    key = key_of(source, _include_folders(source), (sorted(constants.items()), arch, STANDARD, *_versions(source)))
    if (stored := files.read(key)) is not None:
        from cuda.core import ObjectCode

        return ObjectCode.from_cubin(stored)
    compiled = compile_source(source, constants, arch)
    files.write(key, bytes(compiled.code))
    return compiled


def _versions(source: Path) -> tuple[object, ...]:
    """Returns the versions of everything that compiles a file."""
    try:
        import cuda.core
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise MissingDependency(f'{source.parent.name} on a GPU needs cuda-core: pip install "hotset[cuda]"') from error
    return cuda.core.__version__, nvrtc.nvrtcVersion(), driver.cuDriverGetVersion()


@cache
def _object_code(source: Path, constants: tuple[tuple[str, int], ...], arch: str) -> Any:
    return _load_or_compile(source, dict(constants), arch, _compiled_files)


@cache
def _compiled(source: Path, name: str, constants: tuple[tuple[str, int], ...], arch: str) -> _LoadedKernel:
    return _LoadedKernel(_object_code(source, constants, arch).get_kernel(name))
