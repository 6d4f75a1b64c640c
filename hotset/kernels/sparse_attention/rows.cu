// Rows of sparse_attention on their way to a block: what it holds in shared memory, and how rows get there.
//
// Rows lie in a ring of RING rows. A step works on KEYS of them, while the AHEAD others come: as soon as a step is done
// its place is filled again, eight rows to a group of copies, so that a step never waits for more than its own rows.
#pragma once
#include "instructions.cu"

namespace {

constexpr int WARPS = 4;
constexpr int RANK = 512, ROPE = 64, PART = RANK / WARPS;
constexpr int LATENT_BYTES = FP8 ? 1 : 2;
constexpr int PART_BYTES = PART * LATENT_BYTES;
constexpr int ROW_BYTES = FP8 ? RANK + 4 * WARPS + 2 * ROPE : 2 * (RANK + ROPE);
constexpr int SCALES_AT = RANK;
constexpr int ROPE_AT = ROW_BYTES - 2 * ROPE;
constexpr int PITCH = FP8 ? ROW_BYTES : ROW_BYTES + 16;  // an odd number of 16 bytes: eight rows meet in no bank
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int GROUP = 8;                      // rows whose copies are waited for together
constexpr int ROWS_OF_GROUP = GROUP / WARPS;  // that a warp copies
constexpr int ROWS_OF_WARP = KEYS / WARPS;    // of a step
constexpr int AHEAD = RING - KEYS;
constexpr int PEEKED = 4;  // entries that a thread looks at together
static_assert(RING % GROUP == 0 && KEYS % 32 == 0 && AHEAD >= KEYS, "a ring holds two steps, in whole groups");
static_assert(AHEAD / WARPS <= 32, "a lane asks for the entry of one row that its warp copies before the first step");

struct Shared {
    alignas(16) u8 rows[RING][PITCH];                  // the ring
    alignas(16) float parts[WARPS][HEADS][KEYS + 8];  // scores: the share of each warp
    alignas(16) u16 weights[HEADS][KEYS + 8];
    alignas(16) u16 ratios[WARPS][KEYS];  // scales over units, float16
    alignas(16) float levels[KEYS];       // log2 of the units; minus infinity where there is no row
    alignas(16) float inverses[KEYS];     // 1 / unit, or 0
    int entries[RING];
    float shrinks[HEADS];
    float factors[HEADS];
    float largest[WARPS][HEADS];
    float most[HEADS];  // of the scores, when all are known
    float mass[HEADS];
    int ends[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree");

// What a block works on.
struct Place {
    int row;  // of the queries
    int split;
    int head_first;
    int first, stop;  // entries
};

__device__ __forceinline__ Place place_of(int k, unsigned heads, unsigned splits, int split_keys) {
    const unsigned head_blocks = (heads + HEADS - 1) / HEADS;
    Place place;
    place.split = static_cast<int>(blockIdx.x % splits);
    place.head_first = static_cast<int>(blockIdx.x / splits % head_blocks) * HEADS;
    place.row = static_cast<int>(blockIdx.x / splits / head_blocks);
    place.first = place.split * split_keys;
    place.stop = min(place.first + split_keys, k);
    return place;
}

__device__ __forceinline__ int wrapped(int at) { return at < RING ? at : at - RING; }

// Of the rows that this warp copies, the nth, counted from the first of a step.
__device__ __forceinline__ int key_of(int n) {
    return n / ROWS_OF_GROUP * GROUP + threadIdx.x / 32 * ROWS_OF_GROUP + n % ROWS_OF_GROUP;
}

// The entries of `count` rows that this warp copies, one in each of the first lanes; EMPTY from `stop` on.
template <int count> __device__ __forceinline__ int load_entry(const i64 *chosen, int start, int stop) {
    const int lane = threadIdx.x % 32, at = start + key_of(lane);
    return lane < count && at < stop ? static_cast<int>(chosen[at]) : -1;
}

// Begins to copy them to the ring from `at` on.
template <int count>
__device__ __forceinline__ void begin_rows(Shared &shared, int at, int entry, const u8 *rows, i64 row_stride) {
    const int lane = threadIdx.x % 32;
    if (lane < count) shared.entries[wrapped(at + key_of(lane))] = entry;
#pragma unroll 8  // and no more: code that is run once is read from memory, too
    for (int n = 0; n < count; ++n) {
        const int index = __shfl_sync(ALL, entry, n);
        const u8 *from = rows + static_cast<i64>(max(index, 0)) * row_stride + 16 * lane;
        u8 *to = shared.rows[wrapped(at + key_of(n))] + 16 * lane;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 32) {
            const bool in_row = chunk + 32 <= CHUNKS || chunk + lane < CHUNKS;
            if (in_row) copy_unit(to + 16 * chunk, from + 16 * chunk, index >= 0);
        }
        if (n % ROWS_OF_GROUP == ROWS_OF_GROUP - 1) end_copies();
    }
}

// In place of begin_rows for a step, where no row is left: the groups are counted.
__device__ __forceinline__ void begin_nothing() {
#pragma unroll
    for (int n = 0; n < KEYS / GROUP; ++n) end_copies();
}

// Entries `start` and on, of which every thread takes PEEKED, a block apart: asked for here, looked at in end_of.
__device__ __forceinline__ void peek(int (&found)[PEEKED], const i64 *chosen, int start, int stop) {
#pragma unroll
    for (int n = 0; n < PEEKED; ++n) {
        const int at = start + n * 32 * WARPS + threadIdx.x;
        found[n] = at < stop ? static_cast<int>(chosen[at]) : -1;
    }
}

// Where the entries end that are not all EMPTY up to `stop`; `found` are the first. Contains a barrier.
__device__ __forceinline__ int end_of(Shared &shared, int (&found)[PEEKED], const i64 *chosen, int first, int stop) {
    int end = first;
#pragma unroll 1
    for (int start = first; start < stop; start += PEEKED * 32 * WARPS) {
        if (start > first) peek(found, chosen, start, stop);
#pragma unroll
        for (int n = 0; n < PEEKED; ++n) {
            if (found[n] >= 0) end = start + n * 32 * WARPS + threadIdx.x + 1;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) end = max(end, __shfl_xor_sync(ALL, end, step));
    if (threadIdx.x % 32 == 0) shared.ends[threadIdx.x / 32] = end;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) end = max(end, shared.ends[warp]);
    return end;
}

// Units of the rows of a step, as they enter scores and weights.
__device__ __forceinline__ void note_rows(Shared &shared, int at) {
    const int lane = threadIdx.x % 32;
    if (lane >= ROWS_OF_WARP) return;
    const int key = threadIdx.x / 32 * ROWS_OF_WARP + lane, place = wrapped(at + key);
    const bool there = shared.entries[place] >= 0;
    float unit = 1;
    if (FP8) {
        const float4 scales = *reinterpret_cast<const float4 *>(shared.rows[place] + SCALES_AT);
        unit = unit_of(fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w)));
        const float inverse = inverse_of(unit);
        const u32 first = packed_half(scales.x * inverse, scales.y * inverse);
        const u32 second = packed_half(scales.z * inverse, scales.w * inverse);
        shared.ratios[0][key] = static_cast<u16>(first), shared.ratios[1][key] = static_cast<u16>(first >> 16);
        shared.ratios[2][key] = static_cast<u16>(second), shared.ratios[3][key] = static_cast<u16>(second >> 16);
    }
    shared.levels[key] = there ? level_of(unit) : minus_infinity();
    shared.inverses[key] = there ? inverse_of(unit) : 0;
}

}  // namespace
