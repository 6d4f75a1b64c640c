// draw on a GPU: one block draws the token of one request. The result equals that of reference.py bit by bit.
//
// Each of top-k, top-p and the random number determines a place in the order of the tokens.
//
// Compile-time constants: those of places.cu, and SHARED_BYTES, as set by the launch.
#include "places.cu"

namespace {

static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// The random number of a draw, in [0, 1): that of random_numbers.py.
__device__ __forceinline__ double uniform_of(u64 key, u64 position) {
    u64 word = key + position * 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    word ^= word >> 31;
    return static_cast<double>(word >> 11) * 0x1p-53;
}

// Returns the mass of all tokens up to and including the one at which the mass, or the number of tokens, reaches `goal`.
__device__ __forceinline__ u64 mass_up_to(Shared &shared, const Logits &logits, u64 goal, bool by_count) {
    const Located found = locate<true>(shared, logits, goal, by_count, false);
    const u64 weight = found.tokens.mass / found.tokens.count;
    const u64 tokens =
        by_count ? goal - found.before.count : (goal - found.before.mass + weight - 1) / weight;
    return found.before.mass + tokens * weight;
}

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

    logits.top = logit_of(logits.key_at(best));
    logits.halvings_per_unit = __ddiv_rn(LOG2_E, temperature[request * temperature_stride]);
    const u64 least_weight = static_cast<u64>(min_weight[request * min_weight_stride]);
    clear(shared.coarse);
    __syncthreads();
    Sum all = {0, 0};
    u64 likely = 0;  // the mass of the tokens that min_p keeps
    logits.for_each([&](float logit, unsigned) {
        const double halvings = logits.halvings_of(logit);
        const u64 weight = weight_of(halvings);
        if (weight == 0) return;
        add(shared.coarse, logits.coarse_bin_of(halvings), weight);
        all = all + Sum{weight, 1};
        if (weight >= least_weight) likely += weight;
    });
    const auto plus = [](u64 a, u64 b) { return a + b; };
    all = {over_block(all.mass, shared.of_warps, plus), over_block(all.count, shared.of_warps, plus)};
    likely = over_block(likely, shared.of_warps, plus);

    const u64 base = limit < all.count ? mass_up_to(shared, logits, limit, true) : all.mass;
    const double share = top_p[request * top_p_stride];
    u64 kept = base;
    if (share < 1.0) {
        const u64 nucleus = static_cast<u64>(ceil(__dmul_rn(share, static_cast<double>(base))));
        if (nucleus < base) kept = mass_up_to(shared, logits, nucleus, false);
    }
    kept = min(kept, likely);
    const double uniform = uniform_of(keys[request * key_stride], positions[request * position_stride]);
    const u64 target = static_cast<u64>(__dmul_rn(uniform, static_cast<double>(kept)));
    const Located drawn = locate<true>(shared, logits, min(target, kept - 1) + 1, false, true);
    logits.for_each([&](float logit, unsigned id) {
        const u64 place = logits.place_of(logit, id);
        if (place < drawn.first || place > drawn.last) return;
        if (weight_of(logits.halvings_of(logit)) > 0) token_ids[request] = id;
    });
}
