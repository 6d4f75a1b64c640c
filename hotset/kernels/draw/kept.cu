// Which tokens of a request top-k, top-p and min-p keep. Each of them keeps a prefix of the order of tokens.
//
// Compile-time constants: those of places.cu.
#include "places.cu"

namespace {

// The sampling parameters of one request: those of `DrawRules`.
struct Rules {
    double temperature;
    u64 top_k;
    double top_p;
    u64 min_weight;
};

// The random number of a draw, in [0, 1): that of random_numbers.py.
__device__ __forceinline__ double uniform_of(u64 key, u64 position) {
    u64 word = key + position * 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    word ^= word >> 31;
    return static_cast<double>(word >> 11) * 0x1p-53;
}

// Returns the number of the unit of `mass` that a random number in [0, 1) falls on.
__device__ __forceinline__ u64 drawn_unit(double uniform, u64 mass) {
    return min(static_cast<u64>(__dmul_rn(uniform, static_cast<double>(mass))), mass - 1);
}

// Returns the mass of all tokens up to and including the one at which the mass, or the number of tokens, reaches `goal`.
__device__ __forceinline__ u64 mass_up_to(Shared &shared, const Logits &logits, u64 goal, bool by_count) {
    const Located found = locate<true>(shared, logits, goal, by_count, false);
    const u64 weight = found.tokens.mass / found.tokens.count;
    const u64 tokens = by_count ? goal - found.before.count : (goal - found.before.mass + weight - 1) / weight;
    return found.before.mass + tokens * weight;
}

struct Masses {
    u64 all;      // of all tokens
    u64 likely;   // of the tokens that min-p keeps
    u64 top;      // of the tokens that top-k keeps
    u64 nucleus;  // top-p keeps the tokens up to the one at which the mass reaches this
};

// Completes `shared.coarse` and finds the masses. `logits.top` must be finite.
__device__ __forceinline__ Masses masses_of(Shared &shared, const Logits &logits, const Rules &rules) {
    clear(shared.coarse);
    __syncthreads();
    Sum all = {0, 0};
    u64 likely = 0;
    logits.for_each([&](float logit, unsigned) {
        const double halvings = logits.halvings_of(logit);
        const u64 weight = weight_of(halvings);
        if (weight == 0) return;
        add(shared.coarse, logits.coarse_bin_of(halvings), weight);
        all = all + Sum{weight, 1};
        if (weight >= rules.min_weight) likely += weight;
    });
    const auto plus = [](u64 a, u64 b) { return a + b; };
    all = {over_block(all.mass, shared.of_warps, plus), over_block(all.count, shared.of_warps, plus)};
    likely = over_block(likely, shared.of_warps, plus);
    const u64 top = rules.top_k < all.count ? mass_up_to(shared, logits, rules.top_k, true) : all.mass;
    // The product may be rounded to more than `top`, which would keep tokens beyond top-k.
    const u64 nucleus = static_cast<u64>(ceil(__dmul_rn(rules.top_p, static_cast<double>(top))));
    return {all.mass, likely, top, rules.top_p < 1.0 ? min(nucleus, top) : top};
}

}  // namespace
