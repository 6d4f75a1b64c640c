// swap_in on a GPU: plans and, with COPIES, copies the missing rows of one layer in the same launch.
//
// Compile-time constants:
//   THREADS         per block: a multiple of 32, at most 1024
//   ENTRIES         of the list of positions per thread: THREADS * ENTRIES >= k
//   SLOTS_HELD      consecutive slots per thread: THREADS * SLOTS_HELD >= SLOTS
//   TABLE           entries of the hash table: a power of two, at least k
//   SHARED_BYTES    per block, as set by the launch
//   SLOTS, PAGE_ROWS, WORDS_PER_PAGE    as in SeatTables
//   TAIL_PAGES      per seat
//   WIDE            1: reads four words of the maps at once; SLOTS, SLOTS_HELD, WORDS_PER_PAGE are multiples of 4
//   COPIES          1: also copies rows; requires the constants of row_copy.cu
//   CLUSTER         blocks per query, neighbours in the grid: the first one plans, the others copy
//   LISTS_AT_ONCE   how many queries copy rows at the same time; 0: no limit
//   TURN_ROWS       more queries copy at the same time if together they have fewer missing rows than this
//
// Cost of a plan. It starts with a chain of dependent reads (seat -> pages of its maps -> slot_of), each an L2 miss, so
// all independent reads are issued at the same time. If rows are missing, barriers and instructions dominate, so misses
// and victims are first collected in lists and then processed.
//
// The blocks of a cluster that do not plan read the planner's lists from its shared memory:
//     planner    looks up, lists what is missing |1| finds victims |2| writes results |3|
//     others                                     |1| load rows     |2| store rows     |3|
// |1| to |3| are barriers of the cluster. An earlier one, 0, signals that every block has begun. If no row is missing,
// all blocks exit after barrier 1. To publish its lists at a barrier, a thread waits for its own writes to global memory.
// Therefore a planner with missing rows writes its results after it has arrived at barrier 2. In a cluster of one or two
// blocks, the planner also copies rows, after that. If a query waits for its turn, its rows are loaded after barrier 2.
//
// The host rows of one query lie close together, those of another query elsewhere, and a GPU caches the address
// translations of only a few gigabytes of host memory. In large batches, queries therefore take turns: a few at a time
// copy their rows, which saves a fifth of the time with 128 queries and 13 % misses.
//
// Page numbers fit 32 bits; row numbers and addresses do not.
#include "../block.cu"
#include "turns.cu"
#include "victims.cu"
#if COPIES
#include "row_copy.cu"
#endif

namespace {

// A small batch that also copies reads what only misses need before it is known whether any row is missing.
#if COPIES && !LISTS_AT_ONCE
constexpr bool AHEAD = true;
#else
constexpr bool AHEAD = false;
#endif
constexpr unsigned NONE = ~0u;       // a free entry of the hash table
constexpr int GROUP = WIDE ? 4 : 1;  // words of the maps per read
constexpr int GROUPS = SLOTS_HELD / GROUP;

struct Shared {
    unsigned slot_pages[THREADS];  // the first ones of the seat; further ones are read from memory
    union {
        unsigned keys[TABLE];    // by hash: a missing position
        unsigned wanted[TABLE];  // after all insertions: the nth missing position
    };
    unsigned first[TABLE];  // by hash: list index of a missing position's first occurrence, later its rank n
    unsigned host_pages[THREADS * ENTRIES];        // of the nth missing position
    unsigned slot_pages_taken[THREADS * ENTRIES];  // of the slot for the nth missing position
    SlotsLeaving leaving;
    union {
        u8 used[THREADS * SLOTS_HELD];  // 1: this step reads the slot
        unsigned used_words[THREADS * SLOTS_HELD / 4];
    };
    unsigned totals[32];
    unsigned looked_up;
    unsigned missing;  // written by the planner into every block of the cluster, like `turn`
    unsigned turn;

    __device__ __forceinline__ void clear() {
        fill<TABLE>(keys, NONE);
        fill<TABLE>(first, NONE);
        fill<THREADS * SLOTS_HELD / 4>(used_words, 0);
        leaving.clear();
        if (threadIdx.x == 0) looked_up = 0;
    }
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");
static_assert(SLOTS_HELD % GROUP == 0 && (TABLE & (TABLE - 1)) == 0, "");

__device__ __forceinline__ i64 row_at(unsigned page, unsigned offset) {
    return static_cast<i64>(page) * PAGE_ROWS + offset;
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

    // Prefetches the stamps of this thread's slots.
    __device__ __forceinline__ void prefetch_stamps() const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int slot = threadIdx.x * SLOTS_HELD + group * GROUP;
            if (slot < SLOTS) prefetch_to_l2(last_used(slot));
        }
    }
    // Reads the stamps of this thread's slots. Bypasses the L1, which may hold stale values of an earlier step.
    __device__ __forceinline__ void read_stamps(unsigned (&stamps)[SLOTS_HELD]) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int slot = threadIdx.x * SLOTS_HELD + group * GROUP;
            if (slot >= SLOTS) continue;
#if WIDE
            const uint4 four = __ldcg(reinterpret_cast<const uint4 *>(last_used(slot)));
            stamps[4 * group] = four.x, stamps[4 * group + 1] = four.y;
            stamps[4 * group + 2] = four.z, stamps[4 * group + 3] = four.w;
#else
            stamps[group] = __ldcg(last_used(slot));
#endif
        }
    }
};

// Inserts a missing position into the hash table and returns the index of its entry. After all insertions, `first` of
// the entry is the lowest list index with this position.
__device__ __forceinline__ unsigned claim(Shared &shared, unsigned position, unsigned index) {
    unsigned place = position * 2654435769u / (1u << 16) % TABLE;
    for (;; place = (place + 1) % TABLE) {
        const unsigned there = atomicCAS(shared.keys + place, NONE, position);
        if (there == NONE || there == position) break;
    }
    atomicMin(shared.first + place, index);
    return place;
}

// The arguments for one query.
struct Inputs {
    const i64 *positions;  // [k]
    const i64 *seat, *stamp;
    const u8 *tiered;  // this and the page tables cover all seats
    const i64 *row_pages, *host_pages, *slot_pages, *tail_pages, *map_pages;
    i64 row_pages_stride, host_pages_stride, slot_pages_stride, tail_pages_stride, map_pages_stride;
    int *words;
    i64 *counts;
    int k, slot_page_count, map_page_count;
    bool ignore_tail;
};
struct Outputs {
    i64 *rows, *copy_host, *copy_device;  // [k]
    int *copy_count;
};

// Plans for one query with all threads of a block. Each warp processes 32 * ENTRIES consecutive entries of the list,
// and its lanes process neighbouring entries, so that reads are coalesced.
struct Planner {
    Shared &shared;
    const Inputs &in;
    const Outputs &out;
    Maps maps;
    const i64 *slot_pages;
    int seat, stamp, tail_first;
    unsigned tail[TAIL_PAGES];
    int position[ENTRIES];
    int slot[ENTRIES];        // 0 if not looked up, EMPTY if missing
    unsigned place[ENTRIES];  // hash table entry of a missing position
    unsigned host_page[ENTRIES];  // of a missing position; with AHEAD, of every position that is looked up
    unsigned age[SLOTS_HELD];     // of this thread's slots: first their stamps, then `stamp` minus these
    unsigned missing;
    bool rows_are_written;  // by `page_table_lookup`: always, except for a tiered seat

    __device__ __forceinline__ Planner(Shared &given_shared, const Inputs &inputs, const Outputs &outputs)
        : shared(given_shared), in(inputs), out(outputs), missing(0), rows_are_written(true) {}

    static __device__ __forceinline__ int list_index(int i) {
        return threadIdx.x / 32 * (32 * ENTRIES) + i * 32 + threadIdx.x % 32;
    }

    // Begins to load what every look-up needs.
    __device__ __forceinline__ void load_query() {
        seat = load_now(in.seat);
        stamp = load_now(in.stamp);
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            position[i] = list_index(i) < in.k ? load_now(in.positions + list_index(i)) : EMPTY;
        }
    }

    // Looks up the positions. For a padding query or a resident seat, writes their rows. For a tiered seat, lists the
    // missing positions and their host pages.
    __device__ __forceinline__ void page_table_lookup() {
        if (seat == EMPTY) {
#pragma unroll 1
            for (int i = threadIdx.x; i < in.k; i += THREADS) out.rows[i] = EMPTY;
            return;
        }
        // For a resident seat, these pages are meaningless: they are loaded before it is known whether the seat is
        // tiered.
        maps = {in.map_pages + seat * in.map_pages_stride, in.words};
        slot_pages = in.slot_pages + seat * in.slot_pages_stride;
        unsigned page[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const i64 *at = maps.page_of_position(max(0, position[i]));
            page[i] = at < maps.pages + in.map_page_count ? load_now(at) : 0;
        }
        const int thread = threadIdx.x;
        const unsigned slot_page = thread < in.slot_page_count ? load_now(slot_pages + thread) : 0;
        if (!in.tiered[seat]) {
            look_up_resident(in.row_pages + seat * in.row_pages_stride);
            return;
        }
        rows_are_written = false;
#pragma unroll
        for (int i = 0; i < TAIL_PAGES; ++i) tail[i] = load_now(in.tail_pages + seat * in.tail_pages_stride + i);
        tail_first = in.ignore_tail ? 0x7fffffff : max(0, stamp / PAGE_ROWS - 1) * PAGE_ROWS;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) slot[i] = is_looked_up(i) ? __ldcg(maps.slot_of(position[i], page[i])) : 0;
        const i64 *host_pages = in.host_pages + seat * in.host_pages_stride;
        if (AHEAD) {
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i) load_host_page(i, host_pages, is_looked_up(i));
            maps.read_stamps(age);
        }
        shared.slot_pages[thread] = slot_page;
        __syncthreads();  // all threads have cleared their part of the shared memory
        if (mark_hits()) list_missing(host_pages);
    }

    // Finds the slots for the missing rows.
    __device__ __forceinline__ void choose_slots() {
        if (!AHEAD) maps.read_stamps(age);
#pragma unroll
        for (int start = 0; start < SLOTS; start += THREADS * 8) {
            const int at = start + threadIdx.x * 8;
            if (at < SLOTS) prefetch_to_l2(maps.position_of(at));  // `write_results` reads those of the victims
        }
#pragma unroll
        for (int i = 0; i < SLOTS_HELD; ++i) {
            const int mine = threadIdx.x * SLOTS_HELD + i;
            const bool evictable = !shared.used[mine] & mine < SLOTS;  // `used` has entries beyond SLOTS, too
            age[i] = evictable ? stamp - age[i] : 0;
        }
        count_ages(shared.leaving, age);
        find_victims(shared.leaving, age, missing, shared.totals);
        __syncthreads();
#pragma unroll 1
        for (unsigned nth = threadIdx.x; nth < missing; nth += THREADS) {
            shared.slot_pages_taken[nth] = page_of_slot(shared.leaving.victims[nth]);
        }
    }

    // Writes all results (rows, lists of copies, maps and counts), but copies no row.
    __device__ __forceinline__ void write_results() {
        if (threadIdx.x == 0) *out.copy_count = missing;
        if (rows_are_written) return;
        // The nth missing position gets the nth victim, which is a slot.
#pragma unroll 1
        for (unsigned nth = threadIdx.x; nth < missing; nth += THREADS) {
            const unsigned taken = shared.leaving.victims[nth], wanted = shared.wanted[nth];
            int *const held = maps.position_of(taken);
            const int left = __ldcg(held);
            out.copy_host[nth] = row_at(shared.host_pages[nth], wanted % PAGE_ROWS);
            out.copy_device[nth] = row_at(shared.slot_pages_taken[nth], taken % PAGE_ROWS);
            *maps.slot_of(wanted) = static_cast<short>(taken);
            *held = wanted;
            if (left != EMPTY) *maps.slot_of(left) = EMPTY;
        }
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (slot[i] == EMPTY) slot[i] = shared.leaving.victims[shared.first[place[i]]];
        }
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const unsigned at = is_looked_up(i) ? slot[i] : position[i];
            const unsigned page = is_looked_up(i) ? page_of_slot(at) : tail_page(at);
            if (is_looked_up(i)) *maps.last_used(at) = stamp;
            const i64 row = position[i] == EMPTY ? EMPTY : row_at(page, at % PAGE_ROWS);
            if (list_index(i) < in.k) out.rows[list_index(i)] = row;
        }
        if (threadIdx.x == 0) {
            add(in.counts, shared.looked_up);
            if (missing > 0) add(in.counts + 1, missing);
        }
    }

  private:
    __device__ __forceinline__ bool is_looked_up(int i) const {
        return position[i] != EMPTY && position[i] < tail_first;
    }

    // Chooses among registers: an index that is known at run time would put the pages into local memory.
    __device__ __forceinline__ unsigned tail_page(unsigned at) const {
        const int number = at / PAGE_ROWS % TAIL_PAGES;
        unsigned page = tail[0];
#pragma unroll
        for (int i = 1; i < TAIL_PAGES; ++i) page = number == i ? tail[i] : page;
        return page;
    }

    static __device__ __forceinline__ void add(i64 *count, unsigned more) {
        atomicAdd(reinterpret_cast<unsigned long long *>(count), static_cast<unsigned long long>(more));
    }

    __device__ __forceinline__ unsigned page_of_slot(unsigned of) const {
        const unsigned page = of / PAGE_ROWS;
        if (SLOTS <= THREADS * PAGE_ROWS || page < THREADS) return shared.slot_pages[page];
        return static_cast<unsigned>(slot_pages[page]);
    }

    __device__ __forceinline__ void look_up_resident(const i64 *row_pages) const {
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (list_index(i) >= in.k) continue;
            const unsigned at = position[i];
            i64 row = EMPTY;
            if (position[i] != EMPTY) row = row_at(static_cast<unsigned>(row_pages[at / PAGE_ROWS]), at % PAGE_ROWS);
            out.rows[list_index(i)] = row;
        }
    }

    __device__ __forceinline__ void load_host_page(int i, const i64 *host_pages, bool needed) {
        if (needed) host_page[i] = load_now(host_pages + position[i] / PAGE_ROWS);
    }

    // Marks the slots of the hits as used. Returns to all threads whether any row is missing. Ends with a barrier.
    __device__ __forceinline__ bool mark_hits() {
        bool any_missed = false;
        unsigned looked_up = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            looked_up += is_looked_up(i);
            any_missed |= slot[i] == EMPTY;
            if (is_looked_up(i) && slot[i] != EMPTY) shared.used[slot[i]] = 1;
        }
        looked_up = __reduce_add_sync(ALL, looked_up);
        if (threadIdx.x % 32 == 0) atomicAdd(&shared.looked_up, looked_up);
        return __syncthreads_or(any_missed);
    }

    // Numbers the distinct missing positions in list order.
    __device__ __forceinline__ void list_missing(const i64 *host_pages) {
        if (!AHEAD) {
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i) load_host_page(i, host_pages, slot[i] == EMPTY);
            maps.prefetch_stamps();
        }
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (slot[i] == EMPTY) place[i] = claim(shared, position[i], list_index(i));
        }
        __syncthreads();
        unsigned firsts[ENTRIES], of_warp = 0;  // a bit for each lane with a first occurrence
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const bool is_first = slot[i] == EMPTY && shared.first[place[i]] == list_index(i);
            firsts[i] = __ballot_sync(ALL, is_first);
            of_warp += __popc(firsts[i]);
        }
        const Prefix prefix = sum_warps(of_warp, shared.totals);
        missing = prefix.total;
        unsigned before = prefix.before;
        const unsigned lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            if (firsts[i] >> lane & 1) {
                const unsigned rank = before + __popc(firsts[i] & ((1u << lane) - 1));
                shared.host_pages[rank] = host_page[i];
                shared.wanted[rank] = position[i];
                shared.first[place[i]] = rank;
            }
            before += __popc(firsts[i]);
        }
    }
};

#if COPIES
__device__ __forceinline__ void arrive(bool published) {
    if (CLUSTER > 1) arrive_in_cluster(published);
}
__device__ __forceinline__ void wait() {
    if (CLUSTER > 1) {
        wait_in_cluster();
    } else {
        __syncthreads();
    }
}
// Writes a value to the shared memory of block `member` of the cluster.
__device__ __forceinline__ void announce(unsigned member, unsigned *address, unsigned value) {
    if (CLUSTER > 1) {
        write_in_block(member, address, value);
    } else {
        *address = value;
    }
}
// Returns whether a query with this many missing rows waits for its turn. If all queries of the launch can copy at the
// same time, there are no turns.
__device__ __forceinline__ bool takes_turn(unsigned missing) {
    return LISTS_AT_ONCE && missing * (gridDim.x / CLUSTER) > TURN_ROWS;
}
// Reads from the planner's shared memory.
template <class T> __device__ __forceinline__ T read(const T *address) {
    return CLUSTER > 1 ? read_in_block(0, address) : *address;
}

// The rows of the planner's list are assigned to the warps of the blocks that copy, one after the other. If the planner
// copies, its warps come last, because they also write the results.
struct Share {
    static constexpr unsigned COPIERS = CLUSTER > 2 ? CLUSTER - 1 : CLUSTER, WARPS_IN_ALL = COPIERS * WARPS;
    const Shared &shared;
    const Layer &layer;
    const unsigned count;
    unsigned nth;  // next row for this warp
    Rows rows;

    __device__ __forceinline__ Share(const Shared &given_shared, const Layer &given_layer)
        : shared(given_shared), layer(given_layer),
          count(CLUSTER - 1 - blockIdx.x % CLUSTER < COPIERS ? given_shared.missing : 0),
          nth(threadIdx.x / 32 * COPIERS + (CLUSTER - 1 - blockIdx.x % CLUSTER)) {}

    // Begins to load the next rows of this warp.
    __device__ __forceinline__ void begin_loads() {
        if (nth >= count) return;
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            const unsigned at = entry(r);
            const i64 row = row_at(read(shared.host_pages + at), read(shared.wanted + at) % PAGE_ROWS);
            rows.set_source(r, layer, row, nth + r * WARPS_IN_ALL < count);
        }
        rows.begin_loads(layer);
    }

    // Stores these rows and copies the others. The victims must be known.
    __device__ __forceinline__ void finish() {
        while (nth < count) {
            i64 target[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) {
                const unsigned at = entry(r);
                const unsigned slot = read(shared.leaving.victims + at);
                target[r] = row_at(read(shared.slot_pages_taken + at), slot % PAGE_ROWS);
            }
            rows.put(layer, target);
            nth += WARPS_IN_ALL * ROWS_AT_ONCE;
            begin_loads();
        }
    }

  private:
    // The list index of the rth row in flight, or of the first one if there is no rth.
    __device__ __forceinline__ unsigned entry(int r) const {
        const unsigned at = nth + r * WARPS_IN_ALL;
        return at < count ? at : nth;
    }
};
#endif

}  // namespace

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1024 / THREADS) plan(
    const i64 *positions,                    // [batch, k]
    const i64 *seats, const i64 *stamps,     // [batch]
    const u8 *tiered,                        // [seats]
    const i64 *row_pages, const i64 *host_pages, const i64 *slot_pages, const i64 *tail_pages, const i64 *map_pages,
    i64 row_pages_stride, i64 host_pages_stride, i64 slot_pages_stride, i64 tail_pages_stride, i64 map_pages_stride,
    int *words, i64 *counts, i64 given_k, i64 slot_page_count, i64 map_page_count,
    i64 ignore_tail,                         // 1: looks up all positions in slots
    i64 *rows,                               // [batch, k]
    i64 *copy_host, i64 *copy_device,        // [batch, k]: the rows to copy
    int *copy_counts,                        // [batch]
    unsigned *turns,                         // [2] tickets taken and finished
    const u8 *host, i64 host_stride, u8 *device, i64 device_stride, i64 row_bytes) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const int k = static_cast<int>(given_k);
    const i64 row = blockIdx.x / CLUSTER;
    const bool plans = blockIdx.x % CLUSTER == 0;
    let_next_launch_start();
    if (threadIdx.x == 0) shared.missing = 0;
#if COPIES
    arrive(!plans);  // 0: this block has begun, so the planner may write to its shared memory. The planner publishes nothing
#endif
    const Inputs in = {
        positions + row * k, seats + row, stamps + row, tiered,
        row_pages, host_pages, slot_pages, tail_pages, map_pages,
        row_pages_stride, host_pages_stride, slot_pages_stride, tail_pages_stride, map_pages_stride,
        words, counts, k, static_cast<int>(slot_page_count), static_cast<int>(map_page_count), ignore_tail != 0};
    const Outputs out = {rows + row * k, copy_host + row * k, copy_device + row * k, copy_counts + row};
    Planner planner(shared, in, out);
    if (plans) {
        planner.load_query();
        shared.clear();  // while the query is loaded
        planner.page_table_lookup();
    }
    const bool misses = plans && planner.missing > 0;
#if COPIES && LISTS_AT_ONCE
    unsigned turn = 0;
    if (takes_turn(planner.missing) && threadIdx.x == 0) turn = take_turn(turns);
#endif
#if COPIES
    wait();  // for 0
    if (misses && threadIdx.x == 0) {
#pragma unroll
        for (int member = 0; member < CLUSTER; ++member) {
            announce(member, &shared.missing, planner.missing);
#if LISTS_AT_ONCE
            announce(member, &shared.turn, turn);
#endif
        }
    }
    arrive(misses);  // 1: the missing positions are listed
    if (misses) {
        planner.choose_slots();
        wait();        // for 1
        arrive(true);  // 2: the victims are known
    }
    if (plans) planner.write_results();
    if (plans && !misses) return;
    if (!plans) wait();  // for 1
    if (shared.missing == 0) return;
    const Layer layer = {host, host_stride, device, device_stride, static_cast<int>(row_bytes)};
    Share share(shared, layer);
    const bool in_turn = takes_turn(shared.missing);
    if (!plans) {
        if (!in_turn) share.begin_loads();
        arrive(false);  // 2
    }
    wait();  // for 2
#if LISTS_AT_ONCE
    const unsigned at_once = max(static_cast<unsigned>(LISTS_AT_ONCE), TURN_ROWS / shared.missing);
    if (in_turn && threadIdx.x == 0) wait_until_over(turns, shared.turn - at_once);
    if (in_turn) __syncthreads();
#endif
    if (plans || in_turn) share.begin_loads();
    share.finish();
    arrive(false);  // 3: this block no longer reads the lists
    if (plans) wait();
#if LISTS_AT_ONCE
    if (plans && in_turn && threadIdx.x == 0) end_turn(turns);
#endif
#else
    if (misses) planner.choose_slots();
    planner.write_results();
#endif
}
