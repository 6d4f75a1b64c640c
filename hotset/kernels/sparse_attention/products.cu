// The products of one step of sparse_attention: scores, weights, and weighted sums.
#pragma once
#include "query.cu"

namespace {

constexpr int HEADS_OF_WARP = HEADS / WARPS;  // heads whose weights a warp computes
constexpr int LANES_OF_HEAD = 32 / HEADS_OF_WARP;
constexpr int QUADS = KEYS / LANES_OF_HEAD / 4;  // groups of four keys per lane
constexpr int EIGHTS = 4 / TURNS;  // groups of eight keys scored together: four products in a row are independent

// Computes the warp's share of the scores of 8 * EIGHTS keys, starting at `key` of the step.
__device__ __forceinline__ void score(Shared &shared, int at, int key, const Query &query) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int places[EIGHTS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) places[eight] = wrapped(at + key + 8 * eight);
    float sums[EIGHTS][TURNS][4] = {};
#pragma unroll
    for (int start = 0; start < PART_BYTES; start += 64) {
        u32 keys[EIGHTS][4];
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const u8 *from = shared.rows[places[eight] + lane % 8] + warp * PART_BYTES + start;
            load_matrices(keys[eight], from + lane / 8 * 16);
        }
#pragma unroll
        for (int n = 0; n < (FP8 ? 4 : 2); ++n) {
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                u32 b0 = keys[eight][2 * n % 4], b1 = keys[eight][(2 * n + 1) % 4];
                if (FP8) decode(keys[eight][n], b0, b1);
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    multiply<FP8>(sums[eight][turn], query.latents[turn][start / (16 * LATENT_BYTES) + n], b0, b1);
                }
            }
        }
    }
#pragma unroll
    for (int eight = 0; FP8 && eight < EIGHTS; ++eight) {
        const u8 *scales = shared.rows[places[eight] + 2 * (lane % 4)] + SCALES_AT + 4 * warp;
        const float first = *reinterpret_cast<const float *>(scales);
        const float second = *reinterpret_cast<const float *>(scales + PITCH);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[eight][turn][i] *= i % 2 ? second : first;
        }
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += 2) {
        const int place = lane < 16 ? places[eight] : places[eight + 1];
        u32 words[4];
        load_matrices(words, shared.rows[place + lane % 8] + ROPE_AT + warp * 32 + lane / 8 % 2 * 16);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            multiply<false>(sums[eight][turn], query.rope[turn], words[0], words[1]);
            multiply<false>(sums[eight + 1][turn], query.rope[turn], words[2], words[3]);
        }
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const float (&mine)[4] = sums[eight][turn];
            const int head = turn * 16 + lane / 4, to = key + eight * 8 + 2 * (lane % 4);
            *reinterpret_cast<float2 *>(&shared.parts[warp][head][to]) = float2{mine[0], mine[1]};
            *reinterpret_cast<float2 *>(&shared.parts[warp][head + 8][to]) = float2{mine[2], mine[3]};
        }
    }
}

// Adds up the shares of the scores and computes the weights. LANES_OF_HEAD lanes belong to each head. `most` is the
// largest score + log2(unit) of the head so far, `mass` the sum of 2**(score - most) over the keys of this lane.
__device__ __forceinline__ void weigh(Shared &shared, float factor, float &most, float &mass) {
    const int lane = threadIdx.x % 32, mine = lane % LANES_OF_HEAD;
    const int head = threadIdx.x / 32 * HEADS_OF_WARP + lane / LANES_OF_HEAD;
    float scores[QUADS][4], new_most = most;
    int keys[QUADS];
#pragma unroll
    for (int n = 0; n < QUADS; ++n) {
        // Heads that are read together use different banks.
        keys[n] = 4 * (QUADS == 2 ? 2 * mine + (n ^ (head & 1)) : n * LANES_OF_HEAD + mine);
        float4 sum = *reinterpret_cast<const float4 *>(&shared.parts[0][head][keys[n]]);
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) {
            const float4 more = *reinterpret_cast<const float4 *>(&shared.parts[warp][head][keys[n]]);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        const float4 level = *reinterpret_cast<const float4 *>(&shared.levels[keys[n]]);
        scores[n][0] = sum.x * factor + level.x, scores[n][1] = sum.y * factor + level.y;
        scores[n][2] = sum.z * factor + level.z, scores[n][3] = sum.w * factor + level.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) new_most = fmaxf(new_most, scores[n][i]);
    }
#pragma unroll
    for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) {
        new_most = fmaxf(new_most, __shfl_xor_sync(ALL, new_most, step));
    }
    const float shrink = power_of_2(most - new_most);
    most = new_most, mass *= shrink;
    if (mine == 0) shared.shrinks[head] = shrink;
#pragma unroll
    for (int n = 0; n < QUADS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = power_of_2(scores[n][i] - new_most);
        const float4 inverse = *reinterpret_cast<const float4 *>(&shared.inverses[keys[n]]);
        mass += scores[n][0] * inverse.x + scores[n][1] * inverse.y + scores[n][2] * inverse.z + scores[n][3] * inverse.w;
        const uint2 packed = FP8 ? uint2{packed_half(scores[n][0], scores[n][1]), packed_half(scores[n][2], scores[n][3])}
                                 : uint2{packed_bfloat(scores[n][0], scores[n][1]),
                                         packed_bfloat(scores[n][2], scores[n][3])};
        *reinterpret_cast<uint2 *>(&shared.weights[head][keys[n]]) = packed;
    }
}

// Sums over keys of weight * latent, for the 128 latents of the warp. Of each four, the first two belong to head
// 16 * turn + lane / 4, the last two to this head + 8. In fp8, element 2n has the latents
// 16n + 4 * (lane % 4) + {0, 2}, and element 2n + 1 has 16n + 4 * (lane % 4) + {1, 3}. Otherwise element n has the
// latents 8n + 2 * (lane % 4) + {0, 1}.
typedef float Sums[TURNS][PART / 8][4];

__device__ __forceinline__ void shrink_sums(const Shared &shared, Sums &sums) {
    const int lane = threadIdx.x % 32;
    float shrinks[TURNS][2];
    bool all_one = true;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        shrinks[n / 2][n % 2] = shared.shrinks[n * 8 + lane / 4];
        all_one &= shrinks[n / 2][n % 2] == 1;
    }
    if (__all_sync(ALL, all_one)) return;  // usual once every head has seen its largest score
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int n = 0; n < PART / 8; ++n) {
            sums[turn][n][0] *= shrinks[turn][0], sums[turn][n][1] *= shrinks[turn][0];
            sums[turn][n][2] *= shrinks[turn][1], sums[turn][n][3] *= shrinks[turn][1];
        }
    }
}

// Adds the weighted latents of 16 keys, starting at `key` of the step.
__device__ __forceinline__ void add_keys(const Shared &shared, int at, int key, Sums &sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 weights[TURNS][4];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        load_matrices(weights[turn], &shared.weights[turn * 16 + lane % 16][key + lane / 16 * 8]);
        if (FP8) {
            const u16 *ratios = &shared.ratios[warp][key + 2 * (lane % 4)];
            const u32 first = *reinterpret_cast<const u32 *>(ratios), second = *reinterpret_cast<const u32 *>(ratios + 8);
#pragma unroll
            for (int n = 0; n < 4; ++n) weights[turn][n] = multiply_halves(weights[turn][n], n < 2 ? first : second);
        }
    }
    const int place = wrapped(at + key + lane % 16 / 8 * 8) + lane % 8;
    const u8 *from = shared.rows[place] + warp * PART_BYTES + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < PART / (FP8 ? 32 : 16); ++n) {
        u32 words[4];
        load_matrices_transposed(words, from + 32 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b0 = words[2 * half], b1 = words[2 * half + 1];
            if (FP8) {
                // A word holds two codes of one key, then two of the next key. The product needs the codes that both
                // keys have for one latent next to each other.
                u32 even0, odd0, even1, odd1;
                decode(__byte_perm(b0, 0, 0x3120), even0, odd0);
                decode(__byte_perm(b1, 0, 0x3120), even1, odd1);
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    multiply<true>(sums[turn][4 * n + 2 * half], weights[turn], even0, even1);
                    multiply<true>(sums[turn][4 * n + 2 * half + 1], weights[turn], odd0, odd1);
                }
            } else {
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) multiply<false>(sums[turn][2 * n + half], weights[turn], b0, b1);
            }
        }
    }
}

}  // namespace
