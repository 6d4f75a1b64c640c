// The shared memory of sparse_attention for many heads, and how a warpgroup fills it with tiles of rows.
#pragma once
#include "../warpgroup.cu"

namespace {

constexpr int HEADS = 64, KEYS = 64;  // of a block, of a tile
constexpr int RANK = 512, ROPE = 64;
constexpr int WARPGROUP = 128;  // threads
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr int BLOCK = 64 * 128;                           // bytes of 64 rows of 64 values
constexpr int HALF_BLOCKS = RANK / 128, BLOCKS = RANK / 64 + 1;  // the last block has the rope values
constexpr int ROPE_BLOCK = BLOCKS - 1;
constexpr int SCALES_AT = RANK, ROPE_AT = FP8 ? RANK + 16 : 2 * RANK;  // bytes from the beginning of a row

// A unit of 1 and a level of minus infinity mark an EMPTY entry.
struct KeyScale {
    float unit;
    float level;  // log2 of the unit
};

struct Shared {
    alignas(1024) u8 query[BLOCKS][BLOCK];
    // In the last block of a tile, the weights of its keys replace the rope values once scores are computed.
    alignas(1024) u8 tiles[2][BLOCKS][BLOCK];
    alignas(16) KeyScale key_scales[2][KEYS];
    float factors[HEADS];     // of scores
    float shrinks[2][HEADS];  // factors of the earlier sums
    float inverse_mass[HEADS];
    // The left half of a tile has the first 256 latents, the right half the other latents and the rope values.
    u64 left_filled[2], right_filled[2], left_free[2], right_free[2], weighed[2];
    int ends[CONSUMERS / 32];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

struct Sizes {
    int k, heads, splits, split_keys;
};
// The work of a block. Warpgroups compute it when they need it, because registers are scarce.
struct Place {
    i64 query;  // index in the batch
    int split;
    int head_first;
    int first, stop;  // entries [first, stop) of `row_ids`
};

__device__ __forceinline__ Place place_of(const Sizes &sizes) {
    const int block = kept(blockIdx.x), head_blocks = (sizes.heads + HEADS - 1) / HEADS;
    Place place;
    place.split = block % sizes.splits;
    place.head_first = block / sizes.splits % head_blocks * HEADS;
    place.query = block / sizes.splits / head_blocks;
    place.first = place.split * sizes.split_keys;
    place.stop = min(place.first + sizes.split_keys, sizes.k);
    return place;
}

__device__ __forceinline__ void prepare_barriers(Shared &shared) {
    if (threadIdx.x > 0) return;
    for (int n = 0; n < 2; ++n) {  // with one arrival per warp of a warpgroup
        prepare_barrier(&shared.left_filled[n], 4);
        prepare_barrier(&shared.right_filled[n], 4);
        prepare_barrier(&shared.left_free[n], 4);
        prepare_barrier(&shared.right_free[n], 4);
        prepare_barrier(&shared.weighed[n], 4);
    }
}

__device__ __forceinline__ int load_entry(const i64 *row_ids, int at, int stop) {
    return at < stop ? static_cast<int>(row_ids[at]) : -1;
}

// The first entries that a consumer inspects. They are loaded before the query, so that both arrive together.
constexpr int ENTRIES_AHEAD = 8;
__device__ __forceinline__ void load_entries(int (&entries)[ENTRIES_AHEAD], const i64 *row_ids, int first, int stop) {
#pragma unroll
    for (int n = 0; n < ENTRIES_AHEAD; ++n) {
        const int at = first + n * CONSUMERS + threadIdx.x;
        entries[n] = at < stop ? load_now(row_ids + at) : -1;
    }
}
// Finds how many entries are in [first, stop) up to the last one that is not EMPTY, for `wait_for_tiles`. Called by the
// consumers.
__device__ __forceinline__ void find_end(Shared &shared, const int (&entries)[ENTRIES_AHEAD], const i64 *row_ids, int first,
                                         int stop) {
    int end = 0;
#pragma unroll
    for (int n = 0; n < ENTRIES_AHEAD; ++n) {
        if (entries[n] >= 0) end = n * CONSUMERS + threadIdx.x + 1;
    }
#pragma unroll 1
    for (int at = first + ENTRIES_AHEAD * CONSUMERS + threadIdx.x; at < stop; at += CONSUMERS) {
        if (row_ids[at] >= 0) end = at + 1 - first;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) end = max(end, __shfl_xor_sync(ALL, end, step));
    if (threadIdx.x % 32 == 0) shared.ends[threadIdx.x / 32] = end;
}
// Waits for all threads of the block. Returns the number of tiles up to the end that `find_end` found.
__device__ __forceinline__ int wait_for_tiles(const Shared &shared) {
    __syncthreads();
    int end = 0;
#pragma unroll
    for (int warp = 0; warp < CONSUMERS / 32; ++warp) end = max(end, shared.ends[warp]);
    return (end + KEYS - 1) / KEYS;
}

#if FP8
// The rows of a tile that a thread loads: rows `lane / 4` and `lane / 4 + 8` of the 16 of its warp, and of each block of
// 64 latents the 16 at 16 * (lane % 4).
struct Loaded {
    uint4 codes[2][RANK / 64];
    uint4 rope[2][2];  // 16 bytes at 16 * (lane % 4), and those 64 bytes later
    uint4 scales[2];
};

__device__ __forceinline__ void load_codes(Loaded &loaded, int row, int block, const u8 *at, bool there) {
    loaded.codes[row][block] = load_16(at + 64 * block, there);
}
__device__ __forceinline__ void load_rope(Loaded &loaded, int row, const u8 *at, bool there) {
#pragma unroll
    for (int n = 0; n < 2; ++n) loaded.rope[row][n] = load_16(at + ROPE_AT + 64 * n, there);
}

// Returns the scale of a row, and sets `ratios` to the scales of its four parts divided by the unit, each as two equal
// float16.
__device__ __forceinline__ KeyScale key_scale_of(const uint4 &scales, bool there, u32 (&ratios)[4]) {
    const float parts[4] = {__uint_as_float(scales.x), __uint_as_float(scales.y), __uint_as_float(scales.z),
                            __uint_as_float(scales.w)};
    const float unit = unit_of(fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3])));
    const float inverse = inverse_of(unit);
#pragma unroll
    for (int n = 0; n < 4; ++n) ratios[n] = packed_half(parts[n] * inverse, parts[n] * inverse);
    return there ? KeyScale{unit, level_of(unit)} : KeyScale{1, minus_infinity()};
}

// Converts 16 codes to float16, multiplies them by `ratio` (two equal float16), and writes eight to each address.
__device__ __forceinline__ void store_codes(u8 *first, u8 *second, const uint4 &codes, u32 ratio) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 values[8];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        decode(words[n], values[2 * n], values[2 * n + 1]);
        values[2 * n] = multiply_halves(values[2 * n], ratio);
        values[2 * n + 1] = multiply_halves(values[2 * n + 1], ratio);
    }
    *reinterpret_cast<uint4 *>(first) = {values[0], values[1], values[2], values[3]};
    *reinterpret_cast<uint4 *>(second) = {values[4], values[5], values[6], values[7]};
}
// Multiplies eight bfloat16 by `factor` (two equal bfloat16) and writes them.
__device__ __forceinline__ void store_rope(u8 *to, const uint4 &rope, u32 factor) {
    *reinterpret_cast<uint4 *>(to) = {multiply_bfloats(rope.x, factor), multiply_bfloats(rope.y, factor),
                                      multiply_bfloats(rope.z, factor), multiply_bfloats(rope.w, factor)};
}

// Fills the tiles. While the loaded rows of a tile are converted, those of the next tile replace them in registers. Entries
// are loaded three tiles ahead, one by each of 16 lanes: a load completes only after the loads of rows before it.
__device__ __forceinline__ void fill_tiles(Shared &shared, const u8 *rows, i64 row_stride, const i64 *row_ids, int first,
                                           int stop) {
    const int lane = kept(threadIdx.x % 32), first_key = (threadIdx.x - CONSUMERS) / 32 * 16, key = first_key + lane / 4;
    // Places in a block of what this thread writes. Those of its second row are 8 rows later.
    const int even = place_in_block(key, lane % 4 * 2), odd = even ^ 16, rope_at = place_in_block(key, lane % 4);
    int at = first + first_key + lane % 16;  // of the entry that this lane loads
    int entry = load_entry(row_ids, at, stop), next_entry = load_entry(row_ids, at + KEYS, stop);
    int later_entry = load_entry(row_ids, at + 2 * KEYS, stop);
    Loaded loaded;
    bool there[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int chosen = __shfl_sync(ALL, entry, lane / 4 + 8 * row);
        const u8 *from = rows + static_cast<i64>(chosen) * row_stride;
        there[row] = chosen >= 0;
        loaded.scales[row] = load_16(from + SCALES_AT, there[row]);
        from += lane % 4 * 16;
#pragma unroll
        for (int block = 0; block < RANK / 64; ++block) load_codes(loaded, row, block, from, there[row]);
        load_rope(loaded, row, from, there[row]);
    }
    const int tiles = wait_for_tiles(shared);
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2, round = tile / 2 % 2;
        u8 *const blocks = shared.tiles[buffer][0];
        u32 ratios[2][4], inverses[2];
        wait_for_round(&shared.left_free[buffer], round ^ 1);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const KeyScale scale = key_scale_of(loaded.scales[row], there[row], ratios[row]);
            if (lane % 4 == 0) shared.key_scales[buffer][key + 8 * row] = scale;
            inverses[row] = __float_as_uint(inverse_of(scale.unit));
        }
        entry = next_entry, next_entry = later_entry;
        at += KEYS;
        later_entry = load_entry(row_ids, at + 2 * KEYS, stop);
        const u8 *next[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int chosen = __shfl_sync(ALL, entry, lane / 4 + 8 * row);
            next[row] = rows + static_cast<i64>(chosen) * row_stride;
            there[row] = chosen >= 0;
            loaded.scales[row] = load_16(next[row] + SCALES_AT, there[row]);
            next[row] += lane % 4 * 16;
        }
#pragma unroll
        for (int block = 0; block < RANK / 64; ++block) {
            if (block == HALF_BLOCKS) {
                arrive_as_warp(&shared.left_filled[buffer], lane);
                wait_for_round(&shared.right_free[buffer], round ^ 1);
            }
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int offset = block * BLOCK + row * 8 * 128;
                const uint4 &codes = loaded.codes[row][block];
                store_codes(blocks + offset + even, blocks + offset + odd, codes, ratios[row][block / 2]);
                // Loading one block later than possible saves registers.
                if (block > 0) load_codes(loaded, row, block - 1, next[row], there[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int offset = ROPE_BLOCK * BLOCK + row * 8 * 128;
                const u32 factor = inverses[row] | inverses[row] >> 16;
                store_rope(blocks + offset + (rope_at ^ 64 * n), loaded.rope[row][n], factor);
            }
            load_codes(loaded, row, RANK / 64 - 1, next[row], there[row]);
            load_rope(loaded, row, next[row], there[row]);
        }
        arrive_as_warp(&shared.right_filled[buffer], lane);
    }
}
#else
// Begins to copy blocks [from, to) of the rows that this thread copies: rows lane / 8 + {0, 4, 8, 12} of the 16 of its
// warp, and of each block the 16 bytes at 16 * (lane % 8).
template <int from, int to>
__device__ __forceinline__ void begin_blocks(u8 (&blocks)[BLOCKS][BLOCK], int key, const int (&entries)[4], const u8 *rows,
                                             i64 row_stride) {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
        const u8 *at = rows + static_cast<i64>(max(entries[row], 0)) * row_stride + 16 * chunk;
#pragma unroll
        for (int block = from; block < to; ++block) {
            begin_copy_16(blocks[block] + place_in_block(key + 4 * row, chunk), at + 128 * block, entries[row] >= 0);
        }
    }
}

// Waits until all but the `left` latest halves that this thread copies have arrived. Then passes the half before these on to
// the consumers.
template <int left> __device__ __forceinline__ void pass_on(u64 *filled, int lane) {
    wait_for_copies<left>();
    arrive_as_warp(filled, lane);
}

// Fills the tiles by asynchronous copies. A half is passed on once the next half has begun, so that two are in flight. If
// the next half cannot begin yet, the half is passed on first: the consumers may wait for it.
__device__ __forceinline__ void fill_tiles(Shared &shared, const u8 *rows, i64 row_stride, const i64 *row_ids, int first,
                                           int stop) {
    const int lane = kept(threadIdx.x % 32), key = (threadIdx.x - CONSUMERS) / 32 * 16 + lane / 8;
    int entries[4], next_entries[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) entries[row] = load_entry(row_ids, first + key + 4 * row, stop);
#pragma unroll
    for (int row = 0; row < 4; ++row) next_entries[row] = load_entry(row_ids, first + KEYS + key + 4 * row, stop);
    begin_blocks<0, HALF_BLOCKS>(shared.tiles[0], key, entries, rows, row_stride);
    close_copy_group();
    begin_blocks<HALF_BLOCKS, BLOCKS>(shared.tiles[0], key, entries, rows, row_stride);
    close_copy_group();
    const int tiles = wait_for_tiles(shared);
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2, round = tile / 2 % 2;
        u8 (&blocks)[BLOCKS][BLOCK] = shared.tiles[buffer];
        u64 *const left_free = &shared.left_free[buffer], *const right_free = &shared.right_free[buffer];
        bool pending = tile > 0;  // the right half of the previous tile
        if (pending && !__all_sync(ALL, round_is_over(left_free, round ^ 1))) {
            pass_on<0>(&shared.right_filled[buffer ^ 1], lane);
            pending = false;
            wait_for_round(left_free, round ^ 1);
        }
        if (tile > 0) {
            begin_blocks<0, HALF_BLOCKS>(blocks, key, entries, rows, row_stride);
            close_copy_group();
        }
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const KeyScale scale = {1, entries[row] >= 0 ? 0 : minus_infinity()};
            if (lane % 8 == 0) shared.key_scales[buffer][key + 4 * row] = scale;
        }
        if (pending) pass_on<1>(&shared.right_filled[buffer ^ 1], lane);
        pending = true;  // the left half of this tile
        if (!__all_sync(ALL, round_is_over(right_free, round ^ 1))) {
            pass_on<0>(&shared.left_filled[buffer], lane);
            pending = false;
            wait_for_round(right_free, round ^ 1);
        }
        if (tile > 0) {
            begin_blocks<HALF_BLOCKS, BLOCKS>(blocks, key, entries, rows, row_stride);
            close_copy_group();
        }
        if (pending) pass_on<1>(&shared.left_filled[buffer], lane);
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            entries[row] = next_entries[row];
            next_entries[row] = load_entry(row_ids, first + (tile + 2) * KEYS + key + 4 * row, stop);
        }
    }
    wait_for_copies<0>();
    if (tiles == 0) return;
    arrive_as_warp(&shared.right_filled[(tiles - 1) % 2], lane);
}
#endif

}  // namespace
