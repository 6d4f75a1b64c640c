// sparse_attention on a Hopper GPU, in blocks of 16 or 32 heads: rank 512, rope 64.
//
// Compile-time constants:
//   FP8           1: rows of [512 e4m3 | 4 float32 scales | 64 bfloat16], 0: rows of 576 bfloat16
//   HEADS         per block: 16 or 32
//   KEYS          per step: 32 or 64
//   RING          rows in shared memory: those of the current step and those in flight
//   BLOCKS        per multiprocessor
//   SHARED_BYTES  as set by the launch
//
// Rows are copied to shared memory unchanged. Each of the four warps processes 128 of the 512 latents of a row, for all
// heads and keys. It computes its share of each score, which is a sum over the warps, and its 128 of the 512 weighted
// sums. fp8 codes are converted to float16 in registers, once for each of the two products. The 128 latents of a row
// that a warp processes have the same scale, so the scale is applied to scores and weights, not to the latents.
//
// An fp8 row has a `unit`: the largest power of two that does not exceed its largest scale. Weights are stored
// multiplied by the unit. The running maximum is that of score + log2(unit), so no stored weight exceeds 1 (as in
// triton_impl). Scores are base-2 logarithms.
//
// Before its first step, a block waits for memory twice: for the selected entries and then for their rows. All other
// reads are issued together with those of the entries: reads issued after the rows would also arrive after them.
#include "results.cu"

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attend(
    const u16 *q,        // [queries, heads, 576] bfloat16; heads begin at multiples of 8 bytes
    const u8 *rows,      // [device rows, row_stride bytes]
    const i64 *row_ids,  // [queries, k], EMPTY-padded anywhere
    void *out,           // [queries, heads, 512] bfloat16; with several splits: [queries, splits, heads, 512] float32
    float *lse,          // [queries, splits, heads]: log2 of the sum of 2**score; written only with several splits
    i64 query_stride, i64 head_stride, i64 row_stride, i64 row_ids_stride, i64 k, i64 all_heads, i64 splits,
    i64 split_keys, i64 scale_bits) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (splits > 1) let_next_launch_start();  // the merge
    const Place place = place_of(k, all_heads, splits, split_keys);
    const int first = place.first, stop = place.stop, heads = static_cast<int>(all_heads) - place.head_first;
    const i64 *my_row_ids = row_ids + place.query * row_ids_stride;
    const float scale = __uint_as_float(static_cast<u32>(scale_bits));

    const int first_entry = load_entry<AHEAD / WARPS>(my_row_ids, first, stop);
    int entry = load_entry<ROWS_OF_WARP>(my_row_ids, first + AHEAD, stop);
    int next_entry = load_entry<ROWS_OF_WARP>(my_row_ids, first + AHEAD + KEYS, stop);
    int found[PEEKED];
    peek(found, my_row_ids, first, stop);
    Query query;
    load_query(query, q + place.query * query_stride + place.head_first * head_stride, head_stride, heads);
    begin_rows<AHEAD / WARPS>(shared, 0, first_entry, rows, row_stride);
    const int steps = (end_of(shared, found, my_row_ids, first, stop) - first + KEYS - 1) / KEYS;
    if (FP8) quantise_query(shared, query, scale);
    __syncthreads();
    const int weighed_head = warp * HEADS_OF_WARP + lane / LANES_OF_HEAD;
    const float factor = FP8 ? shared.factors[weighed_head] : scale;
    float most = LOWEST_SCORE, mass = 0;
    Sums sums = {};
    int at = 0;  // position of the step's rows in the ring
    for (int n = 0; n < steps; ++n, at = wrapped(at + KEYS)) {
        wait_for_copies<(AHEAD - KEYS) / GROUP>();
        __syncthreads();  // all rows of this step have arrived; those of the previous step may be overwritten
        if (n * KEYS + AHEAD < steps * KEYS) {  // not `stop`: rows of zeros fill up the last step
            begin_rows<ROWS_OF_WARP>(shared, wrapped(at + AHEAD), entry, rows, row_stride);
        } else {
            begin_nothing();
        }
        entry = next_entry;
        next_entry = load_entry<ROWS_OF_WARP>(my_row_ids, first + AHEAD + (n + 2) * KEYS, stop);
        note_rows(shared, at);
#pragma unroll
        for (int key = 0; key < KEYS; key += 8 * EIGHTS) score(shared, at, key, query);
        __syncthreads();
        weigh(shared, factor, most, mass);
        __syncthreads();
        shrink_sums(shared, sums);
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) add_keys(shared, at, key, sums);
    }
    leave_totals(shared, weighed_head, most, mass);
    wait_for_copies<0>();  // rows of zeros after the last entry may still be in flight
    __syncthreads();
    const i64 part = (place.query * splits + place.split) * all_heads + place.head_first;
    if (splits == 1) {
        store_sums(shared, sums, static_cast<u16 *>(out) + part * RANK, heads);
        return;
    }
    const int head = threadIdx.x;
    if (head < HEADS && head < heads) {
        lse[part + head] = steps > 0 ? shared.most[head] + log2f(shared.mass[head]) : minus_infinity();
    }
    // The merge does not read the sums of an empty split.
    if (steps > 0) store_sums(shared, sums, static_cast<float *>(out) + part * RANK, heads);
}
