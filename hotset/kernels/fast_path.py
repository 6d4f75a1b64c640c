"""Which calls the Triton kernels serve, and how an op gets at them."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import MissingDependency

FAST_DTYPES = (torch.bfloat16, torch.float32)  # float64 is for tests: the references serve it everywhere


def served_fast(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in FAST_DTYPES


def kernels_of(op: str) -> ModuleType:
    """The op's `triton_impl`, imported on first use: a machine without a GPU needs no Triton.

    An op's package must not import this under the name `triton_impl`: that is what importing the module sets there.
    """
    try:
        return import_module(f"hotset.kernels.{op}.triton_impl")
    except ModuleNotFoundError as error:
        raise MissingDependency(f'{op} on a GPU needs {error.name}: pip install "hotset[cuda]"') from error
