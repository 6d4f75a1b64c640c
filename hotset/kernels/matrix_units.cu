// GPU instructions that C++ does not express and that attention uses: asynchronous copies, tensor cores, and 8- and 16-bit
// numbers.
#pragma once
#include "hopper.cu"

namespace {

constexpr float LOWEST_SCORE = -1.0e30f;  // below every score, but finite, so that it can be subtracted from itself
constexpr float MIN_DIVISOR = 1.0e-37f;
constexpr float SMALLEST_UNIT = 9.094947017729282e-13f;  // 2**-40, see `unit_of`

#ifdef __CUDACC__
// Begins to copy 16 bytes. If the source does not exist, writes 16 zero bytes instead and does not read `from`.
__device__ __forceinline__ void begin_copy_16(void *to, const u8 *from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}
// Puts the copies that this thread has begun since its previous copy group into a copy group. Does not wait for them.
__device__ __forceinline__ void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` of this thread's copy groups are in flight.
template <int left> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// Loads four 8 x 8 matrices of two-byte values. Lane n passes the address of row n % 8 of matrix n / 8. From each matrix,
// it receives the values of row n / 4 in columns 2 * (n % 4) and 2 * (n % 4) + 1.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(at))
                 : "memory");
}
// The same, transposed: lane n receives the values of column n / 4 in rows 2 * (n % 4) and 2 * (n % 4) + 1.
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// sums [16, 8] += a [16, 16] b [16, 8], in float16 or bfloat16.
template <bool half> __device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (half) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Converts four e4m3 numbers to float16: the first two, then the other two.
__device__ __forceinline__ void decode(u32 codes, u32 &first, u32 &second) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
        : "=r"(first), "=r"(second)
        : "r"(codes));
}
__device__ __forceinline__ u32 packed_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 packed_bfloat(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}
__device__ __forceinline__ float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
#endif

__device__ __forceinline__ float low_of(u32 bfloats) { return __uint_as_float(bfloats << 16); }
__device__ __forceinline__ float high_of(u32 bfloats) { return __uint_as_float(bfloats & 0xFFFF0000u); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
// `unit_of(x)`, for x >= 0, is the largest power of two that does not exceed x, but at least SMALLEST_UNIT. For such a
// power of two, `inverse_of` is its reciprocal and `level_of` its log2.
__device__ __forceinline__ float unit_of(float x) {
    return __uint_as_float(__float_as_uint(fmaxf(x, SMALLEST_UNIT)) & 0x7F800000u);
}
__device__ __forceinline__ float inverse_of(float unit) { return __uint_as_float(0x7F000000u - __float_as_uint(unit)); }
__device__ __forceinline__ float level_of(float unit) {
    return static_cast<float>(static_cast<int>(__float_as_uint(unit) >> 23) - 127);
}

// Writes consecutive values. An array of u16 gets bfloat16 values.
__device__ __forceinline__ void store(float *to, float a, float b) { *reinterpret_cast<float2 *>(to) = float2{a, b}; }
__device__ __forceinline__ void store(float *to, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(to) = float4{a, b, c, d};
}
__device__ __forceinline__ void store(u16 *to, float a, float b) { *reinterpret_cast<u32 *>(to) = packed_bfloat(a, b); }
__device__ __forceinline__ void store(u16 *to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2 *>(to) = uint2{packed_bfloat(a, b), packed_bfloat(c, d)};
}

}  // namespace
