// GPU instructions of Hopper that C++ does not express and that kernels of several ops use: barriers in shared memory, and
// batches of products of a warpgroup's tensor cores.
#pragma once
#include "early_launch/launches.cu"

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

namespace {

constexpr unsigned ALL = ~0u;  // lanes of a warp

#ifdef __CUDACC__
__device__ __forceinline__ u32 shared_address(const void *at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Prepares a barrier that completes a round after `arrivals` arrivals. With 1, each copy completes a round. One thread
// prepares the barrier; the others must wait for that.
__device__ __forceinline__ void prepare_barrier(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits for a round of a barrier: 0 for its first, 1 for the second, 0 for the third, and so on. Before the first round, a
// wait for 1 ends at once.
__device__ __forceinline__ void wait_for_round(u64 *barrier, u32 round) {
    asm volatile("{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
                 "r"(round)
                 : "memory");
}
// Waits for the first `threads` threads of the block, which must all call this.
__device__ __forceinline__ void wait_for_first(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
// Another barrier, at which some threads only arrive and others also wait. `threads` counts both.
__device__ __forceinline__ void arrive_only(int threads) { asm volatile("bar.arrive 2, %0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void arrive_and_wait(int threads) { asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); }
// Makes writes to shared memory visible to tensor cores and bulk copies that begin later: those that this thread has made,
// once the block has passed a barrier, and those of others that it has waited for.
__device__ __forceinline__ void publish_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Begins a batch of products. Must stand after the last write of the registers that they use, and before the first product.
// `close_product_batch` stands after the last product. It does not wait.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_product_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `left` batches of products are in flight.
template <int left> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
// Prevents the compiler from moving accesses of these registers past this place.
template <int count> __device__ __forceinline__ void pin(float (&values)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n) asm volatile("" : "+f"(values[n])::"memory");
}
#endif

}  // namespace
