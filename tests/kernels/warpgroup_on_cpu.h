// Emulates GPU instructions of Hopper (hotset/kernels/hopper.cu, the bulk copies of warpgroup.cu, and index_topk's
// instructions.cu): barriers, copies, batches of a warpgroup's products, products of e4m3 matrices, and conversions.
//
// What happens at an unknown time happens at a random one. A copy writes its target while threads wait for its barrier,
// so that copies end in any order; until then the target holds NaN. The products of a thread are computed when they begin
// or when their batch ends, which it does for the whole warpgroup at once.
#include "matrix_units_on_cpu.h"

#define __align__(...)

static inline float __fdiv_rn(float a, float b) { return a / b; }

static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline void __syncwarp() { emulated::wait(emulated::WARP); }

namespace emulated {

struct Barrier {
    unsigned expected, arrivals, rounds;  // arrivals of the current round, and number of completed rounds
    void *to;                             // of the copy in flight, or null
    const void *from;
    unsigned bytes, polls;  // polls: how often threads will find that the copy has not ended
    int64_t bytes_due;      // of boxes
};
static Barrier barriers[128];
static unsigned barrier_count;

// A barrier in shared memory holds the index of its state, plus one. Barriers that were never prepared hold poison.
static Barrier &state_of(const unsigned long long *barrier) {
    if (*barrier - 1 >= 128) fail("a barrier was used before it was prepared");
    return barriers[*barrier - 1];
}

// Lets other threads run until `done()`.
template <class Done> static void wait_until(Done done) {
    for (unsigned n = 0; !done(); ++n) {
        if (n > 100000) fail("deadlock: a thread waits for a barrier that others do not reach");
        wait(READY);
    }
}

static float value_of(unsigned code) {
    static float values[256];
    if (values[1] == 0) {
        for (unsigned n = 0; n < 256; ++n) values[n] = from_half(from_e4m3(n));
    }
    return values[code & 0xFF];
}
static unsigned code_of(float value) {
    const float size = fabsf(value);
    if (value != value) return 0x7F;
    unsigned code = 0;  // the largest whose value does not exceed `size`
    while (code < 0x7E && value_of(code + 1) <= size) ++code;
    if (code < 0x7E) {
        const float below = size - value_of(code), above = value_of(code + 1) - size;
        code += above < below || (above == below && code % 2);
    }
    return code | (value < 0 ? 0x80 : 0);
}

// Tiles of the running block: those that lane n of a warp has prefetched into the L2 cache, and the first ones that were
// copied.
struct Tile {
    const void *at;
    unsigned bytes;
};
enum { MAX_PREFETCHED = 32 };
static Tile prefetched[MAX_PREFETCHED], copied[MAX_PREFETCHED];
static unsigned copy_count;

// Multiplies rows in registers, or a matrix in shared memory, by another matrix there, and adds the result to `sums`.
struct Product {
    void (*compute)(const Product &);
    float *sums;
    const void *matrix;  // the second
    int step;
    bool first;
    const void *left;   // the first matrix, or null
    float rows[2][32];  // otherwise this thread's rows
};
enum { WARPGROUP_THREADS = 128, MAX_BATCHES = 2 };
struct Batch {
    enum { MAX_PRODUCTS = 64 };
    Product begun[MAX_PRODUCTS];
    int count;
    bool late;  // the products are computed when the batch ends
};
// The batches of a thread that have not ended; batch n is `batches[n % MAX_BATCHES]`.
struct Batches {
    Batch batches[MAX_BATCHES];
    unsigned begun;
};
// The batches of a warpgroup. None ends before all of its threads have begun it.
struct Warpgroup {
    unsigned ended, polls;  // how often the next batch will be found not to have ended
    unsigned most_polls;    // some warpgroups are much slower than others
};
static Batches batches_of[MAX_THREADS];
static Warpgroup warpgroups[MAX_THREADS / WARPGROUP_THREADS];
// Returns the batch to which this thread adds products.
static Batch &open_batch() {
    Batches &mine = batches_of[current];
    return mine.batches[mine.begun % MAX_BATCHES];
}
static void begin(const Product &product) {
    Batch &batch = open_batch();
    if (!batch.late) return product.compute(product);
    if (batch.count == Batch::MAX_PRODUCTS) fail("too many products in a batch");
    batch.begun[batch.count++] = product;
}
static void end_next_batch(unsigned group) {
    Warpgroup &of = warpgroups[group];
    const unsigned first = group * WARPGROUP_THREADS, self = current, own_index = threadIdx.x;
    for (unsigned i = first; i < first + WARPGROUP_THREADS; ++i) {
        if (batches_of[i].begun == of.ended) return;
    }
    if (of.polls-- > 0) return;
    for (unsigned i = first; i < first + WARPGROUP_THREADS; ++i) {
        current = threadIdx.x = i;
        const Batch &batch = batches_of[i].batches[of.ended % MAX_BATCHES];
        for (int n = 0; n < batch.count; ++n) batch.begun[n].compute(batch.begun[n]);
    }
    current = self, threadIdx.x = own_index;
    ++of.ended;
    of.polls = draw(of.most_polls);
}
// After this, the registers of a warp's rows are in `words`. The caller ends with wait(WARP).
static void exchange_rows(unsigned a0, unsigned a1, unsigned a2, unsigned a3) {
    const unsigned mine[4] = {a0, a1, a2, a3};
    memcpy(words[current], mine, sizeof mine);
    wait(WARP);
}

static unsigned box_copy_count;  // copies of boxes that have not ended

static void forget_earlier_blocks() {
    static unsigned block;
    if (block == clusters_begun) return;
    block = clusters_begun, copy_count = box_copy_count = 0;
    memset(prefetched, 0, sizeof prefetched), memset(copied, 0, sizeof copied);
    for (Batches &batches : batches_of) batches.begun = 0;
    for (Warpgroup &of : warpgroups) of = Warpgroup{0, 0, draw(2) ? 256u : 1u << 13};
}

}  // namespace emulated

extern "C" {
// Counted over all launches. A tile was prefetched in vain if the block then copies another tile in its place.
unsigned tiles_prefetched, prefetched_in_vain;
int64_t prefetchable[2];  // addresses [from, to) that may be prefetched; 0, 0: all
}

static inline void compare_tile(unsigned n) {
    const emulated::Tile &early = emulated::prefetched[n], &later = emulated::copied[n];
    prefetched_in_vain += early.at && later.at && (early.at != later.at || early.bytes != later.bytes);
}
static inline void prefetch_to_l2(const void *at, unsigned bytes) {
    using namespace emulated;
    const int64_t from = reinterpret_cast<int64_t>(at);
    if (from % 16 || bytes % 16) fail("a prefetched tile is misaligned");
    if (prefetchable[1] && (from < prefetchable[0] || from + bytes > prefetchable[1])) fail("a prefetch outside the keys");
    forget_earlier_blocks();
    prefetched[threadIdx.x % 32] = Tile{at, bytes};
    compare_tile(threadIdx.x % 32);
    ++tiles_prefetched;
}
static inline void prepare_barrier(unsigned long long *barrier, unsigned arrivals) {
    emulated::forget_earlier_blocks();
    const unsigned n = emulated::barrier_count++ % 128;
    emulated::barriers[n] = emulated::Barrier{arrivals};
    *barrier = n + 1;
}
namespace emulated {
static void end_round(Barrier &state) {
    if (state.arrivals == state.expected && state.bytes_due == 0) state.arrivals = 0, ++state.rounds;
}
}  // namespace emulated
static inline void arrive(unsigned long long *barrier) {
    emulated::Barrier &state = emulated::state_of(barrier);
    ++state.arrivals;
    emulated::end_round(state);
}
static inline void begin_copy(void *to, const void *from, unsigned bytes, unsigned long long *barrier) {
    using namespace emulated;
    Barrier &state = state_of(barrier);
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
        fail("a bulk copy is misaligned");
    }
    if (state.to) fail("a copy began before the previous one of its barrier was waited for");
    forget_earlier_blocks();
    if (copy_count < MAX_PREFETCHED) copied[copy_count] = Tile{from, bytes}, compare_tile(copy_count++);
    state.to = to, state.from = from, state.bytes = bytes;
    state.polls = draw(draw(8) ? 256 : 1 << 15);  // some copies take much longer than others
    memset(to, 0xFF, bytes);
}
namespace emulated {
// Copies of boxes end one by one, in any order, while threads wait for any barrier.
struct BoxCopy {
    unsigned char *to;
    const unsigned char *from;
    int64_t row_bytes, rows;
    unsigned long long *barrier;
    unsigned polls;  // how often it will be found not to have ended
};
enum { MAX_BOX_COPIES = 256, BOX_BYTES = 128 };  // of a row
static BoxCopy box_copies[MAX_BOX_COPIES];
static void end_some_box_copy() {
    if (box_copy_count == 0) return;
    BoxCopy &copy = box_copies[draw(box_copy_count)];
    if (copy.polls-- > 0) return;
    for (int64_t row = 0; row < copy.rows; ++row) {
        for (int chunk = 0; chunk < 8; ++chunk) {
            memcpy(copy.to + row * BOX_BYTES + (chunk ^ row % 8) * 16, copy.from + row * copy.row_bytes + chunk * 16, 16);
        }
    }
    Barrier &state = state_of(copy.barrier);
    state.bytes_due -= copy.rows * BOX_BYTES;
    end_round(state);
    copy = box_copies[--box_copy_count];
}
}  // namespace emulated
static inline void arrive_and_expect(unsigned long long *barrier, unsigned bytes) {
    emulated::state_of(barrier).bytes_due += bytes;
    arrive(barrier);
}
static inline void acquire_map(const void *) {}
// In the emulation, a map is an array: address, bytes from page to page and from row to row, pages, rows of a page and of a
// box.
static inline void begin_box(void *to, const void *map, int column, int row, int page, unsigned long long *barrier) {
    using namespace emulated;
    const int64_t *given = static_cast<const int64_t *>(map), rows = given[5];
    unsigned char *const there = static_cast<unsigned char *>(to);
    if ((there - reinterpret_cast<unsigned char *>(shared_memory)) % 1024) fail("a box is copied to a misaligned place");
    if (page < 0 || page >= given[3] || row < 0 || row + rows > given[4]) fail("a box outside the pages");
    if (box_copy_count == MAX_BOX_COPIES) fail("too many copies in flight");
    memset(there, 0xFF, rows * BOX_BYTES);
    const unsigned char *from = reinterpret_cast<const unsigned char *>(given[0]) + page * given[1] + row * given[2];
    const unsigned polls = draw(draw(8) ? 256 : 1 << 13);  // some copies take much longer than others
    box_copies[box_copy_count++] = BoxCopy{there, from + 2 * column, given[2], rows, barrier, polls};
}
static inline void wait_for_round(unsigned long long *barrier, unsigned round) {
    emulated::Barrier &state = emulated::state_of(barrier);
    emulated::wait_until([&] {
        emulated::end_some_box_copy();
        if (state.to && state.polls-- == 0) {
            memcpy(state.to, state.from, state.bytes), state.to = nullptr, arrive(barrier);
        }
        return state.rounds % 2 != round;
    });
}
namespace emulated {
// A barrier of some threads of a block.
struct BlockBarrier {
    unsigned round, arrivals, expected;
    void arrive(unsigned threads) {
        if (arrivals == 0) expected = threads;
        if (threads != expected) fail("threads wait at one barrier for different numbers of threads");
        if (++arrivals == threads) ++round, arrivals = 0;
    }
    void wait(unsigned threads) {
        const unsigned mine = round;
        arrive(threads);
        wait_until([this, mine] { return round != mine; });
    }
};
static BlockBarrier of_first, of_both_kinds;
}  // namespace emulated

static inline void wait_for_first(unsigned threads) {
    if (threadIdx.x >= threads) emulated::fail("a thread waits at a barrier of other threads");
    emulated::of_first.wait(threads);
}
static inline void arrive_only(unsigned threads) { emulated::of_both_kinds.arrive(threads); }
static inline void arrive_and_wait(unsigned threads) { emulated::of_both_kinds.wait(threads); }
static inline void publish_to_tensor_cores() {}
static inline void begin_products() {
    using namespace emulated;
    forget_earlier_blocks();
    const unsigned in_flight = batches_of[current].begun - warpgroups[current / WARPGROUP_THREADS].ended;
    if (in_flight == MAX_BATCHES) fail("too many batches of products in flight");
    Batch &batch = open_batch();
    batch.count = 0, batch.late = in_flight > 0 || draw(2);
}
static inline void close_product_batch() { ++emulated::batches_of[emulated::current].begun; }
template <int left> static inline void wait_for_products() {
    using namespace emulated;
    const unsigned group = current / WARPGROUP_THREADS, begun = batches_of[current].begun;
    wait_until([=] {
        if (warpgroups[group].ended + left < begun) end_next_batch(group);
        return warpgroups[group].ended + left >= begun;
    });
}
template <int count> static inline void pin(float (&)[count]) {}

namespace emulated {
static void compute_codes(const Product &product) {
    const unsigned char *const heads = static_cast<const unsigned char *>(product.matrix);
    for (unsigned n = 0; n < 16; ++n) {
        const unsigned head = n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2;
        float sum = product.first ? 0 : product.sums[n];
        for (unsigned k = 0; k < 32; ++k) {
            const unsigned column = 32 * product.step + k;
            sum += product.rows[n / 2 % 2][k] * value_of(heads[head * 128 + (column / 16 ^ head % 8) * 16 + column % 16]);
        }
        product.sums[n] = sum;
    }
}
}  // namespace emulated
static inline void multiply(float (&sums)[16], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                            const unsigned char *heads, int part, bool first) {
    using namespace emulated;
    Product product = {compute_codes, sums, heads, part, first};
    exchange_rows(a0, a1, a2, a3);
    for (unsigned k = 0; k < 32; ++k) {
        for (unsigned row = 0; row < 2; ++row) {
            product.rows[row][k] = value_of(words[current / 4 * 4 + k % 16 / 4][row + k / 16 * 2] >> k % 4 * 8);
        }
    }
    wait(WARP);
    begin(product);
}
static inline unsigned e4m3_codes(float first, float second) {
    return emulated::code_of(first) | emulated::code_of(second) << 8;
}
static inline void from_halves(unsigned halves, float &first, float &second) {
    first = emulated::from_half(halves & 0xFFFF), second = emulated::from_half(halves >> 16);
}
