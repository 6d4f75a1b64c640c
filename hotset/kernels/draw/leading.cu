// leading on a GPU: one block lists the first tokens of one request.
//
// Compile-time constants: those of places.cu; MAX_COUNT; and SHARED_BYTES, as set by the launch.
#include "places.cu"

namespace {

struct Listed {
    Shared places;
    u64 first[MAX_COUNT];  // the places of the first tokens, in any order
    unsigned count;
};
static_assert(sizeof(Listed) == SHARED_BYTES, "the launch and the kernel disagree about the size of Listed");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) leading(
    const float *x, i64 row_stride, i64 vocab,  // one block per row
    i64 count,                                  // in [1, min(vocab, MAX_COUNT)]
    i64 *token_ids) {                           // [rows, count], written: likeliest first
    extern __shared__ int4 shared_memory[];
    Listed &listed = *reinterpret_cast<Listed *>(shared_memory);
    Shared &shared = listed.places;
    const i64 request = blockIdx.x;
    Logits logits = {x + request * row_stride, static_cast<unsigned>(vocab), 32 - __clz(static_cast<unsigned>(vocab))};
    // If all logits are -inf, the least finite number takes the place of the largest logit.
    logits.top = logit_of(max(logits.key_at(first_place(shared, logits)), MINUS_INF + 1));
    logits.halvings_per_unit = LOG2_E;
    clear(shared.coarse);
    if (threadIdx.x == 0) listed.count = 0;
    __syncthreads();
    logits.for_each([&](float logit, unsigned) {
        add(shared.coarse, logits.coarse_bin_of(logits.halvings_of(logit)), 1);
    });
    __syncthreads();
    const Located last = locate<false>(shared, logits, static_cast<u64>(count), true, true);
    logits.for_each([&](float logit, unsigned id) {
        const u64 place = logits.place_of(logit, id);
        if (place >= last.first) listed.first[atomicAdd(&listed.count, 1u)] = place;
    });
    __syncthreads();
    for (i64 i = threadIdx.x; i < count; i += THREADS) {
        i64 rank = 0;
        for (i64 j = 0; j < count; ++j) rank += listed.first[j] > listed.first[i];
        token_ids[request * count + rank] = logits.id_at(listed.first[i]);
    }
}
