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
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class _Program:
    """The program that the interpreter runs, one after the other."""

    kernel: str = ""
    early: bool = False  # whether the kernel is launched early
    waited: bool = False  # whether the program has waited for the launch before

    def check(self) -> None:
        launched = "early" if self.early else "in order"
        assert self.waited == self.early, f"{self.kernel}: launched {launched}, {self.waited=}"


def _check_early_launches() -> None:
    """Makes an early launch fail if a program does not wait for the launch before it, or writes before it waits.

    A launch in order fails if a program waits.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    launches: Any = importlib.import_module("hotset.kernels.early_launch.triton_launch")
    launches.EARLY_LAUNCH = {"launch_pdl": True}
    kernels, builder = interpreter.InterpretedFunction, interpreter.InterpreterBuilder
    run, call, set_grid_idx = kernels.run, kernels.__call__, builder.set_grid_idx
    program = _Program()

    def checked_run(kernel: Any, *arguments: Any, launch_pdl: bool = False, **options: Any) -> None:
        program.kernel, program.early, program.waited = kernel.__name__, launch_pdl, launch_pdl
        run(kernel, *arguments, **options)
        program.check()

    def next_program(*arguments: Any) -> None:
        program.check()
        program.waited = False
        set_grid_idx(*arguments)

    def recorded_call(function: Any, *arguments: Any, **options: Any) -> Any:
        program.waited |= function is launches.wait_for_previous_launch
        return call(function, *arguments, **options)

    def checked_write(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_after_wait(*arguments: Any) -> Any:
            assert program.waited or not program.early, f"{program.kernel}: writes before it waits"
            return write(*arguments)

        return write_after_wait

    kernels.run, kernels.__call__, builder.set_grid_idx = checked_run, recorded_call, next_program
    for name in ("create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
        setattr(builder, name, checked_write(getattr(builder, name)))

    def prefetch_nothing(_self: Any, code: str, _constraints: str, values: Any, *_: Any) -> Any:
        assert code.startswith("prefetch.")
        zeros = np.zeros_like(values[0].data, dtype=np.int32)
        return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(zeros, interpreter.tl.int32))

    builder.create_inline_asm = prefetch_nothing


if INTERPRETED:
    _patch_interpreter()
    _check_early_launches()
