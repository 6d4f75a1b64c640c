// Shared by kernels whose blocks work together: types, clusters of blocks, sums over a block.
//
// Compile-time constants:
//   THREADS  of a block
//   CLUSTER  blocks of a cluster; may be left out
#pragma once
#include "early_launch/launches.cu"

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;

namespace {

constexpr int EMPTY = -1;
constexpr unsigned ALL = ~0u;  // lanes of a warp
constexpr int WARPS = THREADS / 32;

#ifdef __CUDACC__
// Loads the lower half of a number at this point of the program. The compiler would otherwise delay the load until
// after the branch that decides whether it is needed.
__device__ __forceinline__ int load_now(const i64 *address) {
    int low;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(low) : "l"(address) : "memory");
    return low;
}

__device__ __forceinline__ void prefetch_to_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Begins to copy 16 bytes to shared memory. The thread may read them when it has waited for its copies.
__device__ __forceinline__ void begin_small_copy(void *to, const void *from) {
    const unsigned there = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_small_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The barrier of a cluster. If a thread arrives with `published`, the writes that it made before are visible to the
// threads of the cluster after they have waited.
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

// Returns the address in the shared memory of block `member` of the cluster that corresponds to `address` in this
// block. Block `member` must have begun and must not have ended.
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
__device__ __forceinline__ u16 read_in_block(unsigned member, const u16 *address) {
    u16 value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(value) : "r"(in_block(member, address)) : "memory");
#endif
    return value;
}
__device__ __forceinline__ void write_in_block(unsigned member, unsigned *address, unsigned value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(in_block(member, address)), "r"(value) : "memory");
#endif
}
#endif

struct Prefix {
    unsigned before;  // sum over all earlier warps or threads
    unsigned total;
};

// Sums one number per warp, `of_warp`, which is the same in all lanes of the warp. Two 16-bit sums may share a word.
// Contains one barrier. `totals` [WARPS] may be reused after another barrier.
__device__ __forceinline__ Prefix sum_warps(unsigned of_warp, unsigned *totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) totals[warp] = of_warp;
    __syncthreads();
    const unsigned total = lane < WARPS ? totals[lane] : 0;
    return {__reduce_add_sync(ALL, lane < warp ? total : 0), __reduce_add_sync(ALL, total)};
}

// The same with one number per thread, in the order of the threads.
__device__ __forceinline__ Prefix sum_threads(unsigned value, unsigned *totals) {
    const int lane = threadIdx.x % 32;
    unsigned sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL, sum, step);
        sum += lane >= step ? below : 0;
    }
    const Prefix warps = sum_warps(__shfl_sync(ALL, sum, 31), totals);
    return {warps.before + sum - value, warps.total};
}

template <int count> __device__ __forceinline__ void fill(unsigned *values, unsigned value) {
#pragma unroll
    for (int start = 0; start < count; start += THREADS) {
        const int i = start + threadIdx.x;
        if (count % THREADS == 0 || i < count) values[i] = value;
    }
}

}  // namespace
