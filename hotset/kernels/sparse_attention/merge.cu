// Merges the splits of sparse_attention: each block computes the mean of the results of one query and head, weighted by
// 2**lse of the splits.
//
// Compile-time constant: THREADS per block. Each thread merges four of the 4 * THREADS latents.

#include "instructions.cu"

namespace {

constexpr int RANK = 4 * THREADS;

#ifdef __CUDACC__
// In a dependent launch, waits until all earlier launches are finished and visible. Otherwise does nothing.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const float *partial,  // [queries, splits, heads, RANK]; undefined for empty splits
    const float *lse,      // [queries, splits, heads]: minus infinity for empty splits
    u16 *out,              // [queries, heads, RANK] bfloat16
    i64 heads, i64 splits  // at most 32 splits
) {
    const int lane = threadIdx.x % 32;
    const i64 query = blockIdx.x / heads, head = blockIdx.x % heads;
    wait_for_earlier_launches();
    const float mass = lane < splits ? lse[(query * splits + lane) * heads + head] : minus_infinity();
    float most = fmaxf(mass, LOWEST);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    const float weight = exp2f(mass - most);
    float total = weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    const float share = weight / fmaxf(total, LEAST);
    const float *mine = partial + (query * splits * heads + head) * RANK + 4 * threadIdx.x;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
        const float of_split = __shfl_sync(ALL, share, split);
        float4 more = {0, 0, 0, 0};
        if (of_split > 0) more = *reinterpret_cast<const float4 *>(mine + split * heads * RANK);
        sum.x += of_split * more.x, sum.y += of_split * more.y;
        sum.z += of_split * more.z, sum.w += of_split * more.w;
    }
    u16 *to = out + (query * heads + head) * RANK + 4 * threadIdx.x;
    *reinterpret_cast<uint2 *>(to) = uint2{packed_bfloat(sum.x, sum.y), packed_bfloat(sum.z, sum.w)};
}
