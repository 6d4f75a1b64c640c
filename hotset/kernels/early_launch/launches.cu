// Early launches of kernels in CUDA C++: see __init__.py.
#pragma once

namespace {

#ifdef __CUDACC__
// Lets the next launch start early, as soon as all blocks of this one have called this or ended.
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all earlier launches have ended, and lets the next one start early. In a launch in order, there is nothing
// to wait for.
__device__ __forceinline__ void wait_for_previous_launch() {
    let_next_launch_start();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace
