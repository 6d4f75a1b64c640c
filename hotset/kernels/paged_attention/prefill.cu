// paged_attention of prompts on a Hopper GPU: bfloat16, heads of 128 values.
//
// Compile-time constants:
//   PAGE_ROWS     rows of a page
//   BOX_ROWS      rows of one copy: divides PAGE_ROWS and KEYS, and is a multiple of 8
//   SHARED_BYTES  as set by the launch
//
// A block computes one head of 128 adjacent tokens of the batch. These can belong to several segments, which it attends to
// one after another, and it stores only the results of a segment's own tokens. A block has three warpgroups: two compute 64
// tokens each; one warp of the third fills tiles of 128 keys and their values. The tensor cores sum the values of a tile
// while the weights of the next tile are computed.
//
// Scores are base-2 logarithms. Tiles begin at multiples of 128 positions, so the result of a token does not depend on its
// place in the batch.
#include "../warpgroup.cu"

namespace {

constexpr int DIM = 128;          // values of a head
constexpr int GROUP_TOKENS = 64;  // of a warpgroup
constexpr int KEYS = 128;         // of a tile
constexpr int WARPGROUP = 128, CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr int TOKENS = 2 * GROUP_TOKENS;  // of a block
constexpr int BUFFERS = 2;                // for keys, and for values
constexpr int BOXES = KEYS / BOX_ROWS;
constexpr float MAX_LEAD = 8;  // weights do not exceed 2**MAX_LEAD
static_assert(KEYS % BOX_ROWS == 0 && BOX_ROWS % 8 == 0, "");

struct Shared {
    alignas(1024) u8 query[2][2][GROUP_TOKENS * 128];  // [warpgroup][half of the head]
    alignas(1024) u8 keys[BUFFERS][2][KEYS * 128];
    alignas(1024) u8 values[BUFFERS][2][KEYS * 128];
    u64 keys_filled[BUFFERS], values_filled[BUFFERS], keys_free[BUFFERS], values_free[BUFFERS];
    u64 partial_values_copied;  // values of a segment's last tile that has fewer than KEYS rows
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// The arguments of the kernel.
struct Inputs {
    const i64 *table, *seat_of, *segment_of, *positions;
    i64 table_stride;
    int queries;
};

// The tokens of one segment in a block.
struct Segment {
    int first, count;  // in the batch
    int seat;
    int start;   // the position of the first token
    int length;  // positions that the last token sees; 0: padding tokens
    __device__ __forceinline__ int tiles() const { return (length + KEYS - 1) / KEYS; }
};

// Returns those tokens of [first, end) that belong to the segment of token `first`. Called by whole warps.
__device__ __forceinline__ Segment find_segment(const Inputs &in, int first, int end) {
    const int lane = threadIdx.x % 32;
    const i64 own = in.segment_of[first];
    Segment segment = {first, 0, static_cast<int>(in.seat_of[first]), static_cast<int>(in.positions[first]), 0};
#pragma unroll
    for (int n = 0; n < TOKENS; n += 32) {
        const int token = first + n + lane;
        segment.count += __popc(__ballot_sync(ALL, token < end && in.segment_of[token] == own));
    }
    segment.length = segment.seat < 0 ? 0 : segment.start + segment.count;
    return segment;
}

// Which buffer a tile is in, and the rounds of its barriers.
struct Turn {
    int number = 0;
    __device__ __forceinline__ int buffer() const { return number % BUFFERS; }
    __device__ __forceinline__ u32 round() const { return number / BUFFERS % 2; }
};

// Copies the tokens of this warpgroup to shared memory. Tokens that do not exist become zeros.
__device__ __forceinline__ void load_query(Shared &shared, const u16 *q, i64 query_stride, int first, int end) {
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, chunk = thread % 16;
    u8(&blocks)[2][GROUP_TOKENS * 128] = shared.query[group];
    uint4 units[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const int token = first + group * GROUP_TOKENS + 8 * n + thread / 16;
        units[n] = load_16(reinterpret_cast<const u8 *>(q + token * query_stride) + 16 * chunk, token < end);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        *reinterpret_cast<uint4 *>(blocks[chunk / 8] + place_in_block(8 * n + thread / 16, chunk % 8)) = units[n];
    }
    publish_to_tensor_cores();
}

// Begins to copy the keys or the values of a tile, which begin at `column` of a row. Lane n copies box n: the BOX_ROWS rows
// from its `position` on, which are in its `page`.
__device__ __forceinline__ void begin_tile(u8 (&blocks)[2][KEYS * 128], const void *map, int column, int position, int length,
                                           int page, u64 *barrier) {
    const int lane = threadIdx.x % 32, boxes = min(BOXES, (length - position / KEYS * KEYS + BOX_ROWS - 1) / BOX_ROWS);
    if (lane == 0) arrive_and_expect(barrier, boxes * BOX_ROWS * 2 * 128);
    __syncwarp();
    if (lane >= boxes) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        begin_box(blocks[half] + lane * BOX_ROWS * 128, map, column + 64 * half, position % PAGE_ROWS, page, barrier);
    }
}

// Replaces the rows of a tile from `first` on by zeros, because they are not part of the context.
__device__ __forceinline__ void clear_rows(u8 (&blocks)[2][KEYS * 128], int first) {
    const int chunk = threadIdx.x % 16;
    for (int row = first + threadIdx.x / 16 % 2; row < KEYS; row += 2) {
        *reinterpret_cast<uint4 *>(blocks[chunk / 8] + place_in_block(row, chunk % 8)) = uint4{0, 0, 0, 0};
    }
    publish_to_tensor_cores();
}

// Fills the buffers with the tiles of all segments. Called by one warp. Lane n looks up the page of box n, one tile ahead.
__device__ __forceinline__ void fill_buffers(Shared &shared, const Inputs &in, const void *map, int keys_at, int values_at,
                                             int first, int end) {
    const int lane = threadIdx.x % 32;
    Turn turn;
    int partial_tiles = 0;
    while (first < end) {
        const Segment segment = find_segment(in, first, end);
        const i64 *const pages = in.table + segment.seat * in.table_stride;
        const int length = segment.length;
        int position = min(lane, BOXES - 1) * BOX_ROWS;
        int next_page = position < length ? static_cast<int>(pages[position / PAGE_ROWS]) : 0;
        for (int tile = 0; tile < segment.tiles(); ++tile, ++turn.number, position += KEYS) {
            const int buffer = turn.buffer(), page = next_page, later = position + KEYS;
            next_page = later < length ? static_cast<int>(pages[later / PAGE_ROWS]) : 0;
            wait_for_round(&shared.keys_free[buffer], turn.round() ^ 1);
            begin_tile(shared.keys[buffer], map, keys_at, position, length, page, &shared.keys_filled[buffer]);
            wait_for_round(&shared.values_free[buffer], turn.round() ^ 1);
            const int rows = length - tile * KEYS;
            u64 *const copied = rows < KEYS ? &shared.partial_values_copied : &shared.values_filled[buffer];
            begin_tile(shared.values[buffer], map, values_at, position, length, page, copied);
            if (rows >= KEYS) continue;
            wait_for_round(copied, partial_tiles++ % 2);
            clear_rows(shared.values[buffer], rows);
            __syncwarp();
            if (lane == 0) arrive(&shared.values_filled[buffer]);
        }
        first += segment.count;
    }
}

// The running totals of the thread's two rows: `most` is near the largest score so far, and `mass` is the sum of
// 2**(score - most) over the keys of this thread.
struct Totals {
    float most[2] = {LOWEST_SCORE, LOWEST_SCORE}, mass[2] = {0, 0};
};

// Replaces the products of a tile by weights. Sets `shrinks` to the factors by which earlier sums must be multiplied. They
// are 1 as long as no weight exceeds 2**MAX_LEAD, so that sums seldom have to be multiplied.
__device__ __forceinline__ void weigh(float (&scores)[64], float scale, Totals &totals, float (&shrinks)[2]) {
    float largest[2] = {minus_infinity(), minus_infinity()}, new_most[2];
#pragma unroll
    for (int n = 0; n < 64; ++n) largest[n % 4 / 2] = fmaxf(largest[n % 4 / 2], scores[n]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        largest[row] = fmaxf(largest[row], __shfl_xor_sync(ALL, largest[row], 1));
        largest[row] = scale * fmaxf(largest[row], __shfl_xor_sync(ALL, largest[row], 2));
        const float most = totals.most[row];
        new_most[row] = largest[row] <= most + MAX_LEAD ? most : largest[row];
        shrinks[row] = power_of_2(most - new_most[row]);
        totals.most[row] = new_most[row], totals.mass[row] *= shrinks[row];
    }
#pragma unroll
    for (int n = 0; n < 64; ++n) {
        scores[n] = power_of_2(scores[n] * scale - new_most[n % 4 / 2]);
        totals.mass[n % 4 / 2] += scores[n];
    }
}

// Sets the scores of keys that a token does not see to minus infinity.
__device__ __forceinline__ void mask(float (&scores)[64], int first_position, const int (&last_seen)[2]) {
    const int column = first_position + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 64; ++n) {
        if (column + n / 4 * 8 + n % 2 > last_seen[n % 4 / 2]) scores[n] = minus_infinity();
    }
}

// Attends to the segments of one warpgroup.
struct Consumer {
    Shared &shared;
    float scale;
    Turn turn;  // of the next tile's keys
    float scores[64], sums[64];
    u32 weights[32];  // of the previous tile, as bfloat16
    Totals totals;
    float shrinks[2];

    __device__ __forceinline__ void begin_scores() {
        const int group = threadIdx.x / WARPGROUP, buffer = turn.buffer();
        const u64 query = description_of(shared.query[group]), keys = description_of(shared.keys[buffer]);
        wait_for_round(&shared.keys_filled[buffer], turn.round());
        begin_products();
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) multiply_columns(scores, query, keys, step, step == 0);
        close_product_batch();
    }
    // Begins to add the weighted values of the previous tile to the sums.
    __device__ __forceinline__ void begin_sums() {
        const Turn previous = {turn.number - 1};
        const u64 values = description_of<KEYS>(shared.values[previous.buffer()]);
        wait_for_round(&shared.values_filled[previous.buffer()], previous.round());
        begin_products();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            const u32 *four = weights + 4 * step;
            multiply_rows(sums, four[0], four[1], four[2], four[3], values, step);
        }
        close_product_batch();
    }
    __device__ __forceinline__ void end_scores() {
        pin(scores);
        arrive_as_warp(&shared.keys_free[turn.buffer()], threadIdx.x % 32);
    }
    __device__ __forceinline__ void free_values() {
        arrive_as_warp(&shared.values_free[(turn.number - 1) % BUFFERS], threadIdx.x % 32);
    }
    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int n = 0; n < 32; ++n) weights[n] = packed_bfloat(scores[2 * n], scores[2 * n + 1]);
    }
    // Waits for the sums that `begin_sums` has begun for this segment, if any. Then multiplies them by `shrinks`, so that
    // values can be added with the newest weights. The wait is outside of `if (begun)`, because nvcc would otherwise make
    // the kernel wait for every single product.
    __device__ __forceinline__ void end_sums(bool begun) {
        wait_for_products<0>();
        pin(sums);
        if (begun) free_values();
        if (__all_sync(ALL, shrinks[0] == 1 && shrinks[1] == 1)) return;
#pragma unroll
        for (int n = 0; n < 64; ++n) sums[n] *= shrinks[n % 4 / 2];
    }

    // Weighs the next tile while the values of the previous tile are added. The next call of `end_sums` waits for these
    // sums. It does not stand here, because nvcc would move its wait before the computation of the weights.
    template <bool masked> __device__ __forceinline__ void attend_to_next(int tile, const int (&last_seen)[2]) {
        end_sums(tile > 1);
        round_weights();
        ++turn.number;
        begin_scores();
        begin_sums();
        wait_for_products<1>();
        end_scores();
        if (masked) mask(scores, tile * KEYS, last_seen);
        weigh(scores, scale, totals, shrinks);
    }

    // Leaves the sums of a segment's values in `sums`.
    __device__ __forceinline__ void attend(const Segment &segment, const int (&last_seen)[2]) {
        totals = Totals();
#pragma unroll
        for (int n = 0; n < 64; ++n) sums[n] = 0;
        const int tiles = segment.tiles(), unmasked_tiles = (segment.start + 1) / KEYS;
        if (tiles == 0) return;
        begin_scores();
        wait_for_products<0>();
        end_scores();
        if (unmasked_tiles == 0) mask(scores, 0, last_seen);
        weigh(scores, scale, totals, shrinks);
        int tile = 1;
        for (; tile < unmasked_tiles; ++tile) attend_to_next<false>(tile, last_seen);
        for (; tile < tiles; ++tile) attend_to_next<true>(tile, last_seen);
        end_sums(tiles > 1);
        round_weights();
        ++turn.number;
        begin_sums();
        wait_for_products<0>();
        pin(sums);
        free_values();
    }
};

// Attends to all segments of a block and stores the results of this warpgroup's tokens.
__device__ __forceinline__ void attend_all(Shared &shared, const Inputs &in, float scale, u16 *out, i64 out_stride,
                                           int first, int end) {
    Consumer consumer = {shared, scale};
    const int lane = threadIdx.x % 32;
    const int token = first + threadIdx.x / 32 * 16 + lane / 4;  // the first of this thread's two tokens
    while (first < end) {
        const Segment segment = find_segment(in, first, end);
        int last_seen[2];
        bool own[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int offset = token + 8 * row - segment.first;
            own[row] = offset >= 0 && offset < segment.count;
            // Tokens of other segments see everything, which keeps their unused results finite.
            last_seen[row] = own[row] ? segment.start + offset : segment.length - 1;
        }
        consumer.attend(segment, last_seen);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float mass = consumer.totals.mass[row];
            mass += __shfl_xor_sync(ALL, mass, 1);
            mass += __shfl_xor_sync(ALL, mass, 2);
            const float inverse = 1 / fmaxf(mass, MIN_DIVISOR);
            u16 *const to = out + (token + 8 * row) * out_stride + lane % 4 * 2;
            if (!own[row]) continue;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                const float *both = consumer.sums + 4 * n + 2 * row;
                store(to + 8 * n, both[0] * inverse, both[1] * inverse);
            }
        }
        first += segment.count;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(
    const u16 *q,     // [queries, heads, DIM]; heads begin at multiples of 16 bytes
    const void *map,  // the tensor map of [pages, PAGE_ROWS, keys of every head and values of every head]
    const i64 *table,                                                 // [seats, pages]
    const i64 *seat_of, const i64 *segment_of, const i64 *positions,  // [queries]
    u16 *out,                                                         // [queries, heads, DIM]
    i64 queries, i64 query_stride, i64 head_stride, i64 table_stride, i64 heads, i64 kv_heads, i64 scale_bits) {
    extern __shared__ __align__(1024) int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const Inputs in = {table, seat_of, segment_of, positions, table_stride, static_cast<int>(queries)};
    const int all_heads = static_cast<int>(heads), head = blockIdx.x % all_heads;
    // The last tokens of a prompt have the longest contexts, so their blocks begin first.
    const int first = (gridDim.x / all_heads - 1 - blockIdx.x / all_heads) * TOKENS, end = min(first + TOKENS, in.queries);
    // The shuffle shows the compiler that all threads of a warp have the same value.
    const int warp = __shfl_sync(ALL, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < CONSUMERS / 32) load_query(shared, q + head * head_stride, query_stride, first, end);
    if (threadIdx.x == CONSUMERS) {
        for (int n = 0; n < BUFFERS; ++n) {
            prepare_barrier(&shared.keys_filled[n], 1);
            prepare_barrier(&shared.values_filled[n], 1);
            prepare_barrier(&shared.keys_free[n], CONSUMERS / 32);
            prepare_barrier(&shared.values_free[n], CONSUMERS / 32);
        }
        prepare_barrier(&shared.partial_values_copied, 1);
        acquire_map(map);
    }
    __syncthreads();
    if (warp < CONSUMERS / 32) {
        claim_registers<232>();
        attend_all(shared, in, __uint_as_float(static_cast<u32>(scale_bits)), out + head * DIM, all_heads * DIM, first, end);
        return;
    }
    release_registers<40>();
    const int kv_head = head / (all_heads / static_cast<int>(kv_heads));
    if (warp == CONSUMERS / 32) {
        fill_buffers(shared, in, map, kv_head * DIM, (static_cast<int>(kv_heads) + kv_head) * DIM, first, end);
    }
}
