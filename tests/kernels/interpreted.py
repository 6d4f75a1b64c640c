"""Running Triton kernels on CPU tensors, with conversions that round.

Triton's interpreter truncates float32 to bfloat16 and loses the smallest e4m3 numbers; the hardware rounds both to the
nearest, as torch does. So in an interpreted process conversions are made by torch, and bits can be compared.
"""

import importlib
import os
from types import ModuleType
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def triton_impl(op: str) -> ModuleType:
    """The op's kernels, to be called with CPU tensors; only in an interpreted process."""
    assert INTERPRETED, "start the process with TRITON_INTERPRET=1"
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter._convert_float = _convert
    return importlib.import_module(f"hotset.kernels.{op}.triton_impl")


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """numpy in, numpy out: the bits of `values`, of Triton dtype `source`, in Triton dtype `target`."""
    bits = torch.from_numpy(values.reshape(-1).copy()).view(TORCH_DTYPES[str(source)])
    converted = bits.to(TORCH_DTYPES[str(target)])
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[converted.element_size()]
    return converted.view(whole).numpy().reshape(values.shape)
