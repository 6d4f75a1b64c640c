// The shared memory of sparse_attention, and how rows are copied into it.
//
// Rows are kept in a ring of RING rows. A step processes KEYS of them while the AHEAD others are in flight. After a
// step, its rows are replaced by later ones. A copy group has eight rows, so a step waits only for its own rows.
#pragma once
#include "../matrix_units.cu"

namespace {

constexpr int WARPS = 4;
constexpr int RANK = 512, ROPE = 64, PART = RANK / WARPS;
constexpr int LATENT_BYTES = FP8 ? 1 : 2;
constexpr int PART_BYTES = PART * LATENT_BYTES;
constexpr int ROW_BYTES = FP8 ? RANK + 4 * WARPS + 2 * ROPE : 2 * (RANK + ROPE);
constexpr int SCALES_AT = RANK;
constexpr int ROPE_AT = ROW_BYTES - 2 * ROPE;
constexpr int PITCH = FP8 ? ROW_BYTES : ROW_BYTES + 16;  // an odd multiple of 16 bytes: eight rows use different banks
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int GROUP = 8;                      // rows per copy group
constexpr int ROWS_OF_GROUP = GROUP / WARPS;  // rows of a group that one warp copies
constexpr int ROWS_OF_WARP = KEYS / WARPS;    // rows that a warp copies per step
constexpr int AHEAD = RING - KEYS;
constexpr int PEEKED = 4;  // entries that a thread loads together
static_assert(RING % GROUP == 0 && KEYS % 32 == 0 && AHEAD >= KEYS, "a ring holds at least two steps, in whole groups");
static_assert(AHEAD / WARPS <= 32, "a lane holds the entry of one row that its warp copies before the first step");

struct Shared {
    alignas(16) u8 rows[RING][PITCH];                  // the ring
    alignas(16) float parts[WARPS][HEADS][KEYS + 8];  // the scores: the share of each warp
    alignas(16) u16 weights[HEADS][KEYS + 8];
    alignas(16) u16 ratios[WARPS][KEYS];  // scales divided by units, float16
    alignas(16) float levels[KEYS];       // log2 of the units; minus infinity for EMPTY
    alignas(16) float inverses[KEYS];     // 1 / unit; 0 for EMPTY
    int entries[RING];
    float shrinks[HEADS];
    float factors[HEADS];
    float largest[WARPS][HEADS];
    float most[HEADS];  // largest score + log2(unit), after the last step
    float mass[HEADS];
    int ends[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// The work of a block.
struct Place {
    int query;  // index in the batch
    int split;
    int head_first;
    int first, stop;  // entries [first, stop) of `row_ids`
};

__device__ __forceinline__ Place place_of(int k, unsigned heads, unsigned splits, int split_keys) {
    const unsigned head_blocks = (heads + HEADS - 1) / HEADS;
    Place place;
    place.split = static_cast<int>(blockIdx.x % splits);
    place.head_first = static_cast<int>(blockIdx.x / splits % head_blocks) * HEADS;
    place.query = static_cast<int>(blockIdx.x / splits / head_blocks);
    place.first = place.split * split_keys;
    place.stop = min(place.first + split_keys, k);
    return place;
}

__device__ __forceinline__ int wrapped(int at) { return at < RING ? at : at - RING; }

// The index of the nth row that this warp copies among the rows that all warps copy.
__device__ __forceinline__ int key_of(int n) {
    return n / ROWS_OF_GROUP * GROUP + threadIdx.x / 32 * ROWS_OF_GROUP + n % ROWS_OF_GROUP;
}

// Loads the entries of `count` rows that this warp copies, one per lane; EMPTY from `stop` on.
template <int count> __device__ __forceinline__ int load_entry(const i64 *row_ids, int start, int stop) {
    const int lane = threadIdx.x % 32, at = start + key_of(lane);
    return lane < count && at < stop ? static_cast<int>(row_ids[at]) : -1;
}

// Begins to copy the rows of these entries to the ring, starting at `at`. Copies zeros for EMPTY entries.
template <int count>
__device__ __forceinline__ void begin_rows(Shared &shared, int at, int entry, const u8 *rows, i64 row_stride) {
    const int lane = threadIdx.x % 32;
    if (lane < count) shared.entries[wrapped(at + key_of(lane))] = entry;
#pragma unroll 8  // not more: before the first step this runs once, and longer code takes longer to fetch
    for (int n = 0; n < count; ++n) {
        const int index = __shfl_sync(ALL, entry, n);
        const u8 *from = rows + static_cast<i64>(max(index, 0)) * row_stride + 16 * lane;
        u8 *to = shared.rows[wrapped(at + key_of(n))] + 16 * lane;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 32) {
            const bool in_row = chunk + 32 <= CHUNKS || chunk + lane < CHUNKS;
            if (in_row) begin_copy_16(to + 16 * chunk, from + 16 * chunk, index >= 0);
        }
        if (n % ROWS_OF_GROUP == ROWS_OF_GROUP - 1) close_copy_group();
    }
}

// Replaces begin_rows when no row is left, so that every step begins the same number of copy groups.
__device__ __forceinline__ void begin_nothing() {
#pragma unroll
    for (int n = 0; n < KEYS / GROUP; ++n) close_copy_group();
}

// Loads the entries from `start` on, PEEKED per thread and one block of threads apart, for `end_of`.
__device__ __forceinline__ void peek(int (&found)[PEEKED], const i64 *row_ids, int start, int stop) {
#pragma unroll
    for (int n = 0; n < PEEKED; ++n) {
        const int at = start + n * 32 * WARPS + threadIdx.x;
        found[n] = at < stop ? static_cast<int>(row_ids[at]) : -1;
    }
}

// Returns the end of the entries in [first, stop) without the trailing EMPTY ones. `found`: the result of `peek` from
// `first` on. Contains a barrier.
__device__ __forceinline__ int end_of(Shared &shared, int (&found)[PEEKED], const i64 *row_ids, int first, int stop) {
    int end = first;
#pragma unroll 1
    for (int start = first; start < stop; start += PEEKED * 32 * WARPS) {
        if (start > first) peek(found, row_ids, start, stop);
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

// Computes the units of the rows of a step, in the forms that scores and weights need.
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
