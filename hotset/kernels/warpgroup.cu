// GPU instructions of Hopper that C++ does not express and that two kernels use (prompts of paged_attention, many heads of
// sparse_attention): products of a warpgroup's tensor cores, registers that pass from one warpgroup to another, and copies
// from and to shared memory.
#pragma once
#include "matrix_units.cu"

namespace {

#ifdef __CUDACC__
// Returns whether a round of a barrier is over; rounds are numbered as for `wait_for_round`.
__device__ __forceinline__ bool round_is_over(u64 *barrier, u32 round) {
    u32 over;
    asm volatile("{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(over)
                 : "r"(shared_address(barrier)), "r"(round)
                 : "memory");
    return over;
}
// Sets the number of registers of every thread of this warpgroup, below or above its number at launch.
template <int count> __device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> __device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Describes a matrix in shared memory to the tensor cores: adjacent blocks of `rows` rows of 128 bytes, which begin at
// multiples of 1 KiB. The 16 bytes at column 16 * c of row r are at 16 * (c ^ r % 8).
template <int rows = 64> __device__ __forceinline__ u64 description_of(const void *at) {
    const u64 swizzle_128 = 1ull << 62, eight_rows = static_cast<u64>(1024 >> 4) << 32;
    const u64 block = static_cast<u64>(rows * 128 >> 4) << 16;  // ignored, unless rows are summed over
    return swizzle_128 | eight_rows | block | (shared_address(at) & 0x3FFFF) >> 4;
}

#define SUMS_4(sums, n) "+f"(sums[n]), "+f"(sums[n + 1]), "+f"(sums[n + 2]), "+f"(sums[n + 3])
#define SUMS_16(sums, n) SUMS_4(sums, n), SUMS_4(sums, n + 4), SUMS_4(sums, n + 8), SUMS_4(sums, n + 12)
#define SUMS_32(sums, n) SUMS_16(sums, n), SUMS_16(sums, n + 16)
#define SUMS_64(sums) SUMS_32(sums, 0), SUMS_32(sums, 32)
#define SUMS_128(sums) SUMS_32(sums, 0), SUMS_32(sums, 32), SUMS_32(sums, 64), SUMS_32(sums, 96)
#define NAMES_32                                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31}"
#define NAMES_64                                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define NAMES_128                                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "   \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "   \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// A warpgroup holds a [64, n] matrix in registers as follows: warp w has the rows 16 * w + lane / 4 + {0, 8}. Element
// 4 * m + {0, 1} of a thread is column 8 * m + 2 * (lane % 4) + {0, 1} of the first row, 4 * m + {2, 3} of the other.

// scores [64, 64] = (first ? 0 : scores) + a [64, 16] b [64, 16]^T, in float16 or bfloat16, with columns
// [16 * step, 16 * step + 16) of the matrices described by `a` and `b`.
template <bool half>
__device__ __forceinline__ void multiply_columns(float (&scores)[32], u64 a, u64 b, int step, bool first) {
    const u64 offset = (step / 4 * 8192 + step % 4 * 32) >> 4;
    if (half) {
        asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.u32 add, %34, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES_32 ", %32, %33, add, 1, 1, 0, 0;\n\t}"
                     : SUMS_32(scores, 0)
                     : "l"(a + offset), "l"(b + offset), "r"(first ? 1 : 0));
    } else {
        asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.u32 add, %34, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES_32 ", %32, %33, add, 1, 1, 0, 0;\n\t}"
                     : SUMS_32(scores, 0)
                     : "l"(a + offset), "l"(b + offset), "r"(first ? 1 : 0));
    }
}

// sums [64, 256] += a [64, 16] b [16, 256], in float16 or bfloat16, with columns [16 * step, 16 * step + 16) of `a` and
// the same rows of four blocks of the matrix described by `b`. Columns of `a` are in registers: words 0 and 2 are columns
// 2 * (lane % 4) and 8 + 2 * (lane % 4) of the thread's first row, words 1 and 3 the same columns of its other row.
template <bool half>
__device__ __forceinline__ void multiply_rows(float (&sums)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int step) {
    const u64 offset = (step * 2048) >> 4;
    if (half) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " NAMES_128
                     ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                     : SUMS_128(sums)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b + offset));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " NAMES_128
                     ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                     : SUMS_128(sums)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b + offset));
    }
}
// The same with `a` in shared memory.
template <bool half> __device__ __forceinline__ void multiply_rows(float (&sums)[128], u64 a, u64 b, int step) {
    const u64 left = (step * 32) >> 4, right = (step * 2048) >> 4;
    if (half) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " NAMES_128 ", %128, %129, 1, 1, 1, 0, 1;"
                     : SUMS_128(sums)
                     : "l"(a + left), "l"(b + right));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " NAMES_128 ", %128, %129, 1, 1, 1, 0, 1;"
                     : SUMS_128(sums)
                     : "l"(a + left), "l"(b + right));
    }
}

// scores [64, 128] = (first ? 0 : scores) + a [64, 16] b [128, 16]^T, in bfloat16. The blocks of `b` have 128 rows.
__device__ __forceinline__ void multiply_columns(float (&scores)[64], u64 a, u64 b, int step, bool first) {
    const u64 left = (step / 4 * 8192 + step % 4 * 32) >> 4, right = (step / 4 * 16384 + step % 4 * 32) >> 4;
    asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.u32 add, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " NAMES_64 ", %64, %65, add, 1, 1, 0, 0;\n\t}"
                 : SUMS_64(scores)
                 : "l"(a + left), "l"(b + right), "r"(first ? 1 : 0));
}
// sums [64, 128] += a [64, 16] b [16, 128], in bfloat16, with columns of `a` in registers as above and rows
// [16 * step, 16 * step + 16) of two blocks of the matrix described by `b`.
__device__ __forceinline__ void multiply_rows(float (&sums)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int step) {
    const u64 offset = (step * 2048) >> 4;
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " NAMES_64
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUMS_64(sums)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b + offset));
}

// Arrives at a barrier. Its round ends only after `bytes` bytes have been copied, too.
__device__ __forceinline__ void arrive_and_expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Makes a tensor map in global memory that was written before the launch visible to the copies that use it.
__device__ __forceinline__ void acquire_map(const void *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// Begins to copy a box of the map's tensor [pages, rows, columns] to shared memory, in the layout of `description_of`. Its
// size and swizzle are those of the map.
__device__ __forceinline__ void begin_box(void *to, const void *map, int column, int row, int page, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(page)
                 : "memory");
}

__device__ __forceinline__ u32 multiply_bfloats(u32 a, u32 b) {
    u32 both;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}
// Reads 16 bytes that are not written during the launch. If the source does not exist, returns zeros and does not read
// `at`. Each value is loaded into its final register, because a move to another register would wait for it.
__device__ __forceinline__ uint4 load_16(const u8 *at, bool exists) {
    uint4 to;
    asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@there ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
                 : "l"(at), "r"(exists ? 1 : 0));
    return to;
}
// Loads the lower half of a number that is not written during the launch, at this point of the program.
__device__ __forceinline__ int load_now(const i64 *at) {
    int low;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(low) : "l"(at));
    return low;
}
// Returns the value itself. The compiler keeps it in a register instead of computing it again.
__device__ __forceinline__ int kept(int value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}
// Writes four 8 x 8 matrices of two-byte values. Lane n passes the address of row n % 8 of matrix n / 8. Of each matrix, it
// holds the values of row n / 4 in columns 2 * (n % 4) and 2 * (n % 4) + 1.
__device__ __forceinline__ void store_matrices(void *at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}
// Begins to copy from shared to global memory: multiples of 16 bytes, at multiples of 16 bytes. The bytes must
// have been published, as for tensor cores.
__device__ __forceinline__ void begin_store(void *to, const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}
// Waits until the copies that this thread has begun no longer read shared memory. They end before the launch does.
__device__ __forceinline__ void end_stores() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif

// Returns where the 16 bytes at column 16 * chunk of a row are in a block of a matrix, in the layout of `description_of`.
__device__ __forceinline__ int place_in_block(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) * 16); }

// Arrives once for the warp, after its threads have reached this place.
__device__ __forceinline__ void arrive_as_warp(u64 *barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
}

}  // namespace
