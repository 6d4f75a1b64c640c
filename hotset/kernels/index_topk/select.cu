// Selects the k best scores of each query, exactly, in one launch.
//
// Compile-time constants:
//   THREADS  of a block
//   CLUSTER  blocks that share a query
//   WORDS    a thread has at most 32 * WORDS scores
//   BINS     of a histogram, a multiple of THREADS
//   SHARED_BYTES  before the scores that are held, a multiple of 16
//
// A block has an equal share of the positions of its query, and each of its warps a part of that share, in order of
// position. Every thread reads its scores once and holds as many of them as fit in shared memory.
//
// 1. Scores that are likely to be selected are counted in bins, evenly spaced over an interval in which the k-th best score
//    is likely to be.
// 2. The bin of the k-th score is found. If it is not in the interval, or if the bin has more than CANDIDATES scores, keys
//    (below) are counted instead, in finer and finer bins. This is rare. Bins affect only the time, because a better score
//    never has a lower bin.
// 3. The scores of that bin, the candidates, are compared with each other. This gives the worst score that is selected, and
//    the last position at which it is. If there are too many candidates, all have the same score, and positions decide.
// 4. Every warp knows how many positions the warps before it select, and writes its own.
//
// Loops are not unrolled where that is not faster. The code of a kernel is read from memory again in every layer, whose weights
// evict it from the L2 cache.
//
// The key of a score is an integer that is larger for a better score. Scores that cannot be selected (-inf and NaN) have the
// key 0. 0.0 and -0.0 have the same key.
#include "../block.cu"

namespace {

constexpr unsigned CANDIDATES = THREADS;  // a thread ranks at most one
constexpr unsigned LANE_SCORES = 4, WARP_SCORES = 32 * LANE_SCORES;
constexpr unsigned WORD_GROUPS = 32 / LANE_SCORES;  // of LANE_SCORES adjacent scores, whose bits are in one word
constexpr unsigned READ_SOON = THREADS / 16;        // candidates of a block that others read before they know how many it has
constexpr float MIN_SPAN = 1e-30f, MAX_MAGNITUDE = 1e30f;
static_assert(BINS % THREADS == 0, "every thread sums the same number of bins");

// After a barrier of the cluster, its blocks read each other's histograms, lists and numbers.
struct Shared {
    unsigned histogram[BINS];
    unsigned listed;  // number of candidates of this block, including those that did not fit
    unsigned keys[CANDIDATES], positions[CANDIDATES];          // those of this block, in any order
    unsigned all_keys[CANDIDATES], all_positions[CANDIDATES];  // those of the cluster
    unsigned better[WARPS], inside[WARPS];  // by warp: scores above the bin of the k-th, and in it
    unsigned all_better;                    // of this block
    unsigned totals[WARPS];
    int cut_bin;                    // that of the k-th score; EMPTY: it is in none
    unsigned cut_before, cut_size;  // how many scores are above it, and in it
    unsigned worst_key, last_position;  // of what is selected
    unsigned earlier;                   // positions that are selected in earlier blocks, of the candidates
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

// A bit for each score of a thread.
struct Bits {
    unsigned words[WORDS];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < WORDS; ++n) words[n] = 0;
    }
    __device__ __forceinline__ unsigned count() const {
        unsigned sum = 0;
#pragma unroll
        for (int n = 0; n < WORDS; ++n) sum += __popc(words[n]);
        return sum;
    }
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000u); }

__device__ __forceinline__ unsigned key_of(float score) {
    const unsigned bits = __float_as_uint(score);
    if (!(score > -infinity())) return 0;
    if (score == 0) return 1u << 31;
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The scores of a thread: in groups of LANE_SCORES, which are WARP_SCORES positions apart.
struct Scores {
    const float *memory;  // of the query
    float *held;          // of the block; a thread reads only what it has written itself
    unsigned first;       // position of the block's first score
    unsigned capacity;    // number of those that are held
    unsigned own;         // position of this thread's first score
    unsigned last;        // end of this warp's positions
    unsigned groups;      // of this warp's threads

    __device__ __forceinline__ unsigned position_of(unsigned n) const {
        return own + n / LANE_SCORES * WARP_SCORES + n % LANE_SCORES;
    }
    __device__ __forceinline__ float operator[](unsigned n) const {
        const unsigned position = position_of(n);
        return position - first < capacity ? held[position - first] : memory[position];
    }
    // Begins to read what can be held.
    __device__ __forceinline__ void begin_to_hold() const {
#pragma unroll 1
        for (unsigned position = own; position < own + groups * WARP_SCORES && position - first < capacity;
             position += WARP_SCORES) {
            begin_small_copy(held + position - first, memory + position);
        }
    }
    // Returns which scores are at least `low`.
    __device__ __forceinline__ Bits at_least(float low) const {
        Bits bits;
#pragma unroll
        for (unsigned word = 0; word < WORDS; ++word) {
            bits.words[word] = 0;
#pragma unroll 4
            for (unsigned group = word * WORD_GROUPS; group < min(groups, (word + 1) * WORD_GROUPS); ++group) {
                const unsigned position = own + group * WARP_SCORES;
                const float *from = position - first < capacity ? held + position - first : memory + position;
                const uint4 four = *reinterpret_cast<const uint4 *>(from);
                unsigned found = __uint_as_float(four.x) >= low;
                found |= static_cast<unsigned>(__uint_as_float(four.y) >= low) << 1;
                found |= static_cast<unsigned>(__uint_as_float(four.z) >= low) << 2;
                found |= static_cast<unsigned>(__uint_as_float(four.w) >= low) << 3;
                if (position + LANE_SCORES > last) found &= position < last ? (1u << last - position) - 1 : 0;
                bits.words[word] |= found << group % WORD_GROUPS * LANE_SCORES;
            }
        }
        return bits;
    }
    // Calls `visit(word, bit, score)` for the scores of this thread. The scores of positions that the warp does not have are
    // NaN.
    template <class Visit> __device__ __forceinline__ void visit(Visit visit) const {
#pragma unroll
        for (unsigned word = 0; word < WORDS; ++word) {
#pragma unroll 1
            for (unsigned bit = 0; bit < 32 && word * 32 + bit < groups * LANE_SCORES; ++bit) {
                const unsigned n = word * 32 + bit;
                visit(word, bit, position_of(n) < last ? (*this)[n] : __uint_as_float(~0u));
            }
        }
    }
    // Calls `visit(word, bit, score)` for the scores whose bits are set.
    template <class Visit> __device__ __forceinline__ void visit(const Bits &bits, Visit visit) const {
#pragma unroll
        for (unsigned word = 0; word < WORDS; ++word) {
#pragma unroll 1
            for (unsigned left = bits.words[word]; left; left &= left - 1) {
                const unsigned bit = 31 - __clz(left & ~(left - 1));
                visit(word, bit, (*this)[word * 32 + bit]);
            }
        }
    }
};

// Bins of scores from `low` on.
struct ScoreBins {
    float low, per_score;
    __device__ __forceinline__ unsigned bin_of(float score) const {
        return static_cast<unsigned>(fminf((score - low) * per_score, BINS - 1));
    }
};

// Returns the bins for the k-th of `length` scores. By Cantelli's inequality, at most n / (1 + c^2) of n values are c or
// more standard deviations above their mean, so that the k-th is at most sqrt((n - k) / k) of them above it. The lower end is
// a guess: of a normal distribution, the k-th is well above it.
__device__ __forceinline__ ScoreBins likely_bins(const float2 *moments, int shares, unsigned length, unsigned k) {
    float sum = 0, squares = 0;
#pragma unroll 4
    for (int share = threadIdx.x % 32; share < shares; share += 32) {
        const float2 moment = moments[share];
        sum += moment.x, squares += moment.y;
    }
    const float count = static_cast<float>(length), odds = sqrtf((count - k) / k);
    const float lowest = fmaxf(logf(odds) - 0.75f, -1 / odds);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(ALL, sum, step), squares += __shfl_xor_sync(ALL, squares, step);
    }
    const float mean = sum / count;
    // If the mean is far larger than the deviation, this difference is a rounding error. Hence the lower bound.
    const float deviation = sqrtf(fmaxf(squares / count - mean * mean, 1e-6f * mean * mean));
    const float low = mean + deviation * lowest, span = deviation * (odds - lowest);
    const bool usable = fabsf(low) < MAX_MAGNITUDE && span > MIN_SPAN && span < MAX_MAGNITUDE;
    if (!usable) return {infinity(), 0};  // hardly a score is counted
    return {low, BINS / span};
}

__device__ __forceinline__ void wait_for_cluster() {
    if (CLUSTER > 1) {
        arrive_in_cluster(true);
        wait_in_cluster();
    } else {
        __syncthreads();
    }
}

template <class T> __device__ __forceinline__ T in_member(unsigned member, const T *address) {
    return CLUSTER > 1 ? read_in_block(member, address) : *address;
}

// Finds the bin of the k-th best score, if `before` better ones are not in the histograms of the cluster. Every block does
// this for itself.
__device__ __forceinline__ void find_cut(Shared &shared, unsigned k, unsigned before) {
    constexpr int EACH = BINS / THREADS;
    wait_for_cluster();
    if (threadIdx.x == 0) shared.cut_bin = EMPTY;
    unsigned counts[EACH], sum = 0;  // from the highest bin of this thread downwards
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        unsigned of_member[CLUSTER];
#pragma unroll
        for (unsigned member = 0; member < CLUSTER; ++member) {
            of_member[member] = in_member(member, shared.histogram + BINS - 1 - (threadIdx.x * EACH + n));
        }
        counts[n] = 0;
#pragma unroll
        for (unsigned member = 0; member < CLUSTER; ++member) counts[n] += of_member[member];
        sum += counts[n];
    }
    unsigned above = before + sum_threads(sum, shared.totals).before;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        if (above < k && above + counts[n] >= k) {
            shared.cut_bin = BINS - 1 - (threadIdx.x * EACH + n), shared.cut_before = above, shared.cut_size = counts[n];
        }
        above += counts[n];
    }
    __syncthreads();
}

// Counts the keys in [lowest, highest] of this block in bins of 2^shift keys.
__device__ __forceinline__ void count_keys(Shared &shared, const Scores &scores, unsigned lowest, unsigned highest,
                                           unsigned shift) {
    wait_for_cluster();  // other blocks have read this histogram
    fill<BINS>(shared.histogram, 0);
    __syncthreads();
    scores.visit([&](unsigned, unsigned, float score) {
        const unsigned key = key_of(score);
        if (key >= lowest && key <= highest) atomicAdd(shared.histogram + (key - lowest >> shift), 1u);
    });
}

// Adds a candidate to the list of this block, if there is room.
__device__ __forceinline__ void list(Shared &shared, unsigned key, unsigned position) {
    const unsigned place = atomicAdd(&shared.listed, 1u);
    if (place < CANDIDATES) shared.keys[place] = key, shared.positions[place] = position;
}

// Narrows an interval of keys around the k-th score until it has at most CANDIDATES scores, or only equal ones. Sets the bits
// of the scores above it and of those in it. If fewer than k scores can be selected, all of them are above it.
__device__ __forceinline__ void narrow(Shared &shared, const Scores &scores, unsigned k, Bits &better, Bits &inside) {
    unsigned lowest = 1, highest = ~0u, before = 0;  // key 0 cannot be selected
#pragma unroll 1
    for (unsigned size = ~0u; size > CANDIDATES && lowest < highest; size = shared.cut_size) {
        unsigned shift = 0;
        while (highest - lowest >> shift >= BINS) ++shift;
        count_keys(shared, scores, lowest, highest, shift);
        find_cut(shared, k, before);
        if (shared.cut_bin == EMPTY) {
            lowest = highest = 0;
            break;
        }
        before = shared.cut_before;
        lowest += static_cast<unsigned>(shared.cut_bin) << shift;
        highest = lowest + min(highest - lowest, (1u << shift) - 1);
    }
    better.clear(), inside.clear();
    scores.visit([&](unsigned word, unsigned bit, float score) {
        const unsigned key = key_of(score);
        if (key > highest) better.words[word] |= 1u << bit;
        if (key >= lowest && key <= highest && key) inside.words[word] |= 1u << bit;
    });
}

// What the blocks of a cluster have found. All is read at the same time, because reads of other blocks take long.
struct Found {
    unsigned better[CLUSTER], listed[CLUSTER];
    unsigned keys[CLUSTER], positions[CLUSTER];  // candidate number `threadIdx.x` of each block, if this is below READ_SOON

    __device__ __forceinline__ void read(const Shared &shared) {
#pragma unroll
        for (unsigned member = 0; member < CLUSTER; ++member) {
            better[member] = in_member(member, &shared.all_better);
            listed[member] = in_member(member, &shared.listed);
            keys[member] = positions[member] = 0;
            if (threadIdx.x >= READ_SOON) continue;
            keys[member] = in_member(member, shared.keys + threadIdx.x);
            positions[member] = in_member(member, shared.positions + threadIdx.x);
        }
    }
};

// Ranks the candidates of the cluster, of which `needed` are selected.
__device__ __forceinline__ void rank_candidates(Shared &shared, const Found &found, unsigned needed, unsigned first,
                                                unsigned warp_share) {
    unsigned count = 0;
#pragma unroll
    for (unsigned member = 0; member < CLUSTER; ++member) {
        if (threadIdx.x < found.listed[member]) {
            const bool read = threadIdx.x < READ_SOON;
            shared.all_keys[count + threadIdx.x] =
                read ? found.keys[member] : in_member(member, shared.keys + threadIdx.x);
            shared.all_positions[count + threadIdx.x] =
                read ? found.positions[member] : in_member(member, shared.positions + threadIdx.x);
        }
        count += found.listed[member];
    }
    __syncthreads();
    if (threadIdx.x < count) {
        const unsigned key = shared.all_keys[threadIdx.x], position = shared.all_positions[threadIdx.x];
        unsigned rank = 0;
#pragma unroll 4
        for (unsigned other = 0; other < count; ++other) {
            const unsigned its_key = shared.all_keys[other];
            rank += its_key > key || (its_key == key && shared.all_positions[other] < position);
        }
        if (rank == needed - 1) shared.worst_key = key, shared.last_position = position;
        const unsigned warp = (position - first) / warp_share;  // of this block, unless the position is another's
        if (rank < needed && position < first) atomicAdd(&shared.earlier, 1u);
        if (rank < needed && position >= first && warp < WARPS) atomicAdd(shared.better + warp, 1u);
    }
    __syncthreads();
}

// Selects the first `needed` of the candidates, which all have the same score.
__device__ __forceinline__ void take_first(Shared &shared, const Scores &scores, const Bits &inside, unsigned rank,
                                           unsigned needed) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned before = 0;
#pragma unroll 1
    for (unsigned member = 0; member < rank; ++member) before += in_member(member, &shared.listed);
    if (threadIdx.x == 0) shared.earlier = min(before, needed);
#pragma unroll 1
    for (int other = 0; other < warp; ++other) before += shared.inside[other];
    const unsigned own = shared.inside[warp], left = before < needed ? min(own, needed - before) : 0;
    if (lane == 0) shared.better[warp] += left;
    // The warp with the last one of all tells the blocks its position.
    if (left && before + left == needed) {
        unsigned seen = 0;
#pragma unroll 1
        for (unsigned group = 0; group < scores.groups; ++group) {
            unsigned mine = 0;
#pragma unroll
            for (unsigned word = 0; word < WORDS; ++word) {
                if (word == group / WORD_GROUPS) mine = inside.words[word] >> group % WORD_GROUPS * LANE_SCORES & 15;
            }
            unsigned up_to = __popc(mine);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned lower = __shfl_up_sync(ALL, up_to, step);
                up_to += lane >= step ? lower : 0;
            }
            unsigned place = seen + up_to - __popc(mine);
#pragma unroll 1
            for (unsigned n = 0; n < LANE_SCORES; ++n) {
                if (!(mine >> n & 1) || ++place != left) continue;
                const unsigned position = scores.position_of(group * LANE_SCORES + n), key = key_of(scores.memory[position]);
#pragma unroll 1
                for (unsigned member = 0; member < CLUSTER; ++member) {
                    if (CLUSTER > 1) {
                        write_in_block(member, &shared.last_position, position);
                        write_in_block(member, &shared.worst_key, key);
                    } else {
                        shared.last_position = position, shared.worst_key = key;
                    }
                }
            }
            seen += __shfl_sync(ALL, up_to, 31);
        }
    }
    wait_for_cluster();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) IN_CLUSTERS select_best(
    const float *values,   // [queries, value_stride]; a query has room for a multiple of 128 scores
    const i64 *seat_of,    // [queries]
    const i64 *positions,  // [queries]
    const float2 *moments,  // [queries, moment_shares]: sums and sums of squares
    const int *shares_of,  // [queries]
    i64 *out,              // [queries, k], written
    i64 value_stride, i64 moment_shares, i64 k_,
    i64 capacity) {        // scores of a block that are held, a multiple of 128
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    fill<BINS>(shared.histogram, 0);
    if (threadIdx.x == 0) shared.listed = shared.earlier = shared.all_better = 0;
    wait_for_previous_launch();
    const unsigned query = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, k = static_cast<unsigned>(k_);
    const i64 seat = seat_of[query], position = positions[query];
    const int shares = shares_of[query];  // has no meaning if nothing was scored
    const unsigned length = seat < 0 ? 0 : static_cast<unsigned>(position) + 1;
    out += query * k_;
    if (length <= k) {
#pragma unroll 1
        for (unsigned column = rank * THREADS + threadIdx.x; column < k; column += CLUSTER * THREADS) {
            out[column] = column < length ? static_cast<i64>(column) : EMPTY;
        }
        return;
    }
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned groups = (length + CLUSTER * WARPS * WARP_SCORES - 1) / (CLUSTER * WARPS * WARP_SCORES);
    const unsigned warp_share = groups * WARP_SCORES;  // positions of a warp
    Scores scores;
    scores.memory = values + query * value_stride, scores.first = rank * WARPS * warp_share;
    scores.held = reinterpret_cast<float *>(shared_memory + SHARED_BYTES / 16);
    scores.capacity = static_cast<unsigned>(capacity);
    const unsigned begin = scores.first + warp * warp_share;
    scores.own = begin + lane * LANE_SCORES, scores.last = min(begin + warp_share, length);
    scores.groups = begin < length ? (scores.last - begin + WARP_SCORES - 1) / WARP_SCORES : 0;

    scores.begin_to_hold();
    const ScoreBins bins = likely_bins(moments + query * moment_shares, shares, length, k);
    wait_for_small_copies();
    __syncthreads();
    const Bits likely = scores.at_least(bins.low);
    scores.visit(likely, [&](unsigned, unsigned, float score) { atomicAdd(shared.histogram + bins.bin_of(score), 1u); });
    Bits better, inside;
    better.clear(), inside.clear();
    find_cut(shared, k, 0);
    if (shared.cut_bin != EMPTY && shared.cut_size <= CANDIDATES) {
        const unsigned cut = shared.cut_bin;
        scores.visit(likely, [&](unsigned word, unsigned bit, float score) {
            const unsigned bin = bins.bin_of(score);
            if (bin > cut) better.words[word] |= 1u << bit;
            if (bin == cut) inside.words[word] |= 1u << bit;
        });
    } else {
        narrow(shared, scores, k, better, inside);
    }

    scores.visit(inside, [&](unsigned word, unsigned bit, float score) {
        list(shared, key_of(score), scores.position_of(word * 32 + bit));
    });
    const unsigned warp_better = __reduce_add_sync(ALL, better.count()), warp_inside = __reduce_add_sync(ALL, inside.count());
    if (lane == 0) {
        shared.better[warp] = warp_better, shared.inside[warp] = warp_inside;
        atomicAdd(&shared.all_better, warp_better);
    }
    wait_for_cluster();
    Found found;
    found.read(shared);
    unsigned column = 0, all_better = 0, all_inside = 0;
#pragma unroll
    for (unsigned member = 0; member < CLUSTER; ++member) {
        column += member < rank ? found.better[member] : 0;
        all_better += found.better[member], all_inside += found.listed[member];
    }
    const unsigned needed = k - all_better;  // 0 only if there are no candidates
    if (all_inside > CANDIDATES) {
        take_first(shared, scores, inside, rank, needed);
    } else {
        rank_candidates(shared, found, needed, scores.first, warp_share);
    }
    if (CLUSTER > 1) arrive_in_cluster(true);  // this block has read all that it needs of others

    column += shared.earlier + sum_warps(shared.better[warp], shared.totals).before;
    const unsigned worst_key = shared.worst_key, last_position = shared.last_position;
    scores.visit(inside, [&](unsigned word, unsigned bit, float score) {
        const unsigned key = key_of(score);
        if (key > worst_key || (key == worst_key && scores.position_of(word * 32 + bit) <= last_position)) {
            better.words[word] |= 1u << bit;
        }
    });
#pragma unroll
    for (unsigned word = 0; word < WORDS; ++word) {
#pragma unroll 1
        for (unsigned group = word * WORD_GROUPS; group < min(scores.groups, (word + 1) * WORD_GROUPS); ++group) {
            const unsigned mine = better.words[word] >> group % WORD_GROUPS * LANE_SCORES & 15;
            if (!__ballot_sync(ALL, mine)) continue;
            unsigned earlier = 0, count = 0;
#pragma unroll
            for (int n = 0; n < LANE_SCORES; ++n) {
                const unsigned lanes = __ballot_sync(ALL, mine >> n & 1);
                earlier += __popc(lanes & ((1u << lane) - 1)), count += __popc(lanes);
            }
#pragma unroll
            for (int n = 0; n < LANE_SCORES; ++n) {
                if (mine >> n & 1) out[column + earlier++] = scores.position_of(group * LANE_SCORES + n);
            }
            column += count;
        }
    }
    const unsigned total = all_better + min(needed, all_inside);
#pragma unroll 1
    for (unsigned empty = total + rank * THREADS + threadIdx.x; empty < k; empty += CLUSTER * THREADS) out[empty] = EMPTY;
    if (CLUSTER > 1) wait_in_cluster();
}
