// What a block of sparse_attention leaves: results, or partial results that another launch merges; or, in a cluster,
// the results of those heads that it merges out of what all blocks of the cluster have.
#pragma once
#include "../cluster.cu"
#include "products.cu"

namespace {

constexpr int MERGED_HEADS = HEADS / CLUSTER;  // by each block of a cluster
static_assert(RANK == 4 * 32 * WARPS, "a thread merges four latents of a head");

// For the other threads, and the other blocks of a cluster. `mass` is that of the keys of this lane.
__device__ __forceinline__ void leave_totals(Shared &shared, int head, float most, float mass) {
#pragma unroll
    for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) mass += __shfl_xor_sync(ALL, mass, step);
    if (threadIdx.x % LANES_OF_HEAD == 0) shared.most[head] = most, shared.mass[head] = mass;
}

__device__ __forceinline__ void store(float *to, float a, float b) { *reinterpret_cast<float2 *>(to) = float2{a, b}; }
__device__ __forceinline__ void store(float *to, float a, float b, float c, float d) {
    *reinterpret_cast<float4 *>(to) = float4{a, b, c, d};
}
__device__ __forceinline__ void store(u16 *to, float a, float b) { *reinterpret_cast<u32 *>(to) = packed_bfloat(a, b); }
__device__ __forceinline__ void store(u16 *to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2 *>(to) = uint2{packed_bfloat(a, b), packed_bfloat(c, d)};
}

// Sums over masses, of the first `heads` of the block's heads; zeros without any key. T: float or bfloat16.
template <class T>
__device__ __forceinline__ void store_sums(const Shared &shared, const Sums &sums, T *out, int pitch, int heads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int head = n * 8 + lane / 4, i = n % 2 * 2;
        if (head >= heads) continue;
        const float inverse = 1 / fmaxf(shared.mass[head], LEAST);
        T *to = out + head * pitch + warp * PART + (FP8 ? 4 : 2) * (lane % 4);
        const float (&mine)[PART / 8][4] = sums[n / 2];
#pragma unroll
        for (int m = 0; m < PART / 16; ++m) {
            const float (&one)[4] = mine[2 * m], (&other)[4] = mine[2 * m + 1];
            if (FP8) {
                store(to + 16 * m, one[i] * inverse, other[i] * inverse, one[i + 1] * inverse, other[i + 1] * inverse);
            } else {
                store(to + 16 * m, one[i] * inverse, one[i + 1] * inverse);
                store(to + 16 * m + 8, other[i] * inverse, other[i + 1] * inverse);
            }
        }
    }
}

// What the results of a block of the cluster count in those of a head. A lane answers for head lane / CLUSTER of those
// that this block merges, and block lane % CLUSTER.
__device__ __forceinline__ float share_of(const Shared &shared, int head_first) {
    const int lane = threadIdx.x % 32 % HEADS, head = head_first + lane / CLUSTER, block = lane % CLUSTER;
    const float most = read_in_block(block, &shared.most[head]), mass = read_in_block(block, &shared.mass[head]);
    float highest = most;
#pragma unroll
    for (int step = CLUSTER / 2; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, step));
    const float weight = power_of_2(most - highest) * mass;
    float total = weight;
#pragma unroll
    for (int step = CLUSTER / 2; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    return weight / fmaxf(total, LEAST);
}

// Each block merges some of the heads; `out` are those of the first of the block's heads. Nobody reads rows any more.
__device__ __forceinline__ void merge_in_cluster(Shared &shared, const Sums &sums, u16 *out, int member, int heads) {
    store_sums(shared, sums, &shared.sums[0][0], SUMS_PITCH, HEADS);
    arrive_in_cluster(true);
    wait_in_cluster();
    const int head_first = member * MERGED_HEADS, value = 4 * threadIdx.x;
    const float share = share_of(shared, head_first);
    uint2 merged[MERGED_HEADS];
#pragma unroll
    for (int n = 0; n < MERGED_HEADS; ++n) {
        float4 parts[CLUSTER], sum = {0, 0, 0, 0};
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            const int block = (member + m) % CLUSTER;  // not all begin with the same
            parts[m] = read_in_block(block, reinterpret_cast<const float4 *>(&shared.sums[head_first + n][value]));
        }
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            const float of_block = __shfl_sync(ALL, share, n * CLUSTER + (member + m) % CLUSTER);
            sum.x += of_block * parts[m].x, sum.y += of_block * parts[m].y;
            sum.z += of_block * parts[m].z, sum.w += of_block * parts[m].w;
        }
        merged[n] = uint2{packed_bfloat(sum.x, sum.y), packed_bfloat(sum.z, sum.w)};
    }
    arrive_in_cluster(true);  // all is read; what follows need not be published
#pragma unroll
    for (int n = 0; n < MERGED_HEADS; ++n) {
        if (head_first + n >= heads) continue;
        *reinterpret_cast<uint2 *>(out + static_cast<i64>(head_first + n) * RANK + value) = merged[n];
    }
    wait_in_cluster();  // nobody leaves while others read here
}

}  // namespace
