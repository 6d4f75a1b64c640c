// Picks the slots to evict: the least recently used ones and, among equals, the lower ones. The threads of a block hold
// the ages of all slots, SLOTS_HELD consecutive slots each.
#pragma once
#include "../block.cu"

namespace {

// The age of a slot is the stamp of this step minus the slot's `last_used`, or 0 if this step reads the slot. Ages are
// counted in buckets: one for each age below 2^EXACT, then 64 per doubling. The victims are all slots older than the
// cut-off age, and the first ones of exactly this age. If the bucket with the cut-off spans several ages, it is divided
// again, DIGIT bits at a time, until the exact age is found. Slots of age 0 must not be evicted: the cut-off is never 0.
constexpr int EXACT = 10;
constexpr int DIGIT = 10;
constexpr int BUCKETS = (1 << EXACT) + (32 - EXACT) * 64;

// Kept in shared memory.
struct SlotsLeaving {
    union {
        unsigned histogram[BUCKETS];     // of ages; no longer needed when the victims are known
        u16 victims[THREADS * ENTRIES];  // slot for the nth missing position
    };
    unsigned cut_bucket;  // 0: not found
    unsigned cut_needed;  // number of victims in this bucket

    __device__ __forceinline__ void clear() {
        fill<BUCKETS>(histogram, 0);
        if (threadIdx.x == 0) cut_bucket = 0;
    }
};

__device__ __forceinline__ unsigned bucket_of(unsigned age) {
    const int doublings = 31 - EXACT - __clz(age);  // above 2^EXACT; there, only the seven highest bits count
    return doublings < 0 ? age : (1 << EXACT) + doublings * 64 + (age >> (doublings + EXACT - 6)) - 64;
}

// The ages [low, low + 2^shift).
struct Span {
    unsigned low;
    int shift;
};

__device__ __forceinline__ Span span_of(unsigned bucket) {
    if (bucket < 1 << EXACT) return {bucket, 0};
    const unsigned past = bucket - (1 << EXACT);
    const int shift = static_cast<int>(past / 64) + EXACT - 6;
    return {(64 + past % 64) << shift, shift};
}

__device__ __forceinline__ void count_ages(SlotsLeaving &shared, const unsigned (&age)[SLOTS_HELD]) {
#pragma unroll
    for (int i = 0; i < SLOTS_HELD; ++i) {
        atomicAdd(shared.histogram + bucket_of(age[i]), 1);
    }
}

// Finds the bucket that contains the cut-off of the oldest `count` slots. Contains a barrier and ends with one.
template <int buckets>
__device__ __forceinline__ void find_cut(SlotsLeaving &shared, unsigned count, unsigned *totals) {
    constexpr int each = (buckets + THREADS - 1) / THREADS;
    unsigned in_bucket[each], sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int bucket = threadIdx.x * each + i;
        in_bucket[i] = bucket < buckets ? shared.histogram[bucket] : 0;
        sum += in_bucket[i];
    }
    const Prefix prefix = sum_threads(sum, totals);
    unsigned from_here = prefix.total - prefix.before;  // slots in this bucket and in all older ones
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const unsigned older = from_here - in_bucket[i];
        if (from_here >= count && older < count) {
            shared.cut_bucket = threadIdx.x * each + i;
            shared.cut_needed = count - older;
        }
        from_here = older;
    }
    __syncthreads();
}

// Lists `count` victims in ascending order. All threads must have called `count_ages`. After the next barrier, the list
// is complete and `totals` may be reused.
__device__ __forceinline__ void find_victims(
    SlotsLeaving &shared, const unsigned (&age)[SLOTS_HELD], unsigned count, unsigned *totals) {
    __syncthreads();  // all ages are counted
    find_cut<BUCKETS>(shared, count, totals);
    if (shared.cut_bucket == 0) __trap();  // fewer evictable slots than misses: the caller made an error
    Span cut = span_of(shared.cut_bucket);
    while (cut.shift > 0) {
        const unsigned needed = shared.cut_needed;
        const int left = max(0, cut.shift - DIGIT);
        fill<1 << DIGIT>(shared.histogram, 0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLOTS_HELD; ++i) {
            const unsigned past = age[i] - cut.low;
            if (past >> cut.shift == 0) atomicAdd(shared.histogram + (past >> left), 1);
        }
        __syncthreads();
        find_cut<1 << DIGIT>(shared, needed, totals);
        cut.low += shared.cut_bucket << left;
        cut.shift = left;
    }
    // Lists all slots older than the cut-off, and the first ones of exactly that age.
    const unsigned ties_wanted = shared.cut_needed;
    unsigned older_and_ties = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_HELD; ++i) older_and_ties += age[i] > cut.low ? 0x10000 : age[i] == cut.low;
    // Neither sum exceeds 2^15. The histogram is no longer read: the victims take its memory.
    const unsigned before = sum_threads(older_and_ties, totals).before;
    if (older_and_ties == 0) return;
    unsigned older = before >> 16, ties = before & 0xffff;
#pragma unroll
    for (int i = 0; i < SLOTS_HELD; ++i) {
        const bool is_older = age[i] > cut.low, is_tie = age[i] == cut.low;
        if (is_older || (is_tie && ties < ties_wanted)) {
            shared.victims[older + min(ties, ties_wanted)] = threadIdx.x * SLOTS_HELD + i;
        }
        older += is_older;
        ties += is_tie;
    }
}

}  // namespace
