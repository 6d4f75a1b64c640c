// The products of sparse_attention for many heads: scores, weights, and weighted sums.
#pragma once
#include "many_heads_rows.cu"

namespace {

constexpr float MAX_LEAD = 8;  // weights do not exceed 2**MAX_LEAD

typedef float Sums[128];  // [64 heads, 256 latents], as `multiply_rows` holds them

// Loads the query and writes it to shared memory. Called by the consumers: each of the eight warps processes eight heads.
// With fp8 rows, the query of each head is divided by its unit, and its latents are rounded to float16.
__device__ __forceinline__ void prepare_query(Shared &shared, const u16 *q, i64 head_stride, int heads, float scale) {
    const int lane = threadIdx.x % 32, first_head = threadIdx.x / 32 * 8;
    uint4 latents[8][2], rope[2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u8 *at = reinterpret_cast<const u8 *>(q + (first_head + n) * head_stride) + 16 * (lane + 32 * half);
            latents[n][half] = load_16(at, first_head + n < heads);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int head = first_head + 4 * n + lane / 8;
        const u8 *at = reinterpret_cast<const u8 *>(q + head * head_stride + RANK) + 16 * (lane % 8);
        rope[n] = load_16(at, head < heads);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const int head = first_head + n;
        u32 words[8] = {latents[n][0].x, latents[n][0].y, latents[n][0].z, latents[n][0].w,
                        latents[n][1].x, latents[n][1].y, latents[n][1].z, latents[n][1].w};
        if (FP8) {
            float most = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(fabsf(low_of(words[i])), fabsf(high_of(words[i]))));
#pragma unroll
            for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
            const float unit = unit_of(most), inverse = inverse_of(unit);
#pragma unroll
            for (int i = 0; i < 8; ++i) words[i] = packed_half(low_of(words[i]) * inverse, high_of(words[i]) * inverse);
            if (lane == 0) shared.factors[head] = unit;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int chunk = lane + 32 * half;
            *reinterpret_cast<uint4 *>(shared.query[chunk / 8] + place_in_block(head, chunk % 8)) = {
                words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]};
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int head = first_head + 4 * n + lane / 8;
        uint4 words = rope[n];
        if (FP8) {
            const u32 inverse = __float_as_uint(inverse_of(shared.factors[head])), both = inverse | inverse >> 16;
            words = {multiply_bfloats(words.x, both), multiply_bfloats(words.y, both), multiply_bfloats(words.z, both),
                     multiply_bfloats(words.w, both)};
        }
        *reinterpret_cast<uint4 *>(shared.query[ROPE_BLOCK] + place_in_block(head, lane % 8)) = words;
    }
    __syncwarp();
    if (lane < 8) shared.factors[first_head + lane] = FP8 ? shared.factors[first_head + lane] * scale : scale;
    publish_to_tensor_cores();
}

// Multiplies the sums of the thread's two heads, unless no sum of the warp changes.
__device__ __forceinline__ void shrink_sums(Sums &sums, float first, float second) {
    if (__all_sync(ALL, first == 1 && second == 1)) return;  // usual once every head has seen its largest score
#pragma unroll
    for (int n = 0; n < 128; ++n) sums[n] *= n % 4 < 2 ? first : second;
}

// The running totals of the thread's two heads: `most` is near the largest score + log2(unit) so far, and `mass` is the sum
// of 2**(score - most) over the keys of this thread.
struct Totals {
    float most[2], mass[2];
};

// The keys of a tile whose scores this thread holds: 8 * n + 2 * (lane % 4) + {0, 1}.
__device__ __forceinline__ float4 key_scales_of(const KeyScale (&key_scales)[KEYS], int n, int lane) {
    return *reinterpret_cast<const float4 *>(&key_scales[8 * n + 2 * (lane % 4)]);
}

// Replaces the scores of a tile by weights, multiplied by the units of their keys. Sets `shrinks` to the factors
// by which earlier sums must be multiplied. They are 1 as long as no weight exceeds 2**MAX_LEAD, so that sums
// seldom have to be multiplied.
__device__ __forceinline__ void weigh(float (&scores)[32], const KeyScale (&key_scales)[KEYS], int lane,
                                      const float (&factors)[2], Totals &totals, float (&shrinks)[2]) {
    float units[16], largest[2] = {LOWEST_SCORE, LOWEST_SCORE}, new_most[2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float4 both = key_scales_of(key_scales, n, lane);
        units[2 * n] = both.x, units[2 * n + 1] = both.z;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float &score = scores[4 * n + i];
            const float factor = FP8 ? factors[i / 2] * units[2 * n + i % 2] : factors[i / 2];
            score = score * factor + (i % 2 ? both.w : both.y);
            largest[i / 2] = fmaxf(largest[i / 2], score);
        }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const float others[2] = {__shfl_xor_sync(ALL, largest[0], step), __shfl_xor_sync(ALL, largest[1], step)};
        largest[0] = fmaxf(largest[0], others[0]), largest[1] = fmaxf(largest[1], others[1]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float most = totals.most[row];
        new_most[row] = largest[row] <= most + MAX_LEAD ? most : largest[row];
        shrinks[row] = power_of_2(most - new_most[row]);
        totals.most[row] = new_most[row], totals.mass[row] *= shrinks[row];
    }
#pragma unroll
    for (int n = 0; n < 32; ++n) {
        scores[n] = power_of_2(scores[n] - new_most[n % 4 / 2]);
        totals.mass[n % 4 / 2] += FP8 ? scores[n] * inverse_of(units[n / 4 * 2 + n % 2]) : scores[n];
    }
}

// The bytes of shared memory in which a warp collects the sums of its 16 heads, on their way to global memory. Rows are
// longer than necessary, so that lanes that write at the same time write to different banks.
template <class T> constexpr int STAGE_ROW = (RANK / 2 + 8) * sizeof(T);
constexpr int STAGE = 16 * STAGE_ROW<float>;
static_assert(CONSUMERS / 32 * STAGE <= sizeof(Shared::query) + sizeof(Shared::tiles), "");

// Writes sums * factor for the 16 heads of this warp, of which `heads` exist, to `out`, which begins at the first latent of
// the sums.
template <class T>
__device__ __forceinline__ void store_sums(u8 *stage, const Sums &sums, const float (&factors)[2], T *out, int heads) {
    constexpr int ROW_STRIDE = STAGE_ROW<T>;
    const int lane = threadIdx.x % 32;
    u8 *const mine = stage + lane / 4 * ROW_STRIDE + lane % 4 * 2 * sizeof(T);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 32; ++n) {
            T *const to = reinterpret_cast<T *>(mine + half * 8 * ROW_STRIDE + n * 8 * sizeof(T));
            store(to, sums[4 * n + 2 * half] * factors[half], sums[4 * n + 2 * half + 1] * factors[half]);
        }
    }
    publish_to_tensor_cores();  // and to bulk copies
    __syncwarp();
    if (lane < min(heads, 16)) begin_store(out + lane * RANK, stage + lane * ROW_STRIDE, RANK / 2 * sizeof(T));
    end_stores();
}
// Writes the results of half the latents (`half`: 0 for the left half) to `out`, as passed to the kernel. Overwrites query
// and tiles, so all products must have ended. (Without tiles, copies of zeros may still be arriving. But then all sums are
// 0, too.)
__device__ __forceinline__ void store_result(Shared &shared, const Sums &sums, const float (&factors)[2], void *out,
                                             const Sizes &sizes, int half, bool filled) {
    const Place place = place_of(sizes);
    const int warp = threadIdx.x / 32, head = place.head_first + warp % 4 * 16;
    const i64 at = ((place.query * sizes.splits + place.split) * sizes.heads + head) * RANK + half * RANK / 2;
    u8 *const stage = shared.query[0] + warp * STAGE;
    if (sizes.splits == 1) {
        store_sums(stage, sums, factors, static_cast<u16 *>(out) + at, sizes.heads - head);
    } else if (filled) {  // the merge does not read the sums of an empty split
        store_sums(stage, sums, factors, static_cast<float *>(out) + at, sizes.heads - head);
    }
}

// Begins to compute the scores of a tile. What other threads have written to the tile is published here and not by them,
// because they would wait for the rows that they are loading.
__device__ __forceinline__ void begin_scores(Shared &shared, int tile, float (&scores)[32]) {
    const int buffer = tile % 2, round = tile / 2 % 2;
    const u64 query = description_of(shared.query), keys = description_of(shared.tiles[buffer]);
    wait_for_round(&shared.left_filled[buffer], round);
    publish_to_tensor_cores();
    begin_products();
#pragma unroll
    for (int step = 0; step < 16; ++step) multiply_columns<FP8>(scores, query, keys, step, step == 0);
    wait_for_round(&shared.right_filled[buffer], round);
    publish_to_tensor_cores();
#pragma unroll
    for (int step = 16; step < 32; ++step) multiply_columns<FP8>(scores, query, keys, step, false);
#pragma unroll
    for (int step = 32; step < 36; ++step) multiply_columns<false>(scores, query, keys, step, false);
    close_product_batch();
}

// Computes the weights of a tile from its scores, writes them for the other warpgroup, and begins to add the left half of
// its latents to `sums`.
__device__ __forceinline__ void begin_sums(Shared &shared, int tile, int lane, float (&scores)[32],
                                           const float (&factors)[2], Totals &totals, Sums &sums) {
    const int buffer = tile % 2, row = threadIdx.x / 32 * 16 + lane / 4;
    u8 (&blocks)[BLOCKS][BLOCK] = shared.tiles[buffer];
    float shrinks[2];
    weigh(scores, shared.key_scales[buffer], lane, factors, totals, shrinks);
    // This lane passes the addresses of row `lane % 8` of matrix `lane / 8`, which has rows [0, 8) or [8, 16) of the warp
    // and keys [0, 8) or [8, 16) of a step.
    const int place = kept(place_in_block(threadIdx.x / 32 * 16 + lane % 16, lane / 16));
    u32 weights[16];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        weights[n] = FP8 ? packed_half(scores[2 * n], scores[2 * n + 1]) : packed_bfloat(scores[2 * n], scores[2 * n + 1]);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const u32 *four = weights + 4 * step;
        store_matrices(blocks[ROPE_BLOCK] + (place ^ 32 * step), four[0], four[1], four[2], four[3]);
    }
    if (lane % 4 == 0) shared.shrinks[buffer][row] = shrinks[0], shared.shrinks[buffer][row + 8] = shrinks[1];
    publish_to_tensor_cores();
    arrive_as_warp(&shared.weighed[buffer], lane);
    shrink_sums(sums, shrinks[0], shrinks[1]);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const u32 *four = weights + 4 * step;
        multiply_rows<FP8>(sums, four[0], four[1], four[2], four[3], description_of(blocks), step);
    }
    close_product_batch();
}

// Computes the scores and weights of all tiles, and the sums of the left half of the latents.
__device__ __forceinline__ void attend_left(Shared &shared, const Sizes &sizes, void *out, float *lse) {
    const int tiles = wait_for_tiles(shared);
    const int lane = kept(threadIdx.x % 32), row = threadIdx.x / 32 * 16 + lane / 4;
    const float factors[2] = {shared.factors[row], shared.factors[row + 8]};
    Sums sums = {};
    Totals totals = {{LOWEST_SCORE, LOWEST_SCORE}, {0, 0}};
    float scores[32] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        begin_scores(shared, tile, scores);
        wait_for_products<0>();
        pin(scores);
        begin_sums(shared, tile, lane, scores, factors, totals, sums);
        wait_for_products<0>();
        pin(sums);
        arrive_as_warp(&shared.left_free[tile % 2], lane);
    }
    const Place place = place_of(sizes);
    float inverses[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float mass = totals.mass[n];
        mass += __shfl_xor_sync(ALL, mass, 1);
        mass += __shfl_xor_sync(ALL, mass, 2);
        inverses[n] = 1 / fmaxf(mass, MIN_DIVISOR);
        const int head = row + 8 * n;
        if (lane % 4 == 0) shared.inverse_mass[head] = inverses[n];
        if (lane % 4 == 0 && sizes.splits > 1 && place.head_first + head < sizes.heads) {
            const i64 part = (place.query * sizes.splits + place.split) * sizes.heads + place.head_first;
            lse[part + head] = tiles > 0 ? totals.most[n] + log2f(mass) : minus_infinity();
        }
    }
    wait_for_first(CONSUMERS);
    store_result(shared, sums, inverses, out, sizes, 0, tiles > 0);
}

// Computes the sums of the right half of the latents.
__device__ __forceinline__ void attend_right(Shared &shared, const Sizes &sizes, void *out) {
    const int tiles = wait_for_tiles(shared);
    const int lane = kept(threadIdx.x % 32), row = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
    Sums sums = {};
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2, round = tile / 2 % 2;
        const u64 weights = description_of(shared.tiles[buffer][ROPE_BLOCK]);
        const u64 latents = description_of(shared.tiles[buffer][HALF_BLOCKS]);
        wait_for_round(&shared.weighed[buffer], round);
        publish_to_tensor_cores();  // the tile, whose right half the other warpgroup has waited for, and the weights
        shrink_sums(sums, shared.shrinks[buffer][row], shared.shrinks[buffer][row + 8]);
        begin_products();
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_rows<FP8>(sums, weights, latents, step);
        close_product_batch();
        wait_for_products<0>();
        pin(sums);
        arrive_as_warp(&shared.right_free[buffer], lane);
    }
    wait_for_first(CONSUMERS);
    const float inverses[2] = {shared.inverse_mass[row], shared.inverse_mass[row + 8]};
    store_result(shared, sums, inverses, out, sizes, 1, tiles > 0);
}

}  // namespace
