// Merges the splits of sparse_attention: each block computes the mean of the results of one query and head, weighted by
// 2**lse of the splits.
//
// Compile-time constants:
//   THREADS  per block; each merges four of the 4 * THREADS latents
//   AT_ONCE  splits whose results are loaded together

#include "../matrix_units.cu"

namespace {

constexpr int RANK = 4 * THREADS;

// Loads the results of AT_ONCE splits from `first` on, `stride` values apart.
__device__ __forceinline__ void load_splits(float4 (&to)[AT_ONCE], const float *from, i64 first, i64 splits, i64 stride) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        if (first + n < splits) to[n] = *reinterpret_cast<const float4 *>(from + (first + n) * stride);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const float *partial,  // [queries, splits, heads, RANK]; undefined for empty splits
    const float *lse,      // [queries, splits, heads]: minus infinity for empty splits
    u16 *out,              // [queries, heads, RANK] bfloat16
    i64 heads, i64 splits  // at most 32 splits
) {
    const int lane = threadIdx.x % 32;
    const i64 query = blockIdx.x / heads, head = blockIdx.x % heads;
    const float *mine = partial + (query * splits * heads + head) * RANK + 4 * threadIdx.x;
    wait_for_previous_launch();
    float4 parts[AT_ONCE];
    load_splits(parts, mine, 0, splits, heads * RANK);  // also those of empty splits, which are not yet known
    const float mass = lane < splits ? lse[(query * splits + lane) * heads + head] : minus_infinity();
    float most = fmaxf(mass, LOWEST_SCORE);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    const float weight = exp2f(mass - most);
    float total = weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    const float share = weight / fmaxf(total, MIN_DIVISOR);
    float4 sum = {0, 0, 0, 0};
    for (i64 first = 0; first < splits; first += AT_ONCE) {
        if (first > 0) load_splits(parts, mine, first, splits, heads * RANK);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const float of_split = __shfl_sync(ALL, share, static_cast<int>(first) + n);
            if (of_split == 0) continue;  // empty or beyond the last; NaN is not hidden
            sum.x += of_split * parts[n].x, sum.y += of_split * parts[n].y;
            sum.z += of_split * parts[n].z, sum.w += of_split * parts[n].w;
        }
    }
    u16 *to = out + (query * heads + head) * RANK + 4 * threadIdx.x;
    *reinterpret_cast<uint2 *>(to) = uint2{packed_bfloat(sum.x, sum.y), packed_bfloat(sum.z, sum.w)};
}
