// swap_in's copy on a GPU: a bounded grid over the rows that are to be copied.
//
// Constants given by the compilation: THREADS of a block, a multiple of 32; those of row_copy.cu.
#include "row_copy.cu"

namespace {

constexpr int LISTS_OF_LANE = 4;  // batch rows whose counts one lane holds

}  // namespace

// The nth row to be copied, over all lists in order, is the business of warp n % warps. So rows that are near each
// other on the host are read at about the same time, which spares address translations.
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const i64 *copy_host, const i64 *copy_device,  // [batch, most]
    const int *copy_counts,                        // [batch]: entries of each list; fewer than 2^31 in all
    i64 batch, i64 most, const u8 *host, i64 host_stride, u8 *device, i64 device_stride, i64 row_bytes) {
    const int lane = threadIdx.x % 32;
    const unsigned warps = gridDim.x * WARPS;
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const Layer layer = {host, host_stride, device, device_stride, static_cast<int>(row_bytes)};
    wait_for_earlier_launches();
    unsigned passed = 0;  // rows in the lists before `start`
    for (int start = 0; start < batch; start += 32 * LISTS_OF_LANE) {
        unsigned count[LISTS_OF_LANE], mine = 0;
#pragma unroll
        for (int i = 0; i < LISTS_OF_LANE; ++i) {
            const int list = start + lane * LISTS_OF_LANE + i;
            count[i] = list < batch ? __ldcg(copy_counts + list) : 0;
            mine += count[i];
        }
        unsigned end = mine;  // rows in the lists of this lane and those before it
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned below = __shfl_up_sync(ALL, end, step);
            end += lane >= step ? below : 0;
        }
        const unsigned total = __shfl_sync(ALL, end, 31);
        if (total == 0) continue;
        for (unsigned nth = (warp + warps - passed % warps) % warps; nth < total; nth += warps * ROWS_AT_ONCE) {
            Rows rows;
            i64 target[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) {
                const bool there = nth + r * warps < total;
                const unsigned index = there ? nth + r * warps : nth;
                const int owner = __popc(__ballot_sync(ALL, index >= end));  // the lane in whose lists it is
                unsigned within = index - __shfl_sync(ALL, end - mine, owner);
                int list = 0;
#pragma unroll
                for (int i = 0; i < LISTS_OF_LANE - 1; ++i) {
                    const unsigned length = __shfl_sync(ALL, count[i], owner);
                    const bool later = list == i && within >= length;
                    within -= later ? length : 0;
                    list += later;
                }
                const i64 entry = (start + owner * LISTS_OF_LANE + list) * most + within;
                rows.come_from(r, layer, __ldcg(copy_host + entry), there);
                target[r] = __ldcg(copy_device + entry);
            }
            rows.ask(layer);
            rows.put(layer, target);
        }
        passed += total;
    }
}
