// Finds places in the order of a request's tokens without sorting them. One block does this for one request.
//
// Tokens are ordered by descending logit, and equal logits by ascending id. `locate` finds the token at which the number
// of tokens, or their mass, which is a sum of weights, reaches a goal. It starts from a histogram of all tokens over the
// distance to the likeliest one, and refines the bin that contains the place until it holds one token. Each refinement
// reads all logits once; there are at most MAX_LEVELS. All sums are integers, so their order does not matter.
//
// Compile-time constants: THREADS per block, a power of two from 64 to 1024; LOADS, the number of logits that a thread
// loads at a time.
#pragma once

typedef long long i64;
typedef unsigned long long u64;

namespace {

constexpr int WARPS = THREADS / 32;
constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS;
constexpr int BINS_PER_HALVING = 50;  // every weight is 0 from 41 halvings on, which is about bin 2048
constexpr double MAX_HALVINGS = 63.0, LOG2_E = 1.4426950408889634, WEIGHT_ONE = 1099511627776.0;
constexpr unsigned MINUS_INF = 0x007FFFFF;  // the key of -inf
constexpr int MAX_LEVELS = 5;  // a place has 32 bits for the key and at most 23 for the id; each level resolves 11
constexpr unsigned ALL = ~0u;

struct Sum {
    u64 mass, count;
};

// Masses are 64 bits wide, but atomics on shared memory are only fast with 32 bits.
struct Histogram {
    unsigned low[BINS], high[BINS], counts[BINS];
};

struct Bin {
    unsigned number;
    Sum before;  // the tokens of all earlier bins
    Sum tokens;  // the tokens of this bin
};

struct Shared {
    Histogram coarse, fine;
    Sum of_warps[WARPS];
    Bin bin;
    u64 first, last;
};

__device__ __forceinline__ Sum operator+(Sum a, Sum b) { return {a.mass + b.mass, a.count + b.count}; }

// Keys sort like logits. 0.0 and -0.0 have the same key.
__device__ __forceinline__ unsigned key_of(float logit) {
    const unsigned bits = __float_as_uint(logit);
    if (bits << 1 == 0) return 0x80000000;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

// The logits of one request. A place is a number for a token that combines key and id: earlier tokens have larger
// places.
struct Logits {
    const float *values;
    unsigned vocab;
    int id_bits;
    float top;                 // the largest logit, finite
    double halvings_per_unit;  // of the weight, per unit of logit

    __device__ __forceinline__ u64 place_of(float logit, unsigned id) const {
        return (static_cast<u64>(key_of(logit)) << id_bits) + ((1ull << id_bits) - 1 - id);
    }
    __device__ __forceinline__ unsigned key_at(u64 place) const { return static_cast<unsigned>(place >> id_bits); }
    __device__ __forceinline__ unsigned id_at(u64 place) const {
        return static_cast<unsigned>(((1ull << id_bits) - 1) & ~place);
    }

    __device__ __forceinline__ double halvings_of(float logit) const {
        const double halvings = __dmul_rn(static_cast<double>(__fsub_rn(top, logit)), halvings_per_unit);
        return halvings < MAX_HALVINGS ? halvings : MAX_HALVINGS;
    }
    __device__ __forceinline__ int coarse_bin_of(double halvings) const {
        return min(BINS - 1, static_cast<int>(halvings * BINS_PER_HALVING));
    }
    // Returns the smallest key whose coarse bin is at most `bin`. A larger key never has a larger coarse bin.
    __device__ unsigned first_key(unsigned bin) const {
        unsigned low = MINUS_INF, high = key_of(top);
        while (low < high) {
            const unsigned middle = low + (high - low) / 2;
            if (coarse_bin_of(halvings_of(logit_of(middle))) <= static_cast<int>(bin)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }

    // Calls use(logit, id) for every token.
    template <class Use> __device__ __forceinline__ void for_each(Use use) const {
        for (unsigned start = threadIdx.x; start < vocab; start += THREADS * LOADS) {
            float loaded[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                if (start + i * THREADS < vocab) loaded[i] = values[start + i * THREADS];
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                if (start + i * THREADS < vocab) use(loaded[i], start + i * THREADS);
            }
        }
    }
};

// Returns 2^(40 - halvings), rounded down, with the operations of reference.py. None of them may be fused.
__device__ __forceinline__ u64 weight_of(double halvings) {
    const double coefficients[] = {
        1.0,
        0.6931471805599453,
        0.24022650695910072,
        0.05550410866482158,
        0.009618129107628477,
        0.0013333558146428443,
        0.0001540353039338161,
        1.5252733804059841e-05,
        1.321548679014431e-06,
    };
    const double whole = rint(halvings), rest = __dsub_rn(whole, halvings);
    double power = coefficients[8];
#pragma unroll
    for (int i = 7; i >= 0; --i) power = __dadd_rn(__dmul_rn(power, rest), coefficients[i]);
    return static_cast<u64>(__dmul_rn(power, WEIGHT_ONE)) >> static_cast<int>(whole);
}

__device__ __forceinline__ void clear(Histogram &histogram) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        histogram.low[bin] = histogram.high[bin] = histogram.counts[bin] = 0;
    }
}

__device__ __forceinline__ void add(Histogram &histogram, unsigned bin, u64 weight) {
    const unsigned low = static_cast<unsigned>(weight), before = atomicAdd(&histogram.low[bin], low);
    const unsigned high = static_cast<unsigned>(weight >> 32) + (before + low < before);  // with the carry
    if (high) atomicAdd(&histogram.high[bin], high);
    atomicAdd(&histogram.counts[bin], 1u);
}

// Returns the sums over the bins that belong to earlier threads. The caller must pass a barrier before `of_warps` is
// used again.
__device__ __forceinline__ Sum sum_before(Sum mine, Sum *of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sum sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Sum below = {__shfl_up_sync(ALL, sum.mass, step), __shfl_up_sync(ALL, sum.count, step)};
        if (lane >= step) sum = sum + below;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    sum = {sum.mass - mine.mass, sum.count - mine.count};
    for (int i = 0; i < warp; ++i) sum = sum + of_warps[i];
    return sum;
}

// Combines one number per thread. Contains two barriers.
template <class Combine> __device__ __forceinline__ u64 over_block(u64 value, Sum *of_warps, Combine combine) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value = combine(value, __shfl_sync(ALL, value, (threadIdx.x % 32) ^ step));
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32].mass = value;
    __syncthreads();
    value = of_warps[0].mass;
    for (int i = 1; i < WARPS; ++i) value = combine(value, of_warps[i].mass);
    __syncthreads();
    return value;
}

// Returns the bin in which the mass, or the number of tokens, reaches `goal`. `before`: the tokens before all bins.
__device__ __forceinline__ Bin find_bin(Shared &shared, const Histogram &histogram, u64 goal, bool by_count,
                                        Sum before) {
    constexpr int PER_THREAD = BINS / THREADS;
    Sum tokens[PER_THREAD], mine = {0, 0};
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int bin = threadIdx.x * PER_THREAD + i;
        tokens[i] = {(static_cast<u64>(histogram.high[bin]) << 32) + histogram.low[bin], histogram.counts[bin]};
        mine = mine + tokens[i];
    }
    Sum sum = before + sum_before(mine, shared.of_warps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const Sum next = sum + tokens[i];
        if ((by_count ? sum.count : sum.mass) < goal && goal <= (by_count ? next.count : next.mass)) {
            shared.bin = {static_cast<unsigned>(threadIdx.x * PER_THREAD + i), sum, tokens[i]};
        }
        sum = next;
    }
    __syncthreads();
    return shared.bin;
}

// Tokens at the places [first, last], which have the same logit unless there is only one token.
struct Located {
    u64 first, last;
    Sum before, tokens;
};

// Finds the token at which the mass, or the number of tokens, reaches `goal`: alone if `alone` is set, otherwise
// perhaps with others of the same logit. `shared.coarse` must be complete. Tokens of weight 0 do not count. If not
// `weighted`, every weight is 1.
template <bool weighted>
__device__ __forceinline__ Located locate(Shared &shared, const Logits &logits, u64 goal, bool by_count, bool alone) {
    Bin bin = find_bin(shared, shared.coarse, goal, by_count, {0, 0});
    // Two threads of different warps search at the same time.
    if (threadIdx.x == 0) shared.first = static_cast<u64>(logits.first_key(bin.number)) << logits.id_bits;
    if (threadIdx.x == 32) {
        const u64 next = bin.number ? logits.first_key(bin.number - 1) : key_of(logits.top) + 1ull;
        shared.last = (next << logits.id_bits) - 1;
    }
    __syncthreads();
    u64 first = shared.first, last = shared.last;
    for (int level = 0; level < MAX_LEVELS; ++level) {
        if (bin.tokens.count == 1 || (!alone && logits.key_at(first) == logits.key_at(last))) break;
        const int shift = max(0, 64 - __clzll(last - first) - BIN_BITS);
        clear(shared.fine);
        __syncthreads();
        logits.for_each([&](float logit, unsigned id) {
            const u64 place = logits.place_of(logit, id);
            if (place < first || place > last) return;
            const u64 weight = weighted ? weight_of(logits.halvings_of(logit)) : 1;
            if (weight > 0) add(shared.fine, static_cast<unsigned>((last - place) >> shift), weight);
        });
        __syncthreads();
        bin = find_bin(shared, shared.fine, goal, by_count, bin.before);
        last -= static_cast<u64>(bin.number) << shift;
        first = max(first, last - min(last, (1ull << shift) - 1));
    }
    return {first, last, bin.before, bin.tokens};
}

// Returns the first place: that of the likeliest token. Contains two barriers.
__device__ __forceinline__ u64 first_place(Shared &shared, const Logits &logits) {
    u64 best = 0;
    logits.for_each([&](float logit, unsigned id) { best = max(best, logits.place_of(logit, id)); });
    return over_block(best, shared.of_warps, [](u64 a, u64 b) { return max(a, b); });
}

}  // namespace
