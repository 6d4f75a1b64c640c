// The copy of swap_in on a GPU: a bounded grid copies all listed rows.
//
// Compile-time constants: THREADS per block, a multiple of 32, and those of row_copy.cu.
#include "row_copy.cu"

// Each team of blocks copies one list after the other. Warp n % warps of a team copies row n of the list. Rows that are
// close to each other on the host are therefore read at about the same time, which saves address translations.
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const i64 *copy_host, const i64 *copy_device,  // [batch, most]: the lists
    const int *copy_counts,                        // [batch]: entries in use of each list
    i64 batch, i64 most, i64 team,                 // team: blocks of a team, neighbours in the grid
    const u8 *host, i64 host_stride, u8 *device, i64 device_stride, i64 row_bytes) {
    const unsigned warps = team * WARPS;
    const unsigned warp = blockIdx.x % team * WARPS + threadIdx.x / 32;
    const Layer layer = {host, host_stride, device, device_stride, static_cast<int>(row_bytes)};
    wait_for_previous_launch();
    for (i64 list = blockIdx.x / team; list < batch; list += gridDim.x / team) {
        const unsigned count = __ldcg(copy_counts + list);
        for (unsigned nth = warp; nth < count; nth += warps * ROWS_AT_ONCE) {
            Rows rows;
            i64 target[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) {
                const bool there = nth + r * warps < count;
                const i64 entry = list * most + (there ? nth + r * warps : nth);
                rows.set_source(r, layer, __ldcg(copy_host + entry), there);
                target[r] = __ldcg(copy_device + entry);
            }
            rows.begin_loads(layer);
            rows.put(layer, target);
        }
    }
}
