// The query of a block, in registers. A warp holds 128 of the 512 latents and 16 of the 64 rope values of all heads.
#pragma once
#include "rows.cu"

namespace {

constexpr int TURNS = HEADS / 16;  // a tensor core operation processes 16 heads

// The layout of the left operand of the tensor cores: in each step of 16 values, words 0 and 1 belong to heads lane / 4
// and lane / 4 + 8, and so do words 2 and 3.
struct Query {
    u32 latents[TURNS][PART / 16][4];
    u32 rope[TURNS][4];
};

// In 16 fp8 codes, a lane multiplies the four values from 4 * (lane % 4) on, which are in one word. In 16 bfloat16
// values, it multiplies the two values from 2 * (lane % 4) on and the two values 8 further on. Any order is correct if
// both operands use it.
__device__ __forceinline__ void load_query(Query &query, const u16 *q, i64 head_stride, int heads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2, head = turn * 16 + later * 8 + lane / 4;
        const u16 *mine = q + head * head_stride;
        const bool there = head < heads;
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            u32 (&words)[4] = query.latents[turn][step];
            if (FP8) {
                const u16 *at = mine + warp * PART + step * 16 + 4 * (lane % 4);
                const uint2 values = there ? *reinterpret_cast<const uint2 *>(at) : uint2{0, 0};
                words[later] = values.x, words[later + 2] = values.y;
            } else {
                const u16 *at = mine + warp * PART + step * 16 + 2 * (lane % 4);
                words[later] = there ? *reinterpret_cast<const u32 *>(at) : 0;
                words[later + 2] = there ? *reinterpret_cast<const u32 *>(at + 8) : 0;
            }
        }
        const u16 *at = mine + RANK + warp * 16 + 2 * (lane % 4);
        query.rope[turn][later] = there ? *reinterpret_cast<const u32 *>(at) : 0;
        query.rope[turn][later + 2] = there ? *reinterpret_cast<const u32 *>(at + 8) : 0;
    }
}

// Divides the query of each head by a power of two such that its latents fit float16, and converts the latents. Writes
// `scale` times this power to `factors`, by which the scores of the head are multiplied. Contains a barrier.
__device__ __forceinline__ void quantise_query(Shared &shared, Query &query, float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2;
        float most = 0;
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            const u32 (&words)[4] = query.latents[turn][step];
            most = fmaxf(most, fmaxf(fabsf(low_of(words[later])), fabsf(high_of(words[later]))));
            most = fmaxf(most, fmaxf(fabsf(low_of(words[later + 2])), fabsf(high_of(words[later + 2]))));
        }
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
        if (lane % 4 == 0) shared.largest[warp][turn * 16 + later * 8 + lane / 4] = most;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2, head = turn * 16 + later * 8 + lane / 4;
        float most = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) most = fmaxf(most, shared.largest[other][head]);
        const float unit = unit_of(most), inverse = inverse_of(unit);
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            u32 (&words)[4] = query.latents[turn][step];
            words[later] = packed_half(low_of(words[later]) * inverse, high_of(words[later]) * inverse);
            words[later + 2] = packed_half(low_of(words[later + 2]) * inverse, high_of(words[later + 2]) * inverse);
        }
        u32 (&rope)[4] = query.rope[turn];
        rope[later] = packed_bfloat(low_of(rope[later]) * inverse, high_of(rope[later]) * inverse);
        rope[later + 2] = packed_bfloat(low_of(rope[later + 2]) * inverse, high_of(rope[later + 2]) * inverse);
        if (warp == 0 && lane % 4 == 0) shared.factors[head] = scale * unit;
    }
}

}  // namespace
