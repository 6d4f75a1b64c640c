// Scores fp8 index keys of 128 values for queries that share no context, on a Hopper GPU.
//
// Compile-time constants:
//   GROUPS  of 32 heads per query: 1 to 4
//   HALF    1: queries are float16, 0: bfloat16
//   STAGES  tiles of keys in shared memory: those in flight and the current one
//   BLOCKS  per multiprocessor
//   SHARED_BYTES  as set by the launch
//
// The kernel is limited by memory bandwidth. A tile is 64 consecutive keys, copied to shared memory as they are stored: 128
// codes and a scale each. A block is one warpgroup: it holds the codes of a tile in registers, as the left operand of its
// products, and the query's heads in shared memory, as the right operand. The tiles of all queries are numbered through,
// and every block scores an equal share of them: parts of one query or of several.
//
// A row of 33 words starts in the bank after that of the previous row. The four lanes that hold a row read words 8 apart,
// so that a warp reads from 32 different banks. Tensor cores expect those lanes to hold adjacent words; instead, the words
// of the heads are permuted in the same way, which does not change the sums.
#include "instructions.cu"

namespace {

constexpr int THREADS = 128, WARPS = 4;
constexpr int TILE = 64, DIM = 128, KEY_WORDS = DIM / 4 + 1, KEY_BYTES = 4 * KEY_WORDS;
constexpr int HEADS = 32 * GROUPS;
constexpr int LANES_OF_HEAD = 16, VALUES = DIM / LANES_OF_HEAD;  // while queries are quantised
constexpr float E4M3_MAX = 448, MIN_SCALE = 1e-30f;

struct Shared {
    alignas(1024) u8 heads[HEADS * DIM];  // the codes of the query, in the order that `multiply` expects
    alignas(16) u32 tiles[STAGES][TILE * KEY_WORDS];
    alignas(8) u64 arrivals[STAGES];
    float factors[HEADS];
    float moments[WARPS][2];
    u32 totals[WARPS];
    u32 query, before;  // the first query of this block, and the number of tiles of the queries before it
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// The arguments that do not depend on the query.
struct Paging {
    const u8 *blocks;
    i64 part_stride, page_stride;  // bytes
    u32 parts, step, first_part;
    u32 block_rows, block_tiles;
};

// Which tiles belong to which block: the first `extra` blocks have one more.
struct Shares {
    u32 base, extra;
    __device__ __forceinline__ u32 first_of(u32 block) const { return block * base + min(block, extra); }
    __device__ __forceinline__ u32 block_of(u32 tile) const {
        const u32 longer = extra * (base + 1);
        return tile < longer ? tile / (base + 1) : extra + (tile - longer) / base;
    }
};

// Returns the number of tiles of a query; 0 for one that is not scored.
__device__ __forceinline__ u32 tiles_of(const i64 *seat_of, const i64 *positions, u32 query, i64 k, const Paging &paging) {
    const i64 length = positions[query] + 1;
    if (seat_of[query] < 0 || length <= k) return 0;
    const u32 rows = static_cast<u32>(length), whole = rows / paging.block_rows;
    return whole * paging.block_tiles + (rows - whole * paging.block_rows + TILE - 1) / TILE;
}

// Copies the tiles of one query, in order.
struct Cursor {
    const u8 *from;  // the tile to copy next
    u32 tile;        // its number in its block
    u32 block;
    i64 next_page;  // of the block after that, so that no copy waits for the look-up
};

__device__ __forceinline__ u32 part_of(u32 block, const Paging &paging) { return block * paging.step + paging.first_part; }

__device__ __forceinline__ const u8 *address_of(u32 block, i64 page, const Paging &paging) {
    return paging.blocks + part_of(block, paging) % paging.parts * paging.part_stride + page * paging.page_stride;
}

__device__ __forceinline__ void begin_tile(Shared &shared, u32 stage, Cursor &cursor, const i64 *pages, u32 last_block,
                                           const Paging &paging) {
    const u32 rows = min(static_cast<u32>(TILE), paging.block_rows - cursor.tile * TILE);
    // If the rows end within 16 bytes, so does the block: both are padded.
    const u32 bytes = (rows * KEY_BYTES + 15) / 16 * 16;
    begin_copy(shared.tiles[stage], cursor.from, bytes, &shared.arrivals[stage]);
    cursor.from += TILE * KEY_BYTES;
    if (++cursor.tile < paging.block_tiles) return;
    cursor.tile = 0, ++cursor.block;
    cursor.from = address_of(cursor.block, cursor.next_page, paging);
    cursor.next_page = pages[part_of(min(cursor.block + 1, last_block), paging) / paging.parts];
}

// Quantises the heads of a query as `hotset.kernels.fp8.quantise` does, 16 lanes per head.
__device__ __forceinline__ void load_heads(Shared &shared, const u16 *q, i64 head_stride, const float *weights, u32 heads,
                                           float scale) {
    const u32 lane = threadIdx.x % LANES_OF_HEAD;
    uint4 words[HEADS * LANES_OF_HEAD / THREADS];
#pragma unroll
    for (int n = 0; n < HEADS * LANES_OF_HEAD / THREADS; ++n) {
        const u32 head = n * (THREADS / LANES_OF_HEAD) + threadIdx.x / LANES_OF_HEAD;
        words[n] = uint4{0, 0, 0, 0};
        if (head < heads) words[n] = *reinterpret_cast<const uint4 *>(q + head * head_stride + VALUES * lane);
    }
#pragma unroll
    for (int n = 0; n < HEADS * LANES_OF_HEAD / THREADS; ++n) {
        const u32 head = n * (THREADS / LANES_OF_HEAD) + threadIdx.x / LANES_OF_HEAD;
        const u32 pairs[4] = {words[n].x, words[n].y, words[n].z, words[n].w};
        float values[VALUES], largest = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            if (HALF) {
                from_halves(pairs[i / 2], values[i], values[i + 1]);
            } else {
                values[i] = __uint_as_float(pairs[i / 2] << 16);
                values[i + 1] = __uint_as_float(pairs[i / 2] & 0xFFFF0000u);
            }
            largest = fmaxf(largest, fmaxf(fabsf(values[i]), fabsf(values[i + 1])));
        }
#pragma unroll
        for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
        }
        const float unit = fmaxf(__fdiv_rn(largest, E4M3_MAX), MIN_SCALE);
        u32 codes[VALUES / 4];
#pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
            codes[i / 4] = e4m3_codes(__fdiv_rn(values[i], unit), __fdiv_rn(values[i + 1], unit)) |
                           e4m3_codes(__fdiv_rn(values[i + 2], unit), __fdiv_rn(values[i + 3], unit)) << 16;
        }
        // Word 8 * c + j of a key is in word j of lane c, which multiplies it with word 4 * j + c of the heads.
#pragma unroll
        for (int i = 0; i < VALUES / 4; ++i) {
            const u32 word = 2 * lane + i, place = word % 8 * 4 + word / 8;
            *reinterpret_cast<u32 *>(shared.heads + head * DIM + (place / 4 ^ head % 8) * 16 + place % 4 * 4) = codes[i];
        }
        if (lane == 0) shared.factors[head] = head < heads ? weights[head] * scale * unit : 0;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) score(
    const u16 *q,          // [queries, heads, 128]; heads begin at multiples of 16 bytes
    const float *weights,  // [queries, heads]
    const u8 *blocks,      // [parts, pages, block rows, 132 bytes]; blocks begin and end at multiples of 16 bytes
    const i64 *table,      // [seats, pages]
    const i64 *seat_of,    // [queries]
    const i64 *positions,  // [queries]
    float *values,         // [queries, value_stride], written
    float *moments,        // [queries, moment_blocks, 2], written
    int *shares_of,        // [queries], written: how many blocks have written moments of a query
    i64 query_stride, i64 head_stride, i64 table_stride, i64 part_stride, i64 page_stride, i64 value_stride,
    i64 moment_blocks, i64 queries, i64 heads, i64 k, i64 parts, i64 step, i64 first_part, i64 block_rows,
    i64 scale_bits) {
    extern __shared__ __align__(1024) int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    Paging paging = {blocks, part_stride, page_stride};
    paging.parts = static_cast<u32>(parts), paging.step = static_cast<u32>(step);
    paging.first_part = static_cast<u32>(first_part), paging.block_rows = static_cast<u32>(block_rows);
    paging.block_tiles = (paging.block_rows + TILE - 1) / TILE;
    if (thread < STAGES) prepare_arrival(&shared.arrivals[thread]);

    // Every block finds its share of the tiles. A thread counts the tiles of a range of queries.
    const u32 count = static_cast<u32>(queries), each = (count + THREADS - 1) / THREADS;
    const u32 from_query = min(thread * each, count), to_query = min(from_query + each, count);
    u32 own = 0;
    for (u32 query = from_query; query < to_query; ++query) own += tiles_of(seat_of, positions, query, k, paging);
    u32 up_to = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 lower = __shfl_up_sync(ALL, up_to, distance);
        if (lane >= distance) up_to += lower;
    }
    if (lane == 31) shared.totals[warp] = up_to;
    __syncthreads();
    u32 total = 0;
#pragma unroll
    for (int n = 0; n < WARPS; ++n) {
        if (n < warp) up_to += shared.totals[n];
        total += shared.totals[n];
    }
    const u32 active = min(static_cast<u32>(gridDim.x), total);
    if (blockIdx.x >= active) return;
    const Shares shares = {total / active, total % active};
    u32 at = shares.first_of(blockIdx.x);
    const u32 end = shares.first_of(blockIdx.x + 1);
    if (up_to - own <= at && at < up_to) {
        u32 before = up_to - own, query = from_query;
        for (u32 tiles; before + (tiles = tiles_of(seat_of, positions, query, k, paging)) <= at; ++query) before += tiles;
        shared.query = query, shared.before = before;
    }
    __syncthreads();

    u32 query = shared.query, before = shared.before, turn = 0;  // turn: tiles that this block has scored
    const float scale = __uint_as_float(static_cast<u32>(scale_bits));
    for (; at < end; ++query) {
        const u32 tiles = tiles_of(seat_of, positions, query, k, paging);
        if (at >= before + tiles) continue;  // not scored
        const u32 length = static_cast<u32>(positions[query]) + 1, last_block = (length - 1) / paging.block_rows;
        const i64 *pages = table + seat_of[query] * table_stride;
        u32 tile = at - before;
        const u32 last = min(tiles, end - before);
        u32 block = tile / paging.block_tiles, in_block = tile % paging.block_tiles;
        Cursor cursor = {};
        if (thread == 0) {
            const i64 page = pages[part_of(block, paging) / paging.parts];
            cursor = {address_of(block, page, paging) + in_block * TILE * KEY_BYTES, in_block, block, 0};
            cursor.next_page = pages[part_of(min(block + 1, last_block), paging) / paging.parts];
            for (u32 n = 0; n < STAGES && tile + n < last; ++n) {
                begin_tile(shared, (turn + n) % STAGES, cursor, pages, last_block, paging);
            }
        }
        load_heads(shared, q + query * query_stride, head_stride, weights + query * heads, static_cast<u32>(heads), scale);
        publish_to_tensor_cores();
        __syncthreads();
        float factors[GROUPS][8];
#pragma unroll
        for (int n = 0; n < GROUPS * 8; ++n) {
            factors[n / 8][n % 8] = shared.factors[n / 8 * 32 + n % 8 / 2 * 8 + lane % 4 * 2 + n % 2];
        }
        const u32 row = warp * 16 + lane / 4 + lane % 2 * 8;  // the row whose score this lane writes, if lane % 4 < 2
        float sum = 0, squares = 0;
        for (; tile < last; ++tile, ++turn) {
            const u32 stage = turn % STAGES;
            wait_for_copy(&shared.arrivals[stage], turn / STAGES % 2);
            const u32 *words = shared.tiles[stage] + (warp * 16 + lane / 4) * KEY_WORDS;
            u32 keys[8][2];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                keys[n][0] = words[lane % 4 * 8 + n];
                keys[n][1] = words[lane % 4 * 8 + n + 8 * KEY_WORDS];
            }
            const float key_scale = __uint_as_float(words[DIM / 4 + lane % 2 * 8 * KEY_WORDS]);
            __syncthreads();  // the tile is in registers
            if (thread == 0 && tile + STAGES < last) begin_tile(shared, stage, cursor, pages, last_block, paging);
            float sums[GROUPS][16];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) pin(sums[group]);
            begin_products();
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    multiply(sums[group], keys[2 * n][0], keys[2 * n][1], keys[2 * n + 1][0], keys[2 * n + 1][1],
                             shared.heads + group * 32 * DIM, n, n == 0);
                }
                end_products();
            }
            float scores[2] = {0, 0};
            wait_for_products<0>();
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                pin(sums[group]);
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    scores[n / 2 % 2] += fmaxf(sums[group][n], 0) * factors[group][n / 4 * 2 + n % 2];
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                scores[n] += __shfl_xor_sync(ALL, scores[n], 1);
                scores[n] += __shfl_xor_sync(ALL, scores[n], 2);
            }
            const float score = (lane % 2 ? scores[1] : scores[0]) * key_scale;
            const u32 of_block = in_block * TILE + row, position = block * paging.block_rows + of_block;
            if (lane % 4 < 2 && of_block < paging.block_rows && position < length) {
                values[query * value_stride + position] = score;
                sum += score, squares += score * score;
            }
            if (++in_block == paging.block_tiles) in_block = 0, ++block;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(ALL, sum, step), squares += __shfl_xor_sync(ALL, squares, step);
        }
        if (lane == 0) shared.moments[warp][0] = sum, shared.moments[warp][1] = squares;
        __syncthreads();
        if (thread < 2) {
            const u32 first_block = shares.block_of(before);
            float *to = moments + (query * moment_blocks + blockIdx.x - first_block) * 2;
            to[thread] = shared.moments[0][thread] + shared.moments[1][thread] + shared.moments[2][thread] +
                         shared.moments[3][thread];
            if (last == tiles) shares_of[query] = static_cast<int>(blockIdx.x - first_block) + 1;
        }
        at = before + last, before += tiles;
    }
}
