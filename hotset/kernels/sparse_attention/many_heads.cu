// sparse_attention on a Hopper GPU, in blocks of 64 heads: rank 512, rope 64.
//
// Compile-time constants:
//   FP8           1: rows of [512 e4m3 | 4 float32 scales | 64 bfloat16], 0: rows of 576 bfloat16
//   SHARED_BYTES  as set by the launch
//
// A block has three warpgroups and two buffers for tiles of 64 rows. The first warpgroup computes scores and weights, and
// the sums of the left half of the latents. The second computes the sums of the right half. The third fills the tiles: it
// copies plain rows asynchronously. fp8 rows are loaded into its registers, one tile ahead, and converted to float16 on
// their way to shared memory. The halves of a tile have barriers of their own, so that the left half can be refilled while
// the right half is still in use.
//
// An fp8 row has a `unit`: the largest power of two that does not exceed its largest scale. Its values in shared memory are
// divided by the unit. Weights are multiplied by the unit. The running maximum is that of score + log2(unit), so weights
// stay within the range of float16. Scores are base-2 logarithms.
#include "many_heads_products.cu"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(
    const u16 *q,        // [queries, heads, 576] bfloat16; heads begin at multiples of 16 bytes
    const u8 *rows,      // [device rows, row_stride bytes]
    const i64 *row_ids,  // [queries, k], EMPTY-padded anywhere
    void *out,           // [queries, heads, 512] bfloat16; with several splits: [queries, splits, heads, 512] float32
    float *lse,          // [queries, splits, heads]: log2 of the sum of 2**score; written only with several splits
    i64 query_stride, i64 head_stride, i64 row_stride, i64 row_ids_stride, i64 k, i64 all_heads, i64 splits,
    i64 split_keys, i64 scale_bits) {
    extern __shared__ __align__(1024) int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    if (splits > 1) let_next_launch_start();  // the merge
    const Sizes sizes = {static_cast<int>(k), static_cast<int>(all_heads), static_cast<int>(splits),
                         static_cast<int>(split_keys)};
    // The shuffle shows the compiler that all threads of a warp have the same value.
    const int role = __shfl_sync(ALL, static_cast<int>(threadIdx.x) / WARPGROUP, 0);
    if (role < 2) {
        const Place place = place_of(sizes);
        prepare_barriers(shared);
        const i64 *const own_ids = row_ids + place.query * row_ids_stride;
        int entries[ENTRIES_AHEAD];
        load_entries(entries, own_ids, place.first, place.stop);
        prepare_query(shared, q + place.query * query_stride + place.head_first * head_stride, head_stride,
                      sizes.heads - place.head_first, __uint_as_float(static_cast<u32>(scale_bits)));
        find_end(shared, entries, own_ids, place.first, place.stop);
    }
    if (role == 0) {
        claim_registers<216>();
        attend_left(shared, sizes, out, lse);
    } else if (role == 1) {
        release_registers<160>();
        attend_right(shared, sizes, out);
    } else {
        release_registers<128>();
        const Place place = place_of(sizes);
        fill_tiles(shared, rows, row_stride, row_ids + place.query * row_ids_stride, place.first, place.stop);
    }
}
