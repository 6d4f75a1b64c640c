"""The usual rule for which calls use a GPU kernel, the properties of a GPU that the choice of a kernel depends on, and
the import of the module that contains the kernel.

An op's `__init__.py` dispatches between `reference.py`, `cpu_impl.py` if there is one, and the module that `kernels_of`
returns. `cpu_impl.py` needs only torch and is imported as usual.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import MissingDependency

FAST_DTYPES = (torch.bfloat16, torch.float32)  # others use the reference; float64 is for tests
HOPPER = 9  # major compute capability
INTERPRETED_MULTIPROCESSORS = 2  # assumed when kernels are interpreted on a CPU


def has_fast_path(x: Tensor) -> bool:
    """Returns whether the GPU kernels of most ops accept this tensor. Ops with another rule do not call this."""
    return x.is_cuda and x.dtype in FAST_DTYPES


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kernels_of(op: str, module: str = "triton_impl") -> ModuleType:
    """Returns a module with the op's GPU kernels, imported on first use: a CPU needs neither Triton nor CUDA.

    The import sets the module as an attribute of the op's package, so the package must not use that name for anything
    else. Raises MissingDependency if the module needs a package that is not installed.
    """
    try:
        return import_module(f"hotset.kernels.{op}.{module}")
    except ModuleNotFoundError as error:
        raise MissingDependency(f'{op} on a GPU needs {error.name}: pip install "hotset[cuda]"') from error
