// swap_in's plan on a GPU: one block per batch row.
//
// Constants given by the compilation:
//   THREADS         of a block: a multiple of 32, at most 1024
//   ENTRIES         of the list of k positions that one thread holds, neighbours: THREADS * ENTRIES >= k
//   SLOTS_HELD      slots that one thread holds, neighbours: THREADS * SLOTS_HELD >= SLOTS
//   TABLE           places of the hash table: a power of two, at least k
//   SHARED_BYTES    of a block, as the launch sets it
//   SLOTS, PAGE_ROWS, WORDS_PER_PAGE    as in SeatTables
//   WIDE            1: four words of the maps are read at once; SLOTS, SLOTS_HELD, WORDS_PER_PAGE are multiples of 4
//
// What a plan costs: first a chain of reads that wait for each other (seat -> pages of its maps -> slot_of), each a
// miss of the L2, so whatever does not depend on an earlier read is asked for at the same time; then, if something is
// missing, instructions, so that work on misses and victims is done on lists of them, not where they are found.
// Page numbers fit 32 bits; row numbers and addresses do not.

typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;

namespace {

constexpr int EMPTY = -1;
constexpr unsigned NONE = ~0u;  // a place of the hash table that nobody took
constexpr unsigned ALL = ~0u;   // lanes of a warp

#ifdef __CUDACC__
// Two loads that are asked for where they are written: the compiler would put them off until after the branch that
// decides if they are needed. Both give the lower half.
__device__ __forceinline__ unsigned load_page_now(const i64 *address) {
    unsigned page;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(page) : "l"(address));
    return page;
}
__device__ __forceinline__ int load_stamp_now(const i64 *address) {
    int stamp;
    asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(stamp) : "l"(address));
    return stamp;
}

__device__ __forceinline__ void bring_to_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The launch after this one may begin, if it was made so that it waits by itself until this one is done.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

constexpr int WARPS = THREADS / 32;
constexpr int GROUP = WIDE ? 4 : 1;  // words of the maps that one access reads
constexpr int GROUPS = SLOTS_HELD / GROUP;

// Ages (steps since a slot was used) are counted in buckets: one for each age below 128, then 64 for every doubling.
// A bucket that spans several ages is divided again, DIGIT bits at a time, until the one age is found at which the
// oldest slots must be cut. Age 0 stands for slots that may not give way.
constexpr int DIGIT = 10;
constexpr int BUCKETS = 27 * 64;

struct Shared {
    unsigned slot_pages[THREADS];  // of the seat; those past them are looked up where they are
    unsigned table[TABLE];  // by hash of a missing position: the list index of its first occurrence, then its rank
    union {
        unsigned histogram[BUCKETS];     // of ages; not needed any more when the victims are known
        u16 victims[THREADS * ENTRIES];  // slot for the nth miss
    };
    u16 misses[THREADS * ENTRIES];  // list index of the nth miss
    union {
        u8 used[THREADS * SLOTS_HELD];  // 1: a slot that this step reads
        unsigned used_words[THREADS * SLOTS_HELD / 4];
    };
    unsigned warp_totals[3][32];  // of `scan`; each use has its own until a barrier has passed
    unsigned looked_up;
    unsigned cut_bucket;
    unsigned cut_needed;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree");
static_assert(SLOTS_HELD % GROUP == 0 && (TABLE & (TABLE - 1)) == 0, "");

struct Prefix {
    unsigned before;  // sum over the threads before this one
    unsigned total;
};

// Sums over the block, in the order of threads; contains one barrier. Two 16-bit sums may share a word.
__device__ __forceinline__ Prefix scan(unsigned value, unsigned *warp_totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL, sum, step);
        sum += lane >= step ? below : 0;
    }
    if (lane == 31) warp_totals[warp] = sum;
    __syncthreads();
    unsigned totals = lane < WARPS ? warp_totals[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL, totals, step);
        totals += lane >= step ? below : 0;
    }
    const unsigned warps_before = __shfl_sync(ALL, totals, warp > 0 ? warp - 1 : 0);
    return {sum - value + (warp > 0 ? warps_before : 0), __shfl_sync(ALL, totals, 31)};
}

__device__ __forceinline__ i64 row_at(unsigned page, unsigned offset) {
    return static_cast<i64>(page) * PAGE_ROWS + offset;
}

// Row of `index` in a seat's pages.
__device__ __forceinline__ i64 row_in(const i64 *pages, unsigned index) {
    return row_at(static_cast<unsigned>(pages[index / PAGE_ROWS]), index % PAGE_ROWS);
}

__device__ __forceinline__ i64 row_of_slot(const Shared &shared, const i64 *pages, unsigned slot) {
    const unsigned page = slot / PAGE_ROWS;
    const unsigned found = page < THREADS ? shared.slot_pages[page] : static_cast<unsigned>(pages[page]);
    return row_at(found, slot % PAGE_ROWS);
}

// The maps of one seat.
struct Maps {
    const i64 *pages;
    int *words;

    __device__ __forceinline__ int *word(unsigned index, unsigned page) const {
        return words + (static_cast<i64>(page) * WORDS_PER_PAGE + index % WORDS_PER_PAGE);
    }
    __device__ __forceinline__ int *word(unsigned index) const {
        return word(index, static_cast<unsigned>(pages[index / WORDS_PER_PAGE]));
    }
    __device__ __forceinline__ int *position_of(unsigned slot) const { return word(slot); }
    __device__ __forceinline__ int *last_used(unsigned slot) const { return word(SLOTS + slot); }

    __device__ __forceinline__ const i64 *page_of_position(unsigned position) const {
        return pages + (4u * SLOTS + position) / (2 * WORDS_PER_PAGE);
    }
    __device__ __forceinline__ short *slot_of(unsigned position, unsigned page) const {
        const unsigned half = (4u * SLOTS + position) % (2 * WORDS_PER_PAGE);
        return reinterpret_cast<short *>(words) + (static_cast<i64>(page) * (2 * WORDS_PER_PAGE) + half);
    }
    __device__ __forceinline__ short *slot_of(unsigned position) const {
        return slot_of(position, static_cast<unsigned>(*page_of_position(position)));
    }

    // Where last_used of this thread's slots is: read before anything is known of the seat.
    __device__ __forceinline__ void find_stamps(unsigned (&page)[GROUPS]) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int slot = threadIdx.x * SLOTS_HELD + group * GROUP;
            page[group] = slot < SLOTS ? load_page_now(pages + (SLOTS + slot) / WORDS_PER_PAGE) : 0;
        }
    }
    // Not through the L1, which may hold what an earlier step wrote over.
    __device__ __forceinline__ void read_stamps(const unsigned (&page)[GROUPS], int (&stamps)[SLOTS_HELD]) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int slot = threadIdx.x * SLOTS_HELD + group * GROUP;
            if (slot >= SLOTS) continue;
            const int *from = word(SLOTS + slot, page[group]);
#if WIDE
            const int4 four = __ldcg(reinterpret_cast<const int4 *>(from));
            stamps[4 * group] = four.x, stamps[4 * group + 1] = four.y;
            stamps[4 * group + 2] = four.z, stamps[4 * group + 3] = four.w;
#else
            stamps[group] = __ldcg(from);
#endif
        }
    }
};

template <int count> __device__ __forceinline__ void fill(unsigned *values, unsigned value) {
#pragma unroll
    for (int start = 0; start < count; start += THREADS) {
        const int i = start + threadIdx.x;
        if (count % THREADS == 0 || i < count) values[i] = value;
    }
}

// The place of a missing position in the hash table, where the least list index that asks for it will stand.
__device__ __forceinline__ unsigned claim(unsigned *table, unsigned position, unsigned index, const i64 *positions) {
    unsigned place = position * 2654435769u / (1u << 16) % TABLE;
    for (;; place = (place + 1) % TABLE) {
        const unsigned there = atomicCAS(table + place, NONE, index);
        if (there == NONE) return place;
        // The holder of a place may change, its position never.
        if (static_cast<unsigned>(positions[there]) == position) {
            atomicMin(table + place, index);
            return place;
        }
    }
}

__device__ __forceinline__ unsigned bucket_of(unsigned age) {
    const int shift = max(0, 25 - __clz(age));  // ages from 128 on keep their seven highest bits
    return shift * 64 + (age >> shift);
}

// Sum of this thread's part of the histogram's first `buckets`.
template <int buckets> __device__ __forceinline__ unsigned histogram_part(const Shared &shared) {
    constexpr int each = (buckets + THREADS - 1) / THREADS;
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int bucket = threadIdx.x * each + i;
        sum += bucket < buckets ? shared.histogram[bucket] : 0;
    }
    return sum;
}

// Finds the bucket in which the oldest `count` of `total` slots end; `before` are in the parts of earlier threads.
template <int buckets>
__device__ __forceinline__ void find_cut(Shared &shared, unsigned before, unsigned total, unsigned count) {
    constexpr int each = (buckets + THREADS - 1) / THREADS;
    unsigned from_here = total - before;  // slots in this bucket or an older one
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int bucket = threadIdx.x * each + i;
        if (bucket >= buckets) break;
        const unsigned older = from_here - shared.histogram[bucket];
        if (from_here >= count && older < count) {
            shared.cut_bucket = bucket;
            shared.cut_needed = count - older;
        }
        from_here = older;
    }
}

// All slots older than `age` give way, and of those that are exactly as old the first `ties`.
struct Cut {
    unsigned age;
    unsigned ties;
};

// The cut within the bucket that `find_cut` named, among the ages of all threads' slots.
__device__ __forceinline__ Cut refine(Shared &shared, const unsigned (&ages)[SLOTS_HELD]) {
    const unsigned bucket = shared.cut_bucket;
    unsigned needed = shared.cut_needed;
    int shift = max(0, static_cast<int>(bucket / 64) - 1);  // the bucket holds the ages [low, low + 2^shift)
    unsigned low = bucket < 64 ? bucket : (64 + bucket % 64) << shift;
    while (shift > 0) {
        const int left = max(0, shift - DIGIT);
        fill<1 << DIGIT>(shared.histogram, 0);  // a barrier has passed since it was last read
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLOTS_HELD; ++i) {
            if ((ages[i] - low) >> shift == 0) atomicAdd(shared.histogram + ((ages[i] - low) >> left), 1);
        }
        __syncthreads();
        const Prefix prefix = scan(histogram_part<1 << DIGIT>(shared), shared.warp_totals[1]);
        find_cut<1 << DIGIT>(shared, prefix.before, prefix.total, needed);
        __syncthreads();
        low += shared.cut_bucket << left;
        needed = shared.cut_needed;
        shift = left;
    }
    return {low, needed};
}

// Lists the victims in ascending order, given the bucket of the cut and the ages of this thread's slots.
__device__ __forceinline__ void find_victims(Shared &shared, const unsigned (&age)[SLOTS_HELD]) {
    const Cut cut = refine(shared, age);
    unsigned older_and_ties = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_HELD; ++i) older_and_ties += age[i] > cut.age ? 0x10000 : age[i] == cut.age;
    // The barrier within comes after everybody's last look at the histogram, whose place the victims take.
    const unsigned before = scan(older_and_ties, shared.warp_totals[2]).before;
    if (older_and_ties == 0) return;
    unsigned older = before >> 16, ties = before & 0xffff;
#pragma unroll
    for (int i = 0; i < SLOTS_HELD; ++i) {
        const bool is_older = age[i] > cut.age, is_tie = age[i] == cut.age;
        if (is_older || (is_tie && ties < cut.ties)) {
            shared.victims[older + min(ties, cut.ties)] = threadIdx.x * SLOTS_HELD + i;
        }
        older += is_older;
        ties += is_tie;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) plan(
    const i64 *__restrict__ positions,                               // [batch, k]
    const i64 *__restrict__ seats, const i64 *__restrict__ stamps,  // [batch]
    const u8 *__restrict__ tiered,                                   // [seats]
    const i64 *__restrict__ row_pages, const i64 *__restrict__ host_pages, const i64 *__restrict__ slot_pages,
    const i64 *__restrict__ tail_pages, const i64 *__restrict__ map_pages,
    i64 row_pages_stride, i64 host_pages_stride, i64 slot_pages_stride, i64 tail_pages_stride, i64 map_pages_stride,
    int *words, i64 *__restrict__ counts, i64 given_k, i64 slot_page_count, i64 map_page_count,
    i64 ignore_tail,                                              // 1: as if no position were in the tail
    i64 *__restrict__ rows,                                       // [batch, k]
    i64 *__restrict__ copy_host, i64 *__restrict__ copy_device,  // [batch, k]: what is to be copied
    int *__restrict__ copy_counts) {                              // [batch]
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const int thread = threadIdx.x, k = static_cast<int>(given_k);
    const i64 batch_row = blockIdx.x;
    let_next_launch_begin();

    const i64 seat = seats[batch_row];
    const int stamp = load_stamp_now(stamps + batch_row);
    const i64 *my_positions = positions + batch_row * k;
    i64 *my_rows = rows + batch_row * k;
    int position[ENTRIES];
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const int index = thread * ENTRIES + i;
        position[i] = index < k ? static_cast<int>(my_positions[index]) : EMPTY;
    }
    fill<TABLE>(shared.table, NONE);
    fill<BUCKETS>(shared.histogram, 0);
    fill<THREADS * SLOTS_HELD / 4>(shared.used_words, 0);
    if (thread == 0) shared.looked_up = 0;

    if (seat == EMPTY) {
        for (int i = thread; i < k; i += THREADS) my_rows[i] = EMPTY;
        if (thread == 0) copy_counts[batch_row] = 0;
        return;
    }

    // Of a resident seat these pages mean nothing; they are asked for before it is known which kind the seat is.
    const Maps maps = {map_pages + seat * map_pages_stride, words};
    const i64 *my_slot_pages = slot_pages + seat * slot_pages_stride;
    unsigned page[ENTRIES];
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const i64 *at = maps.page_of_position(max(0, position[i]));
        page[i] = at < maps.pages + map_page_count ? load_page_now(at) : 0;
    }
    unsigned stamp_page[GROUPS];
    maps.find_stamps(stamp_page);
    const unsigned slot_page = thread < slot_page_count ? load_page_now(my_slot_pages + thread) : 0;
    if (!tiered[seat]) {
        const i64 *my_row_pages = row_pages + seat * row_pages_stride;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int index = thread * ENTRIES + i;
            if (index < k) my_rows[index] = position[i] == EMPTY ? EMPTY : row_in(my_row_pages, position[i]);
        }
        if (thread == 0) copy_counts[batch_row] = 0;
        return;
    }

    const i64 *my_tail_pages = tail_pages + seat * tail_pages_stride;
    const unsigned even_tail = static_cast<unsigned>(my_tail_pages[0]);
    const unsigned odd_tail = static_cast<unsigned>(my_tail_pages[1]);
    const int tail_first = ignore_tail ? 0x7fffffff : max(0, stamp / PAGE_ROWS - 1) * PAGE_ROWS;
    int slot[ENTRIES];  // 0 where it is not looked up
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        slot[i] = 0;
        if (position[i] != EMPTY && position[i] < tail_first) slot[i] = __ldcg(maps.slot_of(position[i], page[i]));
    }
    int last_used[SLOTS_HELD];  // before this step; needed only if something is missing
    maps.read_stamps(stamp_page, last_used);
    shared.slot_pages[thread] = slot_page;
    __syncthreads();  // shared memory is cleared

    bool any_missed = false;
    unsigned looked_up = 0;
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const bool mine = position[i] != EMPTY && position[i] < tail_first;
        looked_up += mine;
        any_missed |= slot[i] == EMPTY;
        if (!mine || slot[i] == EMPTY) continue;
        shared.used[slot[i]] = 1;
        *maps.last_used(slot[i]) = stamp;
    }
    looked_up = __reduce_add_sync(ALL, looked_up);
    if (thread % 32 == 0) atomicAdd(&shared.looked_up, looked_up);
    any_missed = __syncthreads_or(any_missed);  // all hits are marked in `used`
    unsigned missing = 0;

    if (any_missed) {
        // 1. Needed soon, for the misses and for slots not known yet: where missing rows are, and what slots hold.
        const i64 *my_host_pages = host_pages + seat * host_pages_stride;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (slot[i] == EMPTY) bring_to_l2(my_host_pages + position[i] / PAGE_ROWS);
        }
        for (int i = thread * 8; i < SLOTS; i += THREADS * 8) bring_to_l2(maps.position_of(i));

        // 2. Missing positions find their first occurrence; slots are counted by age.
        unsigned place[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (slot[i] == EMPTY) place[i] = claim(shared.table, position[i], thread * ENTRIES + i, my_positions);
        }
        unsigned age[SLOTS_HELD];
#pragma unroll
        for (int i = 0; i < SLOTS_HELD; ++i) {
            const int mine = thread * SLOTS_HELD + i;
            age[i] = mine < SLOTS && !shared.used[mine] ? stamp - last_used[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < SLOTS_HELD; ++i) atomicAdd(shared.histogram + bucket_of(age[i]), 1);
        __syncthreads();

        // 3. First occurrences are numbered in list order; the histogram is added up. One scan serves both, because
        // neither sum exceeds 2^15.
        bool first[ENTRIES];
        unsigned firsts = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            first[i] = slot[i] == EMPTY && shared.table[place[i]] == thread * ENTRIES + i;
            firsts += first[i];
        }
        const Prefix prefix = scan(firsts << 16 | histogram_part<BUCKETS>(shared), shared.warp_totals[0]);
        missing = prefix.total >> 16;
        find_cut<BUCKETS>(shared, prefix.before & 0xffff, prefix.total & 0xffff, missing);
        unsigned rank = prefix.before >> 16;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (!first[i]) continue;
            shared.misses[rank] = thread * ENTRIES + i;
            shared.table[place[i]] = rank++;
        }
        __syncthreads();
        if (shared.cut_bucket == 0) __trap();  // the caller promised at least as many slots as positions

        // 4. The nth miss takes the slot of the nth victim.
        find_victims(shared, age);
        __syncthreads();
        for (unsigned nth = thread; nth < missing; nth += THREADS) {
            const unsigned taken = shared.victims[nth];
            const unsigned wanted = static_cast<unsigned>(my_positions[shared.misses[nth]]);
            int *const held = maps.position_of(taken);
            const int left = __ldcg(held);
            copy_host[batch_row * k + nth] = row_in(my_host_pages, wanted);
            copy_device[batch_row * k + nth] = row_of_slot(shared, my_slot_pages, taken);
            *maps.slot_of(wanted) = static_cast<short>(taken);
            *maps.last_used(taken) = stamp;
            *held = wanted;
            if (left != EMPTY) *maps.slot_of(left) = EMPTY;
        }
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (slot[i] == EMPTY) slot[i] = shared.victims[shared.table[place[i]]];
        }
    }

#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const int index = thread * ENTRIES + i;
        if (index >= k) continue;
        i64 row = EMPTY;
        if (position[i] != EMPTY) {
            const unsigned tail = position[i] / PAGE_ROWS % 2 ? odd_tail : even_tail;
            row = position[i] < tail_first ? row_of_slot(shared, my_slot_pages, slot[i])
                                           : row_at(tail, position[i] % PAGE_ROWS);
        }
        my_rows[index] = row;
    }
    if (thread == 0) {
        copy_counts[batch_row] = missing;
        atomicAdd(reinterpret_cast<unsigned long long *>(counts), static_cast<unsigned long long>(shared.looked_up));
        if (missing > 0) {
            atomicAdd(reinterpret_cast<unsigned long long *>(counts + 1), static_cast<unsigned long long>(missing));
        }
    }
}
