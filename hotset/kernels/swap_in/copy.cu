// swap_in's copy on a GPU: a bounded grid over the rows that are to be copied.
//
// Constants given by the compilation: THREADS of a block, a multiple of 32; those of row_copy.cu.
#include "row_copy.cu"

// Some lists at a time, in order, each by a team of blocks; a row of a list is the business of warp n % warps. So rows
// that are near each other on the host are read at about the same time, which spares address translations.
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const i64 *copy_host, const i64 *copy_device,  // [batch, most]
    const int *copy_counts,                        // [batch]: entries of each list
    i64 batch, i64 most, i64 team,                 // blocks of a team: they are neighbours in the grid
    const u8 *host, i64 host_stride, u8 *device, i64 device_stride, i64 row_bytes) {
    const unsigned warps = team * WARPS;
    const unsigned warp = blockIdx.x % team * WARPS + threadIdx.x / 32;
    const Layer layer = {host, host_stride, device, device_stride, static_cast<int>(row_bytes)};
    wait_for_earlier_launches();
    for (i64 list = blockIdx.x / team; list < batch; list += gridDim.x / team) {
        const unsigned count = __ldcg(copy_counts + list);
        for (unsigned nth = warp; nth < count; nth += warps * ROWS_AT_ONCE) {
            Rows rows;
            i64 target[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) {
                const bool there = nth + r * warps < count;
                const i64 entry = list * most + (there ? nth + r * warps : nth);
                rows.come_from(r, layer, __ldcg(copy_host + entry), there);
                target[r] = __ldcg(copy_device + entry);
            }
            rows.ask(layer);
            rows.put(layer, target);
        }
    }
}
