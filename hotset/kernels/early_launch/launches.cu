// Early launches of kernels in CUDA C++: see __init__.py.
#pragma once

namespace {

#ifdef __CUDACC__
// In a dependent launch, waits until all earlier launches are finished and visible. Otherwise does nothing.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch begin early if it is a dependent launch, which itself waits until this launch has finished.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace
