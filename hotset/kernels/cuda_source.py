"""CUDA C++ without a build step: NVRTC compiles a kernel on first use, once per process and set of constants.

Every parameter of such a kernel is eight bytes wide: a pointer or a `long long`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hotset.base.errors import MissingDependency

SHARED_BYTES_UNASKED = 48 << 10  # a launch that needs more shared memory has to ask for it beforehand


@dataclass(frozen=True, slots=True)
class LaunchShape:
    blocks: int
    threads: int  # of a block
    shared_bytes: int = 0
    early: bool = False  # may begin while the kernel before it on the stream ends; it waits for that one by itself


class Kernel(Protocol):
    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        """Enqueues the kernel on the current stream of the arguments' device; may be captured in a graph."""


def kernel(source: Path, name: str, **constants: int) -> Kernel:
    """The kernel `name` of a file, with `constants` as macros, for the current device.

    Compiles for a second or so when asked for the first time: not to be done first while a graph is captured.
    Raises MissingDependency where the compiler is not installed.
    """
    major, minor = torch.cuda.get_device_capability()
    return _compiled(source, name, tuple(sorted(constants.items())), f"sm_{major}{minor}")


class _LoadedKernel:
    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._shared_bytes: dict[int, int] = {}  # the most that was asked for, by device

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

        device = next(each.device for each in arguments if isinstance(each, Tensor) and each.is_cuda)
        attributes = {"programmatic_stream_serialization": True} if shape.early else {}
        config = LaunchConfig(grid=shape.blocks, block=shape.threads, shmem_size=shape.shared_bytes, **attributes)
        words = [each.data_ptr() if isinstance(each, Tensor) else int(each) for each in arguments]
        with torch.cuda.device(device):
            Device(device.index).set_current()  # a thread new to CUDA has no context yet
            if shape.shared_bytes > self._shared_bytes.get(device.index, SHARED_BYTES_UNASKED):
                self._ask_for_shared(shape.shared_bytes, device.index)
            handle = torch.cuda.current_stream().cuda_stream
            launch(Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM, config, self._loaded, *words)

    def _ask_for_shared(self, shared_bytes: int, device: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._loaded.handle, device)
        assert status == driver.CUresult.CUDA_SUCCESS, f"{shared_bytes} bytes of shared memory are refused: {status}"
        self._shared_bytes[device] = shared_bytes


def compile_source(source: Path, constants: dict[str, int], arch: str) -> Any:
    """A file compiled by NVRTC, as cuda-core's ObjectCode. Needs no GPU."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise MissingDependency(f'{source.parent.name} on a GPU needs cuda-core: pip install "hotset[cuda]"') from error
    macros = [(name, str(value)) for name, value in constants.items()]
    name, folder = f"{source.parent.name}.cu", str(source.parent)  # where files lie that it includes
    options = ProgramOptions(name=name, arch=arch, std="c++17", define_macro=macros or None, include_path=folder)
    return Program(source.read_text(), "c++", options).compile("cubin")


@cache
def _compiled(source: Path, name: str, constants: tuple[tuple[str, int], ...], arch: str) -> _LoadedKernel:
    return _LoadedKernel(compile_source(source, dict(constants), arch).get_kernel(name))
