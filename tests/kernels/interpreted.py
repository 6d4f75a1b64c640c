"""Runs Triton kernels on CPU tensors under Triton's interpreter, with correct rounding.

The interpreter truncates float32 to bfloat16 and loses the smallest e4m3 numbers. The hardware rounds to nearest in
both formats, as torch does. In an interpreted process, torch therefore does the conversions, and results can be
compared bit by bit.

Every launch is also checked against the rule of early launches (`hotset/kernels/early_launch`).

At every call of a jitted function, the interpreter searches for the same builtins and dtypes again. This module caches
the results, which saves a fifth of the time.
"""

import importlib
import os
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def triton_impl(op: str, module: str = "triton_impl") -> ModuleType:
    """Returns a module with Triton kernels of an op, for CPU tensors. Requires TRITON_INTERPRET=1."""
    assert INTERPRETED, "start the process with TRITON_INTERPRET=1"
    return importlib.import_module(f"hotset.kernels.{op}.{module}")


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Converts numpy bits of Triton dtype `source` to numpy bits of Triton dtype `target`."""
    tensor = torch.from_numpy(values.reshape(-1).copy()).view(TORCH_DTYPES[str(source)])
    converted = tensor.to(TORCH_DTYPES[str(target)])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[converted.element_size()]
    return converted.view(bits).numpy().reshape(values.shape)


def _patch_interpreter() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    interpreter._convert_float = _convert

    # The interpreter replaces these attributes while a kernel runs. They are listed before any has been replaced.
    modules = (language, language.core, language.math, language.tensor, language.core.tensor_descriptor_base)
    builtins = {
        module: [name for name in dir(module) if language.core.is_builtin(getattr(module, name))] for module in modules
    }

    def patch_builtin(module: Any, *scope: Any) -> None:
        names = builtins[module]
        if not language.core.is_builtin(getattr(module, names[0])):
            return  # a calling jitted function has replaced them all
        for name in names:
            interpreter._patch_attr(module, name, getattr(module, name), *scope)

    interpreter._patch_builtin = patch_builtin

    numpy_dtype_of_scalar = cache(interpreter._get_np_dtype)
    numpy_dtype = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy_dtype(dtype) if isinstance(scalar, language.pointer_type) else numpy_dtype_of_scalar(scalar)

    interpreter._get_np_dtype = get_np_dtype


def _check_early_launches() -> None:
    """Makes a launch fail unless its kernel is launched early exactly if it waits for the launch before it.

    Interpreted kernels run one after the other, in any case.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    launches: Any = importlib.import_module("hotset.kernels.early_launch.triton_launch")
    launches.EARLY_LAUNCH = {"launch_pdl": True}
    run, call = interpreter.InterpretedFunction.run, interpreter.InterpretedFunction.__call__
    waited = False

    def checked_run(kernel: Any, *arguments: Any, launch_pdl: bool = False, **options: Any) -> None:
        nonlocal waited
        waited = False
        run(kernel, *arguments, **options)
        assert waited == launch_pdl, f"{kernel.__name__}: launched {'early' if launch_pdl else 'in order'}, {waited=}"

    def recorded_call(function: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal waited
        waited = waited or function is launches.wait_for_previous_launch
        return call(function, *arguments, **options)

    interpreter.InterpretedFunction.run = checked_run
    interpreter.InterpretedFunction.__call__ = recorded_call

    def prefetch_nothing(_self: Any, code: str, _constraints: str, values: Any, *_: Any) -> Any:
        assert code.startswith("prefetch.")
        zeros = np.zeros_like(values[0].data, dtype=np.int32)
        return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(zeros, interpreter.tl.int32))

    interpreter.InterpreterBuilder.create_inline_asm = prefetch_nothing


if INTERPRETED:
    _patch_interpreter()
    _check_early_launches()
