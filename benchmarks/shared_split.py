"""One split of L1 cache and shared memory for all kernels: `--shared-percent` of few_requests.py, an experiment.

A multiprocessor divides the same memory into L1 cache and shared memory, as the kernel on it prefers. By CUDA's
documentation, launching a kernel with another preference may insert a synchronization point on the device. Then a
kernel that needs much shared memory cannot start early beside the end of a kernel that needs little.
"""

import argparse
from typing import Any
from unittest import mock

from hotset.kernels import cuda_source


def prefer_shared_percent(percent: int) -> None:
    """Makes all kernels of ours that are loaded from now on prefer so much of the memory as shared memory. Those of
    torch and cuBLAS keep their own preference."""
    import triton
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    load = cuda_source._LoadedKernel.__init__

    def check(result: tuple[Any]) -> None:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, f"the driver refused {percent} % shared memory: {result[0]}"

    def load_cuda(kernel: cuda_source._LoadedKernel, loaded: Any) -> None:
        load(kernel, loaded)
        check(driver.cuKernelSetAttribute(attribute, percent, loaded.handle, 0))

    def after_triton_load(_module: object, function: int, *_: object) -> None:
        check(driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, percent))

    mock.patch.object(cuda_source._LoadedKernel, "__init__", load_cuda).start()
    triton.knobs.runtime.kernel_load_end_hook.add(after_triton_load)


def add_shared_percent_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shared-percent",
        type=int,
        choices=range(101),
        metavar="0..100",
        help="an experiment: all kernels prefer so much of L1 as shared memory",
    )
