"""`--shared-percent` sets the split of every kernel that is loaded. Driver and Triton are stubs, as there is no GPU."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from shared_split import prefer_shared_percent

from hotset.kernels import cuda_source


@pytest.mark.parametrize("accepted", [True, False])
def test_every_kernel_that_is_loaded_later_prefers_this_split(accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def answer(*arguments: Any) -> tuple[str]:
        asked.append(arguments)
        return ("success" if accepted else "invalid value",)

    stub: Any = ModuleType("driver")
    stub.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="split")
    stub.CUresult, stub.CUfunction = SimpleNamespace(CUDA_SUCCESS="success"), lambda address: ("function", address)
    stub.cuKernelSetAttribute = stub.cuFuncSetAttribute = answer
    bindings: Any = ModuleType("bindings")
    bindings.driver = stub
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    hooks: list[Any] = []
    triton: Any = ModuleType("triton")
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(kernel_load_end_hook=SimpleNamespace(add=hooks.append)))
    monkeypatch.setitem(sys.modules, "triton", triton)
    try:
        prefer_shared_percent(75)
        loads = [lambda: cuda_source._LoadedKernel(SimpleNamespace(handle=7)), lambda: hooks[0](None, 8, "name")]
        for load in loads:
            if accepted:
                load()
            else:
                with pytest.raises(AssertionError, match="refused 75 % shared memory: invalid value"):
                    load()
    finally:
        mock.patch.stopall()
    assert asked == [("split", 75, 7, 0), (("function", 8), "split", 75)]
