"""Runs Triton kernels on CPU tensors under Triton's interpreter, with correct rounding.

The interpreter truncates float32 to bfloat16 and loses the smallest e4m3 numbers. The hardware rounds both to nearest,
as torch does. In an interpreted process, torch does the conversions, so that results can be compared bit by bit.
"""

import importlib
import os
from types import ModuleType
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def triton_impl(op: str) -> ModuleType:
    """Returns the Triton implementation of an op, for CPU tensors. Requires TRITON_INTERPRET=1."""
    assert INTERPRETED, "start the process with TRITON_INTERPRET=1"
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter._convert_float = _convert
    return importlib.import_module(f"hotset.kernels.{op}.triton_impl")


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Converts numpy bits of Triton dtype `source` to numpy bits of Triton dtype `target`."""
    tensor = torch.from_numpy(values.reshape(-1).copy()).view(TORCH_DTYPES[str(source)])
    converted = tensor.to(TORCH_DTYPES[str(target)])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[converted.element_size()]
    return converted.view(bits).numpy().reshape(values.shape)
