// GPU instructions that C++ does not express and that the scoring kernel uses: bulk copies to shared memory, products of
// a warpgroup's tensor cores, and e4m3 numbers.
#pragma once

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

namespace {

constexpr unsigned ALL = ~0u;  // lanes of a warp

// Returns value / unit, but takes a fraction of the time of __fdiv_rn. `inverse` is __frcp_rn(unit). The result rounds to
// the same e4m3 number as that of __fdiv_rn if `value` is a float16 or bfloat16 number of at most 448 * unit.
__device__ __forceinline__ float quotient(float value, float unit, float inverse) {
    const float estimate = value * inverse;
    return __fmaf_rn(__fmaf_rn(-estimate, unit, value), inverse, estimate);
}

#ifdef __CUDACC__
__device__ __forceinline__ u32 shared_address(const void *at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void bring_to_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prepares a barrier that completes a round after `arrivals` arrivals, or with 1, after each copy. One thread prepares it;
// the others must wait for that.
__device__ __forceinline__ void prepare_barrier(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Begins to copy `bytes`, a multiple of 16, from and to addresses that are multiples of 16. The source is read once, so that
// it is the first to be evicted from the L2 cache.
__device__ __forceinline__ void begin_copy(void *to, const void *from, u32 bytes, u64 *barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
// Waits for a round of a barrier: 0 for its first, 1 for the second, 0 for the third, and so on. Does not wait for the
// round before the first, which is 1.
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
// Makes this thread's earlier writes to shared memory visible to tensor cores, once the block has passed a barrier.
__device__ __forceinline__ void publish_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Begins a batch of products: must stand between the last write of a register that they read and their first.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `left` batches of products are in flight.
template <int left> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
// Prevents the compiler from moving accesses of these registers past this place.
template <int count> __device__ __forceinline__ void pin(float (&values)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n) asm volatile("" : "+f"(values[n])::"memory");
}

// sums [64, 32] = (first ? 0 : sums) + keys [64, 32] heads [32, 32], in e4m3, by the four warps of a warpgroup. Warp w has
// the rows 16 * w + lane / 4 + {0, 8} of `keys`: words 0 and 2 are its columns 4 * (lane % 4) and 16 + 4 * (lane % 4) of
// the first row, words 1 and 3 the same of the other. `sums` has column 8 * n + 2 * (lane % 4) + {0, 1} of the first row
// in elements 4 * n + {0, 1}, and of the other in 4 * n + {2, 3}. `heads`: 32 rows of 128 bytes, of which the product
// reads the columns [32 * part, 32 * part + 32). The 16 bytes at column 16 * c of row r are at 16 * (c ^ r % 8).
__device__ __forceinline__ void multiply(float (&sums)[16], u32 a0, u32 a1, u32 a2, u32 a3, const u8 *heads, int part,
                                         bool first) {
    const u64 swizzle_128 = 1ull << 62, eight_rows = static_cast<u64>(1024 >> 4) << 32, unused = 1ull << 16;
    const u64 at = ((shared_address(heads) + 32 * part) & 0x3FFFF) >> 4;
    asm volatile(
        "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, %21, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1;\n\t}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(swizzle_128 | eight_rows | unused | at), "r"(first ? 1 : 0));
}

// Rounds two numbers to e4m3: the first is the low byte.
__device__ __forceinline__ u32 e4m3_codes(float first, float second) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
}
__device__ __forceinline__ void from_halves(u32 halves, float &first, float &second) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(first), "=f"(second)
        : "r"(halves));
}
#endif

}  // namespace
