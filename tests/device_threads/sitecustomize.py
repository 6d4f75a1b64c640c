"""Makes a thread fail that uses CUDA before it has chosen its GPU. Python imports this file at its start if its folder
is in PYTHONPATH, as `scripts/gpu` does for tests of ranks and handoffs: so it is active in all their processes.

A thread that has not chosen uses GPU 0, whatever the GPU of its process is. On a machine with one GPU nothing else
shows the mistake. Only threads are checked, because the main thread of a worker begins with `use_device`.
"""

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

CHECKED = os.environ.get("HOTSET_CHECKED_DEVICE", "cuda")  # the type of the devices that a thread must choose
_state = threading.local()
_run = threading.Thread.run
_installing = threading.Lock()
_installed = False


def check(what: str) -> None:
    """Raises an error, and prints where, if this thread is checked and has not chosen a GPU."""
    if getattr(_state, "is_checked", False) and not getattr(_state, "has_chosen", False):
        message = f"thread {threading.current_thread().name!r} used CUDA ({what}) before it had chosen its GPU"
        print(message, *traceback.format_stack(limit=12)[:-1], sep="\n", file=sys.stderr, flush=True)
        raise AssertionError(message)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        check(getattr(function, "__qualname__", repr(function)))
        return function(*args, **named)

    return wrapper


def install() -> Any:
    """Wraps the functions of torch that need no tensor, and launches of our kernels and of Triton's, once. Returns a
    mode that checks operations on tensors of this thread."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class CheckTensors(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = (x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor))
            if any(tensor.device.type == CHECKED for tensor in tensors):
                check(str(func))
            return result

    global _installed
    with _installing:
        if not _installed:
            _installed = True
            _wrap(torch)
    return CheckTensors()


def _wrap(torch: Any) -> None:
    set_device, enter, leave = torch.cuda.set_device, torch.cuda.device.__enter__, torch.cuda.device.__exit__

    def choose(device: Any) -> None:
        set_device(device)
        _state.has_chosen = True

    def entered(block: Any) -> Any:
        result = enter(block)
        block.had_chosen, _state.has_chosen = getattr(_state, "has_chosen", False), True
        return result

    def left(block: Any, *error: Any) -> Any:
        _state.has_chosen = block.had_chosen
        return leave(block, *error)

    torch.cuda.set_device, torch.cuda.device.__enter__, torch.cuda.device.__exit__ = choose, entered, left
    for name in ("synchronize", "cudart", "mem_get_info", "current_stream"):
        setattr(torch.cuda, name, checked(getattr(torch.cuda, name)))
    for name in ("record", "synchronize", "query", "wait"):
        setattr(torch.cuda.Event, name, checked(getattr(torch.cuda.Event, name)))
    for name in ("record_event", "wait_event", "wait_stream", "synchronize"):
        setattr(torch.cuda.Stream, name, checked(getattr(torch.cuda.Stream, name)))
    try:
        import cuda.core
        import triton.runtime.jit
    except ImportError:
        return  # a machine without a GPU
    cuda.core.launch = checked(cuda.core.launch)
    triton.runtime.jit.JITFunction.run = checked(triton.runtime.jit.JITFunction.run)


def run(thread: threading.Thread) -> None:
    _state.is_checked = True
    if "torch" not in sys.modules:
        _run(thread)
        return
    with install():
        _run(thread)


threading.Thread.run = run  # type: ignore[method-assign]
