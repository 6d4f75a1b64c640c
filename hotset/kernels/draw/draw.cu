// draw on a GPU: one block draws the token of one request. The result equals that of reference.py bit by bit.
//
// Each of top-k, top-p and the random number determines a place in the order of the tokens.
//
// Compile-time constants: those of places.cu, and SHARED_BYTES, as set by the launch.
#include "kept.cu"

namespace {

static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    const float *x, i64 row_stride, i64 vocab,  // one block per row
    const double *temperature, i64 temperature_stride,
    const i64 *top_k, i64 top_k_stride,
    const double *top_p, i64 top_p_stride,
    const i64 *min_weight, i64 min_weight_stride,
    const u64 *keys, i64 key_stride,
    const u64 *positions, i64 position_stride,
    i64 *token_ids) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const i64 request = blockIdx.x;
    Logits logits = {x + request * row_stride, static_cast<unsigned>(vocab), 32 - __clz(static_cast<unsigned>(vocab))};

    const u64 best = first_place(shared, logits);
    if (threadIdx.x == 0) token_ids[request] = logits.id_at(best);
    const u64 limit = static_cast<u64>(top_k[request * top_k_stride]);
    if (limit == 1 || logits.key_at(best) == MINUS_INF) return;  // greedy, or all logits are -inf

    const Rules rules = {temperature[request * temperature_stride], limit, top_p[request * top_p_stride],
                         static_cast<u64>(min_weight[request * min_weight_stride])};
    logits.top = logit_of(logits.key_at(best));
    logits.halvings_per_unit = __ddiv_rn(LOG2_E, rules.temperature);
    const Masses masses = masses_of(shared, logits, rules);
    u64 kept = masses.top;
    if (masses.nucleus < masses.top) kept = mass_up_to(shared, logits, masses.nucleus, false);
    kept = min(kept, masses.likely);
    const double uniform = uniform_of(keys[request * key_stride], positions[request * position_stride]);
    const Located drawn = locate<true>(shared, logits, drawn_unit(uniform, kept) + 1, false, true);
    logits.for_each([&](float logit, unsigned id) {
        const u64 place = logits.place_of(logit, id);
        if (place < drawn.first || place > drawn.last) return;
        if (weight_of(logits.halvings_of(logit)) > 0) token_ids[request] = id;
    });
}
