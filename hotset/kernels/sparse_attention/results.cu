// Writes the results of a block of sparse_attention: final results, or those of a split for the merge.
#pragma once
#include "products.cu"

namespace {

// Writes `most` and the total mass of each head to shared memory. Called by all threads; `mass` is that of this lane.
__device__ __forceinline__ void leave_totals(Shared &shared, int head, float most, float mass) {
#pragma unroll
    for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) mass += __shfl_xor_sync(ALL, mass, step);
    if (threadIdx.x % LANES_OF_HEAD == 0) shared.most[head] = most, shared.mass[head] = mass;
}

// Writes sums / mass for the first `heads` heads of the block, or zeros if there was no key. T: float, or u16 for
// bfloat16.
template <class T>
__device__ __forceinline__ void store_sums(const Shared &shared, const Sums &sums, T *out, int heads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int head = n * 8 + lane / 4, i = n % 2 * 2;
        if (head >= heads) continue;
        const float inverse = 1 / fmaxf(shared.mass[head], MIN_DIVISOR);
        T *to = out + head * RANK + warp * PART + (FP8 ? 4 : 2) * (lane % 4);
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

}  // namespace
