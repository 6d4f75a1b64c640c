// Blocks of one cluster: their barrier, and shared memory of one block read and written by another. Compute capability
// 9 and later; earlier ones compile, for kernels that can do without clusters.
#pragma once

namespace {

#ifdef __CUDACC__
// The barrier of a cluster. What a thread wrote before it arrived is there for those that waited, if it `published`.
__device__ __forceinline__ void arrive_in_cluster(bool published) {
#if __CUDA_ARCH__ >= 900
    if (published) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
}
__device__ __forceinline__ void wait_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where another block of the cluster has what is at `address` in this block's shared memory. That block must have begun
// and may not have ended.
__device__ __forceinline__ unsigned in_block(unsigned member, const void *address) {
    unsigned there = static_cast<unsigned>(__cvta_generic_to_shared(address));
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(there), "r"(member));
#endif
    return there;
}
__device__ __forceinline__ unsigned read_in_block(unsigned member, const unsigned *address) {
    unsigned value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(in_block(member, address)) : "memory");
#endif
    return value;
}
__device__ __forceinline__ unsigned short read_in_block(unsigned member, const unsigned short *address) {
    unsigned short value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(value) : "r"(in_block(member, address)) : "memory");
#endif
    return value;
}
__device__ __forceinline__ float read_in_block(unsigned member, const float *address) {
    return __uint_as_float(read_in_block(member, reinterpret_cast<const unsigned *>(address)));
}
__device__ __forceinline__ float4 read_in_block(unsigned member, const float4 *address) {
    float4 value = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(in_block(member, address))
                 : "memory");
#endif
    return value;
}
__device__ __forceinline__ void write_in_block(unsigned member, unsigned *address, unsigned value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(in_block(member, address)), "r"(value) : "memory");
#endif
}
#endif

}  // namespace
