// accept_or_replace on a GPU: one block verifies one draft. The result equals that of rejection.py bit by bit.
//
// Probabilities are integers in units of 1 / SHARE_ONE, so the order of their sums does not matter.
//
// Compile-time constants: those of places.cu, and SHARED_BYTES, as set by the launch.
#include "kept.cu"

namespace {

static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

constexpr double SHARE_ONE = 0x1p52;
constexpr u64 ACCEPTS = 2ull << 40, REPLACES = 3ull << 40;  // those of rejection.py

// The probabilities with which tokens are drawn from one row of logits.
struct Distribution {
    Logits logits;
    u64 last_kept;  // the place of the last token that is kept
    u64 min_weight;
    double shares_per_weight;

    __device__ __forceinline__ u64 share_of(float logit, unsigned id) const {
        if (logits.place_of(logit, id) < last_kept) return 0;
        const u64 weight = weight_of(logits.halvings_of(logit));
        return weight < min_weight ? 0 : static_cast<u64>(__dmul_rn(static_cast<double>(weight), shares_per_weight));
    }
    __device__ __forceinline__ u64 share_of(unsigned id) const { return share_of(logits.values[id], id); }
};

// If all logits are -inf, no token is kept.
__device__ __forceinline__ Distribution distribution_of(Shared &shared, Logits logits, const Rules &rules) {
    const u64 best = first_place(shared, logits);
    if (logits.key_at(best) == MINUS_INF) return {logits, ~0ull, 0, 0.0};
    logits.top = logit_of(logits.key_at(best));
    logits.halvings_per_unit = __ddiv_rn(LOG2_E, rules.temperature);
    const Masses masses = masses_of(shared, logits, rules);
    u64 kept = masses.all, last_kept = 0;
    if (masses.nucleus < masses.all) {
        const Located last = locate<true>(shared, logits, masses.nucleus, false, true);
        kept = last.before.mass + last.tokens.mass;
        last_kept = last.first;
    }
    kept = min(kept, masses.likely);
    return {logits, last_kept, rules.min_weight, __ddiv_rn(SHARE_ONE, static_cast<double>(kept))};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) accept_or_replace(
    const float *x, i64 x_stride, const float *draft_x, i64 draft_x_stride, i64 vocab,  // one block per row
    const i64 *drafts, i64 draft_stride,
    const double *temperature, i64 temperature_stride,
    const i64 *top_k, i64 top_k_stride,
    const double *top_p, i64 top_p_stride,
    const i64 *min_weight, i64 min_weight_stride,
    const u64 *keys, i64 key_stride,
    const u64 *positions, i64 position_stride,
    i64 *token_ids) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const i64 row = blockIdx.x, draft = drafts[row * draft_stride];
    if (threadIdx.x == 0) token_ids[row] = draft;
    if (draft < 0) return;  // there is no draft
    const Rules rules = {temperature[row * temperature_stride], static_cast<u64>(top_k[row * top_k_stride]),
                         top_p[row * top_p_stride], static_cast<u64>(min_weight[row * min_weight_stride])};
    const u64 key = keys[row * key_stride], position = positions[row * position_stride];
    const unsigned tokens = static_cast<unsigned>(vocab);
    const int id_bits = 32 - __clz(tokens);
    const Distribution p = distribution_of(shared, {x + row * x_stride, tokens, id_bits}, rules);
    const Distribution q = distribution_of(shared, {draft_x + row * draft_x_stride, tokens, id_bits}, rules);
    const double p_of_draft = static_cast<double>(p.share_of(static_cast<unsigned>(draft)));
    const double q_of_draft = static_cast<double>(q.share_of(static_cast<unsigned>(draft)));
    if (__dmul_rn(uniform_of(key, position + ACCEPTS), q_of_draft) < p_of_draft) return;

    // Sums what p has more than q: first over each range of ids, then up to each id of the range with the drawn unit.
    const auto more_of_p = [&](float logit, unsigned id) {
        const u64 of_p = p.share_of(logit, id), of_q = of_p ? q.share_of(id) : 0;
        return of_p > of_q ? of_p - of_q : 0;
    };
    const unsigned per_bin = (tokens + BINS - 1) / BINS;
    clear(shared.fine);
    __syncthreads();
    u64 all = 0;
    p.logits.for_each([&](float logit, unsigned id) {
        const u64 more = more_of_p(logit, id);
        if (more == 0) return;
        add(shared.fine, id / per_bin, more);
        all += more;
    });
    all = over_block(all, shared.of_warps, [](u64 a, u64 b) { return a + b; });
    if (all == 0) {  // p is q within rounding, or has no token
        if (threadIdx.x == 0 && p.last_kept == ~0ull) token_ids[row] = 0;
        return;
    }
    const u64 goal = drawn_unit(uniform_of(key, position + REPLACES), all) + 1;
    const Bin bin = find_bin(shared, shared.fine, goal, false, {0, 0});
    const unsigned first = bin.number * per_bin, last = min(tokens, first + per_bin);
    u64 before = bin.before.mass;
    for (unsigned start = first; start < last; start += THREADS) {
        const unsigned id = start + threadIdx.x;
        const u64 more = id < last ? more_of_p(p.logits.values[id], id) : 0;
        const u64 up_to = before + sum_before({more, 0}, shared.of_warps).mass;
        if (up_to < goal && goal <= up_to + more) token_ids[row] = id;
        __syncthreads();
        before += over_block(more, shared.of_warps, [](u64 a, u64 b) { return a + b; });
    }
}
