// Scores fp8 index keys of 128 values for queries that share no context, on a Hopper GPU.
//
// Compile-time constants:
//   GROUPS      of 32 heads per query: 1 to 4
//   HALF        1: queries are float16, 0: bfloat16
//   WARPGROUPS  that score; one more warp copies keys, another one prefetches
//   STAGES      tiles of keys in shared memory, a multiple of WARPGROUPS
//   BLOCK_ROWS, PARTS, STEP    of the keys: see PagedRows. Constants, because divisions by variables take long
//   SHARED_BYTES  as set by the launch
//
// The kernel is limited by memory bandwidth. A tile is 64 consecutive keys, copied to shared memory as they are stored: 128
// codes and a scale each. The tiles of all queries are numbered consecutively, and every block scores an equal share of them:
// parts of one query or of several. One thread copies the tiles of a share without a pause; the warpgroups score them in
// turn. One block runs on every multiprocessor.
//
// The kernel is launched early. If there are few queries, one warp prefetches the first tile of every warpgroup into the L2
// cache while earlier launches still run. More tiles would still be on their way when the copies begin, and would be read
// twice.
//
// A tile of a share is in stage `tile % STAGES`, and a stage belongs to one warpgroup. This matters: a wait for a barrier
// distinguishes only odd and even rounds, so that a warp must wait for every round of a barrier, in order. Copies end in any
// order. If stages moved between warpgroups, one that is ahead could wait for the second tile of a stage before the first
// has arrived, and that wait would end at once.
//
// A warpgroup holds the codes of a tile in registers, as the left operand of its products. The heads of the query are
// in shared memory, as the right operand; all warpgroups quantise them together.
//
// A row of 33 words starts in the bank after that of the previous row. The four lanes that hold a row read words 8 apart,
// so that a warp reads from 32 different banks. Tensor cores expect those lanes to hold adjacent words; instead, the words
// of the heads are permuted in the same way, which does not change the sums.
#include "instructions.cu"

namespace {

constexpr int SCORERS = 128 * WARPGROUPS, WARPS = SCORERS / 32, THREADS = SCORERS + 64;
constexpr int EMPTY = -1;
constexpr u32 MAX_PREFETCH_QUERIES = 4;  // with 32, prefetching gained nothing
constexpr u32 COPYING_WARP = WARPS, PREFETCHING_WARP = WARPS + 1;
constexpr int TILE = 64, DIM = 128, KEY_WORDS = DIM / 4 + 1, KEY_BYTES = 4 * KEY_WORDS;
constexpr int HEADS = 32 * GROUPS;
constexpr u32 BLOCK_TILES = (BLOCK_ROWS + TILE - 1) / TILE;
constexpr int AT_ONCE = 2;  // groups whose products are in registers at the same time
constexpr int LANES_OF_HEAD = 16, VALUES = DIM / LANES_OF_HEAD;  // while queries are quantised
constexpr int PASSES = (HEADS * LANES_OF_HEAD + SCORERS - 1) / SCORERS;
constexpr float E4M3_MAX = 448, MIN_SCALE = 1e-30f;
static_assert(STAGES % WARPGROUPS == 0, "a stage must belong to one warpgroup");

struct Shared {
    alignas(1024) u8 heads[HEADS * DIM];  // the codes of the query, in the order that `multiply` expects
    alignas(16) u32 tiles[STAGES][TILE * KEY_WORDS];
    alignas(8) u64 arrived[STAGES], released[STAGES];
    float factors[HEADS];
    float moments[WARPS][2];
    u32 first_block;  // the first block that scores keys of the query
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// The arguments that do not depend on the query.
struct Paging {
    const u8 *blocks;
    i64 part_stride, page_stride;  // bytes
    u32 first_part;
};

// The pages of all contexts.
struct Table {
    const i64 *pages;  // [seats, columns], of which a row begins at every multiple of `stride`
    i64 stride, seats, columns;
    i64 page_count;  // of the pool
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

// A query: its number, the seat of its context and its position there.
struct Query {
    u32 number;
    int seat, position;
};

// The queries of the launch.
struct Queries {
    const i64 *seat_of, *positions;
    u32 count;
    i64 k;
    __device__ __forceinline__ Query read(u32 number) const {
        return {number, static_cast<int>(seat_of[number]), static_cast<int>(positions[number])};
    }
    // Returns the number of tiles of a query; 0 for one that is not scored.
    __device__ __forceinline__ u32 tiles_of(i64 seat, i64 position) const {
        if (seat < 0 || position < k) return 0;
        const u32 rows = static_cast<u32>(position) + 1;
        return rows / BLOCK_ROWS * BLOCK_TILES + (rows % BLOCK_ROWS + TILE - 1) / TILE;
    }
};

// The tiles [tile, last) of a query. The query has `tiles` tiles, and `before` tiles of the launch precede them.
struct Part {
    Query query;
    u32 tile, last, tiles, before;
    __device__ __forceinline__ bool empty() const { return tile == last; }
};

// The tiles [at, end) of the launch, which a block still has to score. They belong to `query` and to later queries.
struct Share {
    u32 at, end, before;
    Query query;  // already read, because reading it again would delay the first copy
    __device__ __forceinline__ Part first(const Queries &queries) { return at == end ? Part{} : take(queries); }
    // Takes the tiles of the next query. Returns an empty part if none are left.
    __device__ __forceinline__ Part next(const Queries &queries) {
        if (at == end) return Part{};
        query = queries.read(query.number + 1);
        return take(queries);
    }
    __device__ __forceinline__ Part take(const Queries &queries) {
        u32 tiles;
        while (before + (tiles = queries.tiles_of(query.seat, query.position)) <= at) {
            before += tiles, query = queries.read(query.number + 1);
        }
        const Part part = {query, at - before, min(tiles, end - before), tiles, before};
        at = before + part.last, before += tiles;
        return part;
    }
};

// Returns the share of this block. Every lane passes the first query of a range, and the number of tiles of the range.
__device__ __forceinline__ Share share_of(const Query &first, u32 own, Shares &shares) {
    const u32 lane = threadIdx.x % 32;
    u32 up_to = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 lower = __shfl_up_sync(ALL, up_to, distance);
        if (lane >= distance) up_to += lower;
    }
    const u32 total = __reduce_add_sync(ALL, own), active = min(static_cast<u32>(gridDim.x), total);
    if (blockIdx.x >= active) return Share{};
    shares = {total / active, total % active};
    const u32 at = shares.first_of(blockIdx.x), home = __popc(__ballot_sync(ALL, up_to <= at));
    const Query query = {__shfl_sync(ALL, first.number, home), __shfl_sync(ALL, first.seat, home),
                         __shfl_sync(ALL, first.position, home)};
    return {at, shares.first_of(blockIdx.x + 1), __shfl_sync(ALL, up_to - own, home), query};
}

// Finds the share of this block. Every warp does so for itself: a lane counts the tiles of a range of queries.
__device__ __forceinline__ Share find_share(const Queries &queries, Shares &shares) {
    const u32 lane = threadIdx.x % 32, each = (queries.count + 31) / 32;
    const u32 from = min(lane * each, queries.count), to = min(from + each, queries.count);
    u32 own = 0;
    Query first = {};
#pragma unroll 1
    for (u32 number = from; number < to; ++number) {
        const Query query = queries.read(number);
        own += queries.tiles_of(query.seat, query.position);
        if (number == from) first = query;
    }
    return share_of(first, own, shares);
}

// Copies the tiles of one query, in order.
struct Cursor {
    const u8 *from;  // the tile to copy next
    u32 tile;        // its number in its block
    u32 block;
    i64 next_page;  // of the block after that, so that no copy waits for the look-up
};

__device__ __forceinline__ u32 part_of(u32 block, const Paging &paging) { return block * STEP + paging.first_part; }

__device__ __forceinline__ const u8 *address_of(u32 block, i64 page, const Paging &paging) {
    return paging.blocks + part_of(block, paging) % PARTS * paging.part_stride + page * paging.page_stride;
}

// Returns the bytes that are copied for a tile, given its number in its block. The size is rounded up to 16 bytes, and so is
// the size of a block in memory.
__device__ __forceinline__ u32 tile_bytes(u32 in_block) {
    return (min(static_cast<u32>(TILE), BLOCK_ROWS - in_block * TILE) * KEY_BYTES + 15) / 16 * 16;
}

// Prefetches the first tiles of this block's share into the L2 cache. Earlier launches may still run, so
// the seats and pages that this reads may be wrong. They are used for nothing else, and are not kept in the L1 cache, where
// later reads would find them.
__device__ __forceinline__ void prefetch_first_tiles(const Queries &queries, const Paging &paging, const Table &table) {
    const u32 lane = threadIdx.x % 32;
    if (queries.count > MAX_PREFETCH_QUERIES) return;
    i64 seat = EMPTY, position = EMPTY;
    if (lane < queries.count) seat = __ldcg(queries.seat_of + lane), position = __ldcg(queries.positions + lane);
    const u32 own = seat < table.seats ? queries.tiles_of(seat, position) : 0;
    Shares shares;
    const Share share = share_of({lane, static_cast<int>(seat), static_cast<int>(position)}, own, shares);
    const u32 tile = share.at - share.before + lane, tiles = __shfl_sync(ALL, own, share.query.number);
    if (lane >= WARPGROUPS || tile >= min(tiles, share.end - share.before)) return;
    const u32 block = tile / BLOCK_TILES, in_block = tile % BLOCK_TILES, column = part_of(block, paging) / PARTS;
    const i64 page = column < table.columns ? __ldcg(table.pages + share.query.seat * table.stride + column) : EMPTY;
    if (page < 0 || page >= table.page_count) return;
    prefetch_to_l2(address_of(block, page, paging) + in_block * TILE * KEY_BYTES, tile_bytes(in_block));
}

__device__ __forceinline__ void begin_tile(Shared &shared, u32 stage, Cursor &cursor, const i64 *pages, u32 last_block,
                                           const Paging &paging) {
    begin_copy(shared.tiles[stage], cursor.from, tile_bytes(cursor.tile), &shared.arrived[stage]);
    cursor.from += TILE * KEY_BYTES;
    if (++cursor.tile < BLOCK_TILES) return;
    cursor.tile = 0, ++cursor.block;
    cursor.from = address_of(cursor.block, cursor.next_page, paging);
    cursor.next_page = pages[part_of(min(cursor.block + 1, last_block), paging) / PARTS];
}

// Prepares the barriers of the stages. Called by the warps that score. A warp prepares one barrier at a time, in about 40
// cycles, so every warp prepares some. The warp that copies waits for this; those that score wait for each other later, when
// the heads are written.
__device__ __forceinline__ void prepare_barriers(Shared &shared) {
    if (threadIdx.x % 32 == 0) {
        for (u32 stage = threadIdx.x / 32; stage < STAGES; stage += WARPS) {
            prepare_barrier(&shared.arrived[stage], 1), prepare_barrier(&shared.released[stage], 4);
        }
    }
    arrive_only(SCORERS + 32);
}

// Copies the tiles of a share, as soon as there is room for them.
__device__ __forceinline__ void copy_tiles(Shared &shared, Share share, const Queries &queries, const Paging &paging,
                                           const Table &table) {
    u32 stage = 0, round = 1;
    for (Part part = share.first(queries); !part.empty(); part = share.next(queries)) {
        const i64 *pages = table.pages + part.query.seat * table.stride;
        const u32 last_block = static_cast<u32>(part.query.position) / BLOCK_ROWS;
        const u32 block = part.tile / BLOCK_TILES, in_block = part.tile % BLOCK_TILES;
        const i64 page = pages[part_of(block, paging) / PARTS];
        const i64 next_page = pages[part_of(min(block + 1, last_block), paging) / PARTS];
        Cursor cursor = {address_of(block, page, paging) + in_block * TILE * KEY_BYTES, in_block, block, next_page};
        u32 left = part.last - part.tile;  // not 0: a check would delay the look-up of the next page
#pragma unroll 1
        do {
            wait_for_round(&shared.released[stage], round);
            begin_tile(shared, stage, cursor, pages, last_block, paging);
            if (++stage == STAGES) stage = 0, round ^= 1;
        } while (--left > 0);
    }
}

// The heads of a query, and their weights.
struct Heads {
    const u16 *values;
    const float *weights;
    i64 head_stride;
    u32 count;
    // Returns the values of a head that this thread quantises.
    __device__ __forceinline__ const u16 *values_of(u32 head) const {
        return values + head * head_stride + threadIdx.x % LANES_OF_HEAD * VALUES;
    }
};

__device__ __forceinline__ u32 head_of(int pass) { return (pass * SCORERS + threadIdx.x) / LANES_OF_HEAD; }

__device__ __forceinline__ void prefetch(const Heads &heads) {
#pragma unroll
    for (int n = 0; n < PASSES; ++n) {
        const u32 head = head_of(n);
        if (head < heads.count) prefetch_to_l2(heads.values_of(head)), prefetch_to_l2(heads.weights + head);
    }
}

// Quantises the heads of a query as `hotset.kernels.fp8.quantise` does.
__device__ __forceinline__ void write_heads(Shared &shared, const Heads &heads, float scale) {
    const u32 lane = threadIdx.x % LANES_OF_HEAD;
    uint4 words[PASSES];
    float weights[PASSES];
#pragma unroll
    for (int n = 0; n < PASSES; ++n) {
        const u32 head = head_of(n);
        words[n] = uint4{0, 0, 0, 0}, weights[n] = 0;
        if (head >= heads.count) continue;
        words[n] = *reinterpret_cast<const uint4 *>(heads.values_of(head)), weights[n] = heads.weights[head];
    }
#pragma unroll
    for (int n = 0; n < PASSES; ++n) {
        const u32 head = head_of(n);
        if (head >= HEADS) break;  // the same for all lanes of a warp
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
        const float unit = fmaxf(__fdiv_rn(largest, E4M3_MAX), MIN_SCALE), inverse = __frcp_rn(unit);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) values[i] = quotient(values[i], unit, inverse);
        // Word 8 * c + j of a key is in word j of lane c, which multiplies it with word 4 * j + c of the heads.
#pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
            const u32 codes = e4m3_codes(values[i], values[i + 1]) | e4m3_codes(values[i + 2], values[i + 3]) << 16;
            const u32 word = 2 * lane + i / 4, place = word % 8 * 4 + word / 8;
            *reinterpret_cast<u32 *>(shared.heads + head * DIM + (place / 4 ^ head % 8) * 16 + place % 4 * 4) = codes;
        }
        if (lane == 0) shared.factors[head] = weights[n] * scale * unit;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) score(
    // What the first copy needs comes first, to be in few cache lines.
    const u8 *blocks,      // [parts, pages, block rows, 132 bytes]; blocks begin and end at multiples of 16 bytes
    const i64 *table,      // [seats, columns] pages
    const i64 *seat_of,    // [queries]
    const i64 *positions,  // [queries]
    i64 count, i64 k, i64 table_stride, i64 page_stride, i64 part_stride, i64 first_part, i64 seats, i64 columns,
    i64 page_count,
    const u16 *q,          // [queries, heads, 128]; heads begin at multiples of 16 bytes
    const float *weights,  // [queries, heads]
    float *values,         // [queries, value_stride], written
    float *moments,        // [queries, moment_blocks, 2], written
    int *shares_of,        // [queries], written: how many blocks have written moments of a query
    i64 query_stride, i64 head_stride, i64 heads, i64 value_stride, i64 moment_blocks, i64 scale_bits) {
    extern __shared__ __align__(1024) int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const Paging paging = {blocks, part_stride, page_stride, static_cast<u32>(first_part)};
    const Table page_table = {table, table_stride, seats, columns, page_count};
    const Queries queries = {seat_of, positions, static_cast<u32>(count), k};
    if (warp == PREFETCHING_WARP) {  // returns, so that the compiler moves this to the end: others need not fetch this code
        prefetch_first_tiles(queries, paging, page_table);
        wait_for_previous_launch();
        return;
    }
    if (warp < WARPS) prepare_barriers(shared);
    wait_for_previous_launch();
    Shares shares;
    Share share = find_share(queries, shares);
    if (warp == COPYING_WARP) {
        arrive_and_wait(SCORERS + 32);  // until the barriers are prepared
        if (lane == 0) copy_tiles(shared, share, queries, paging, page_table);
        return;
    }
    const auto heads_of = [=](u32 query) {
        return Heads{q + query * query_stride, weights + query * heads, head_stride, static_cast<u32>(heads)};
    };
    const float scale = __uint_as_float(static_cast<u32>(scale_bits));
    const u32 row = warp % 4 * 16 + lane / 4 + lane % 2 * 8;  // the row whose score this lane writes, if lane % 4 < 2
    u32 stage = warp / 4, round = 0, skipped = warp / 4;      // skipped: tiles before the next one of this warpgroup
    for (Part part = share.first(queries), next; !part.empty(); part = next) {
        const u32 query = part.query.number;
        write_heads(shared, heads_of(query), scale);
        publish_to_tensor_cores();
        wait_for_first(SCORERS);
        if (thread == 0) shared.first_block = shares.block_of(part.before);  // a division, while keys arrive
        next = share.next(queries);
        if (!next.empty()) prefetch(heads_of(next.query.number));
        float factors[GROUPS][8];
#pragma unroll
        for (int n = 0; n < GROUPS * 8; ++n) {
            factors[n / 8][n % 8] = shared.factors[n / 8 * 32 + n % 8 / 2 * 8 + lane % 4 * 2 + n % 2];
        }
        const u32 length = static_cast<u32>(part.query.position) + 1, tiles = part.last - part.tile;
        u32 block = (part.tile + skipped) / BLOCK_TILES, in_block = (part.tile + skipped) % BLOCK_TILES;
        float sum = 0, squares = 0;
        for (; skipped < tiles; skipped += WARPGROUPS) {
            wait_for_round(&shared.arrived[stage], round);
            const u32 *words = shared.tiles[stage] + (warp % 4 * 16 + lane / 4) * KEY_WORDS;
            u32 keys[8][2];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                keys[n][0] = words[lane % 4 * 8 + n];
                keys[n][1] = words[lane % 4 * 8 + n + 8 * KEY_WORDS];
            }
            const float key_scale = __uint_as_float(words[DIM / 4 + lane % 2 * 8 * KEY_WORDS]);
            __syncwarp();
            if (lane == 0) arrive(&shared.released[stage]);  // this warp's keys are in registers
            if ((stage += WARPGROUPS) >= STAGES) stage -= STAGES, round ^= 1;
            float scores[2] = {0, 0};  // of this lane's two rows
#pragma unroll
            for (int first = 0; first < GROUPS; first += AT_ONCE) {
                const int last = first + AT_ONCE < GROUPS ? first + AT_ONCE : GROUPS;
                float sums[AT_ONCE][16];
#pragma unroll
                for (int group = first; group < last; ++group) pin(sums[group - first]);
                begin_products();
#pragma unroll
                for (int group = first; group < last; ++group) {
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        multiply(sums[group - first], keys[2 * n][0], keys[2 * n][1], keys[2 * n + 1][0],
                                 keys[2 * n + 1][1], shared.heads + group * 32 * DIM, n, n == 0);
                    }
                }
                close_product_batch();
                wait_for_products<0>();
#pragma unroll
                for (int group = first; group < last; ++group) {
                    pin(sums[group - first]);
#pragma unroll
                    for (int n = 0; n < 16; ++n) {
                        scores[n / 2 % 2] += fmaxf(sums[group - first][n], 0) * factors[group][n / 4 * 2 + n % 2];
                    }
                }
            }
            // Of each pair of lanes, the first adds up the first row and the second the other.
            float score = lane % 2 ? scores[1] : scores[0];
            score += __shfl_xor_sync(ALL, lane % 2 ? scores[0] : scores[1], 1);
            score += __shfl_xor_sync(ALL, score, 2);
            score *= key_scale;
            const u32 of_block = in_block * TILE + row, position = block * BLOCK_ROWS + of_block;
            if (lane % 4 < 2 && of_block < BLOCK_ROWS && position < length) {
                values[query * value_stride + position] = score;
                sum += score, squares += score * score;
            }
            for (in_block += WARPGROUPS; in_block >= BLOCK_TILES; ++block) in_block -= BLOCK_TILES;
        }
        skipped -= tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(ALL, sum, step), squares += __shfl_xor_sync(ALL, squares, step);
        }
        if (lane == 0) shared.moments[warp][0] = sum, shared.moments[warp][1] = squares;
        wait_for_first(SCORERS);
        if (thread < 2) {
            const u32 before = blockIdx.x - shared.first_block;
            float total = 0;
            for (int n = 0; n < WARPS; ++n) total += shared.moments[n][thread];
            moments[(query * moment_blocks + before) * 2 + thread] = total;
            if (part.last == part.tiles) shares_of[query] = static_cast<int>(before) + 1;
        }
    }
}
