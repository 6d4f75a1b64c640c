// GPU instructions that C++ does not express and that only the scoring kernel uses: bulk copies to shared memory, products
// of a warpgroup's tensor cores, and e4m3 numbers.
#pragma once
#include "../hopper.cu"

namespace {

// Returns value / unit, but takes a fraction of the time of __fdiv_rn. `inverse` is __frcp_rn(unit). The result rounds to
// the same e4m3 number as that of __fdiv_rn if `value` is a float16 or bfloat16 number of at most 448 * unit.
__device__ __forceinline__ float quotient(float value, float unit, float inverse) {
    const float estimate = value * inverse;
    return __fmaf_rn(__fmaf_rn(-estimate, unit, value), inverse, estimate);
}

#ifdef __CUDACC__
__device__ __forceinline__ void prefetch_to_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
// The same for `bytes`, a multiple of 16, from an address that is a multiple of 16.
__device__ __forceinline__ void prefetch_to_l2(const void *address, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
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
// sums [64, 32] = (first ? 0 : sums) + keys [64, 32] heads [32, 32], in e4m3, by the four warps of a warpgroup. Warp w has
// the rows 16 * w + lane / 4 + {0, 8} of `keys`: words 0 and 2 are its columns 4 * (lane % 4) and 16 + 4 * (lane % 4) of
// the first row, words 1 and 3 the same columns of the other row. `sums` has column 8 * n + 2 * (lane % 4) + {0, 1} of
// the first row in elements 4 * n + {0, 1}, and of the other row in 4 * n + {2, 3}. `heads`: 32 rows of 128 bytes, of
// which the product reads the columns [32 * part, 32 * part + 32). The 16 bytes at column 16 * c of row r are at
// 16 * (c ^ r % 8).
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
