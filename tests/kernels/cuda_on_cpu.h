// Emulates CUDA for kernels that a host compiler has compiled. Every CUDA thread is a fibre. The constant CLUSTER is
// the number of blocks per cluster, 1 by default. The blocks of a cluster run interleaved. Clusters run one after
// another.
//
// Between two barriers, the fibres of a block, and the blocks of a cluster, run in random order. This exposes code that
// depends on an order which CUDA does not guarantee. The emulation reports barriers and warp exchanges that not all
// threads reach, wrong use of the cluster barrier, access to the shared memory of a block that has not begun or has
// ended, writes past the launch's shared memory, and traps. It does not model caches. It switches between fibres only
// at barriers and warp exchanges, and where a thread waits for another rank, not between single memory accesses.
//
// A rank is a thread of the host with its own copy of the library.
//
// Only small headers are included, because this file is compiled once for every set of constants. For C++, math.h of
// the GNU library contains templates that take longer to compile than a kernel. The macro selects math.h of C.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __syncthreads() emulated::wait(emulated::BLOCK)
#ifndef CLUSTER
#define CLUSTER 1
#endif

template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }

struct Index {
    unsigned x, y, z;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

static Index threadIdx, blockIdx, gridDim, blockDim;
static const int SHARED_LIMIT = 227 * 1024;
int4 shared_memory[SHARED_LIMIT / 16];

namespace emulated {

enum State { READY, BLOCK, WARP, IN_CLUSTER, DONE };
struct Fibre {
    ucontext_t context;  // of the entry point
    jmp_buf registers;   // of the point at which the fibre waits; unlike swapcontext, _longjmp makes no system call
    char *stack;
    State state;
    unsigned votes;     // number of calls of __syncthreads_or
    unsigned arrivals;  // number of arrivals at the cluster barrier
    unsigned waits;     // number of waits at the cluster barrier
    unsigned late;      // rounds of `run_block` before the thread begins
    bool began;
};
enum { MAX_THREADS = 1024, MAX_ARGUMENTS = 32, STACK_BYTES = 256 << 10 };

static Fibre fibres[CLUSTER * MAX_THREADS];  // those of all blocks of the cluster, block by block
static unsigned threads;                       // per block
static unsigned current;                       // the running fibre
static jmp_buf scheduler;
static const char *failure;
static int64_t lanes[CLUSTER * MAX_THREADS / 32][32];  // values exchanged by the threads of each warp
static int votes[CLUSTER][3];
static int4 *shared_of_block[CLUSTER];  // shared memory of the blocks that are not running
static void *kernel;
static int64_t arguments[MAX_ARGUMENTS];
static uint64_t random_state;
static unsigned clusters_begun;  // in all launches
static unsigned char poison = 0xAB;  // the value of every unwritten byte of shared memory

static void wait(State state) {
    Fibre &self = fibres[current];
    self.state = state;
    if (!_setjmp(self.registers)) _longjmp(scheduler, 1);
}

static void fail(const char *message) {
    failure = message;
    wait(BLOCK);
}

// Every parameter of a kernel is eight bytes wide, so all kernels can be called with one signature.
static void begin() {
    typedef int64_t A;
    typedef void (*Kernel)(A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A,
                           A);
    const A *a = arguments;
    reinterpret_cast<Kernel>(kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                     a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24],
                                     a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
    wait(DONE);
}

static unsigned draw(unsigned below) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>(random_state >> 33) % below;
}

static void shuffle(unsigned *values, unsigned count) {
    for (unsigned i = count; i > 1; --i) {
        const unsigned j = draw(i), last = values[i - 1];
        values[i - 1] = values[j], values[j] = last;
    }
}

// If all fibres of [first, last) wait in `state`, makes them ready and returns true. For BLOCK, fibres that have ended
// do not count, but at least one must wait.
static bool release(State state, unsigned first, unsigned last) {
    for (unsigned i = first; i < last; ++i) {
        if (fibres[i].state != state && !(state == BLOCK && fibres[i].state == DONE)) return false;
    }
    bool any = false;
    for (unsigned i = first; i < last; ++i) {
        any |= fibres[i].state == state;
        if (fibres[i].state == state) fibres[i].state = READY;
    }
    return any;
}

// Releases each fibre of [first, last) that waits at the cluster barrier, if all threads of the cluster have arrived at
// it. Threads that have ended do not count. Returns whether any fibre was released.
static bool release_from_cluster(unsigned first, unsigned last) {
    unsigned least = ~0u;
    for (unsigned i = 0; i < CLUSTER * threads; ++i) {
        if (fibres[i].state != DONE) least = min(least, fibres[i].arrivals);
    }
    bool any = false;
    for (unsigned i = first; i < last; ++i) {
        if (fibres[i].state != IN_CLUSTER || fibres[i].waits > least) continue;
        fibres[i].state = READY;
        any = true;
    }
    return any;
}

// Runs every ready thread of a block until it waits or ends, then releases warps. If nothing ran and no warp was released,
// releases other waiting threads. Returns false if there was nothing to run or to release, or after a failure.
static bool run_block(unsigned member) {
    static unsigned order[MAX_THREADS];
    const unsigned first = member * threads, last = first + threads;
    unsigned ready = 0;
    bool released = false;
    for (unsigned i = first; i < last; ++i) {
        if (fibres[i].late) {
            --fibres[i].late, released = true;
        } else if (fibres[i].state == READY) {
            order[ready++] = i;
        }
    }
    shuffle(order, ready);
    for (unsigned i = 0; i < ready; ++i) {
        current = order[i];
        threadIdx.x = order[i] - first;
        if (!_setjmp(scheduler)) {  // a fibre that waits or ends jumps back to this point
            Fibre &fibre = fibres[current];
            if (fibre.began) _longjmp(fibre.registers, 1);
            fibre.began = true;
            setcontext(&fibre.context);
        }
        if (failure) return false;
    }
    released |= ready > 0;
    for (unsigned warp = first; warp < last; warp += 32) released |= release(WARP, warp, warp + 32);
    return released || release(BLOCK, first, last) || release_from_cluster(first, last);
}

static void run_cluster(unsigned first_block, int shared_bytes) {
    unsigned order[CLUSTER];
    for (unsigned i = 0; i < CLUSTER; ++i) order[i] = i;
    for (bool any = true; any && !failure;) {
        shuffle(order, CLUSTER);
        any = false;
        // Runs the first block of `order` that can run, for a random number of rounds. Some blocks get far ahead of
        // others.
        for (unsigned i = 0; i < CLUSTER && !any && !failure; ++i) {
            blockIdx.x = first_block + order[i];
            memcpy(shared_memory, shared_of_block[order[i]], shared_bytes);
            while (run_block(order[i])) {
                any = true;
                if (CLUSTER > 1 && draw(8) == 0) break;
            }
            memcpy(shared_of_block[order[i]], shared_memory, shared_bytes);
        }
    }
    for (unsigned i = 0; i < CLUSTER * threads && !failure; ++i) {
        if (fibres[i].state != DONE) failure = "deadlock: threads wait at a barrier that not all threads reach";
    }
}

template <class T> static int64_t bits(T value) {
    int64_t word = 0;
    memcpy(&word, &value, sizeof value);
    return word;
}

// Returns the value that lane `from` of the same warp contributes.
template <class T> static T exchange(T value, unsigned from) {
    const unsigned warp = current / 32, lane = current % 32;
    lanes[warp][lane] = bits(value);
    wait(WARP);
    T result;
    memcpy(&result, &lanes[warp][from % 32], sizeof result);
    wait(WARP);
    return result;
}

}  // namespace emulated

extern "C" const char *run_on_cpu(void *kernel, int blocks, int threads, int shared_bytes, const int64_t *arguments,
                                  int count, unsigned seed) {
    using namespace emulated;
    if (count > MAX_ARGUMENTS || threads > MAX_THREADS || threads % 32) {
        return "unsupported launch: too many arguments, too many threads, or an incomplete warp";
    }
    if (blocks % CLUSTER) return "the number of blocks is not a multiple of the cluster size";
    emulated::kernel = kernel, emulated::threads = threads;
    memcpy(emulated::arguments, arguments, count * sizeof *arguments);
    failure = nullptr, random_state = seed;
    gridDim.x = blocks, blockDim.x = threads;
    const int clusters = blocks / CLUSTER;
    unsigned *order = static_cast<unsigned *>(malloc(clusters * sizeof(unsigned)));
    for (int i = 0; i < clusters; ++i) order[i] = i;
    shuffle(order, clusters);
    for (int i = 0; i < CLUSTER; ++i) shared_of_block[i] = static_cast<int4 *>(malloc(shared_bytes + 1));
    for (int n = 0; n < clusters && !failure; ++n) {
        memset(shared_memory, poison, sizeof shared_memory);
        memset(votes, 0, sizeof votes);
        ++clusters_begun;
        for (int i = 0; i < CLUSTER; ++i) memset(shared_of_block[i], poison, shared_bytes);
        for (int i = 0; i < CLUSTER * threads; ++i) {
            Fibre &fibre = fibres[i];
            if (!fibre.stack) fibre.stack = static_cast<char *>(malloc(STACK_BYTES));
            fibre.state = READY, fibre.votes = fibre.arrivals = fibre.waits = 0, fibre.began = false;
            fibre.late = i % 32 ? fibres[i - 1].late : draw(4) ? 0 : draw(64);  // a quarter of the warps begin late
            getcontext(&fibre.context);
            fibre.context.uc_stack.ss_sp = fibre.stack;
            fibre.context.uc_stack.ss_size = STACK_BYTES;
            fibre.context.uc_link = nullptr;
            makecontext(&fibre.context, begin, 0);
        }
        run_cluster(order[n] * CLUSTER, shared_bytes);
        const unsigned char *bytes = reinterpret_cast<unsigned char *>(shared_memory);
        for (int i = shared_bytes; i < SHARED_LIMIT && !failure; ++i) {
            if (bytes[i] != poison) failure = "the kernel wrote past the shared memory of its launch";
        }
    }
    for (int i = 0; i < CLUSTER; ++i) free(shared_of_block[i]);
    free(order);
    return failure;
}

static inline int __syncthreads_or(int vote) {
    const unsigned n = emulated::fibres[emulated::current].votes++;
    int *const votes = emulated::votes[emulated::current / emulated::threads];
    votes[n % 3] |= vote != 0;
    emulated::wait(emulated::BLOCK);
    votes[(n + 2) % 3] = 0;
    return votes[n % 3];
}
static inline unsigned take_turn(unsigned *turns) { return turns[0]++; }
static inline void end_turn(unsigned *turns) { ++turns[1]; }
// Clusters run one after another: a ticket that is not finished when a block waits for it is never finished.
static inline void wait_until_over(const unsigned *turns, unsigned number) {
    if (static_cast<int>(turns[1] - number) <= 0) {
        emulated::fail("deadlock: a block waits for a ticket that is never finished");
    }
}
static inline void arrive_in_cluster(bool) {
    emulated::Fibre &self = emulated::fibres[emulated::current];
    if (self.arrivals++ != self.waits) emulated::fail("a thread arrived at the cluster barrier twice without waiting");
}
static inline void wait_in_cluster() {
    emulated::Fibre &self = emulated::fibres[emulated::current];
    if (++self.waits != self.arrivals) emulated::fail("a thread waited at the cluster barrier without having arrived");
    emulated::wait(emulated::IN_CLUSTER);
}
// Returns the address in the shared memory of block `member` of the cluster that corresponds to `address`.
template <class T> static T *in_block(unsigned member, T *address) {
    using namespace emulated;
    bool began = false, ended = true;
    for (unsigned i = member * threads; i < (member + 1) * threads; ++i) {
        began |= fibres[i].began;
        ended &= fibres[i].state == DONE;
    }
    if (!began || ended) fail("access to the shared memory of a block that has not begun or has ended");
    const size_t offset = reinterpret_cast<const char *>(address) - reinterpret_cast<char *>(shared_memory);
    int4 *const memory = member == current / threads ? shared_memory : shared_of_block[member];
    return reinterpret_cast<T *>(reinterpret_cast<char *>(memory) + offset);
}
template <class T> static T read_in_block(unsigned member, const T *address) { return *in_block(member, address); }
template <class T> static void write_in_block(unsigned member, T *address, T value) {
    *in_block(member, address) = value;
}
template <class T> static T __shfl_sync(unsigned, T value, int lane) { return emulated::exchange(value, lane); }
template <class T> static T __shfl_up_sync(unsigned, T value, unsigned step) {
    const unsigned lane = emulated::current % 32;
    return emulated::exchange(value, lane >= step ? lane - step : lane);
}
static inline unsigned __ballot_sync(unsigned, bool vote) {
    unsigned ballot = 0;
    const unsigned warp = emulated::current / 32;
    emulated::lanes[warp][emulated::current % 32] = vote;
    emulated::wait(emulated::WARP);
    for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(emulated::lanes[warp][lane] != 0) << lane;
    emulated::wait(emulated::WARP);
    return ballot;
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int step) {
    return emulated::exchange(value, emulated::current % 32 ^ step);
}
// Returns what `combine` makes of the values of a warp, one after the other.
template <class Combine> static unsigned reduce(unsigned value, Combine combine) {
    const unsigned warp = emulated::current / 32;
    emulated::lanes[warp][emulated::current % 32] = value;
    emulated::wait(emulated::WARP);
    unsigned result = static_cast<unsigned>(emulated::lanes[warp][0]);
    for (int lane = 1; lane < 32; ++lane) result = combine(result, static_cast<unsigned>(emulated::lanes[warp][lane]));
    emulated::wait(emulated::WARP);
    return result;
}
static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return reduce(value, [](unsigned a, unsigned b) { return a + b; });
}
static inline unsigned __reduce_min_sync(unsigned, unsigned value) { return reduce(value, min<unsigned>); }
static inline unsigned __reduce_max_sync(unsigned, unsigned value) { return reduce(value, max<unsigned>); }
static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static inline int __clzll(uint64_t value) { return value ? __builtin_clzll(value) : 64; }
static inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulated::bits(value)); }
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
// The host compiler is called with -ffp-contract=off, so that it fuses no operations either.
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline void __trap() { emulated::fail("the kernel trapped"); }
extern "C" {
int64_t unreadable[2];  // addresses [from, to) that no __ldcg may read
}
template <class T> static T __ldcg(const T *address) {
    const int64_t at = reinterpret_cast<int64_t>(address);
    if (at >= unreadable[0] && at < unreadable[1]) emulated::fail("a read of memory that belongs to others");
    return *address;
}
template <class T, class U> static T atomicAdd(T *address, U value) {
    const T before = *address;
    *address = before + value;
    return before;
}
template <class T, class U> static T atomicMin(T *address, U value) {
    const T before = *address;
    *address = min(before, static_cast<T>(value));
    return before;
}
template <class T, class U> static T atomicMax(T *address, U value) {
    const T before = *address;
    *address = max(before, static_cast<T>(value));
    return before;
}
template <class T, class U> static T atomicCAS(T *address, T expected, U value) {
    const T before = *address;
    if (before == expected) *address = value;
    return before;
}
template <class T> static int load_now(const T *address) { return static_cast<int>(*address); }
static inline void prefetch_to_l2(const void *) {}
// A small copy writes its target when its thread waits for it. Until then, the target holds NaN.
namespace emulated {
struct SmallCopies {
    enum { MAX_COPIES = 256 };
    void *to[MAX_COPIES];
    const void *from[MAX_COPIES];
    unsigned count;
};
static SmallCopies small_copies[CLUSTER * MAX_THREADS];
}  // namespace emulated
static inline void begin_small_copy(void *to, const void *from) {
    emulated::SmallCopies &mine = emulated::small_copies[emulated::current];
    if (mine.count == emulated::SmallCopies::MAX_COPIES) emulated::fail("too many small copies in flight");
    memset(to, 0xFF, 16);
    mine.to[mine.count] = to, mine.from[mine.count++] = from;
}
static inline void wait_for_small_copies() {
    emulated::SmallCopies &mine = emulated::small_copies[emulated::current];
    for (; mine.count; --mine.count) memcpy(mine.to[mine.count - 1], mine.from[mine.count - 1], 16);
}
extern "C" {
// What the previous launch writes last: `late_bytes` from `late_from`. They arrive when all threads of a block wait for it.
void *late_to;
const void *late_from;
int64_t late_bytes;
}
static inline void wait_for_previous_launch() {
    static unsigned waiting;
    if (!late_bytes) return;
    if (++waiting == emulated::threads) {
        memcpy(late_to, late_from, late_bytes);
        waiting = 0, late_bytes = 0;
    }
    while (late_bytes) emulated::wait(emulated::READY);
}
static inline void let_next_launch_start() {}
static inline unsigned load_acquire(const unsigned *address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
static inline void store_release(unsigned *address, unsigned value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
static inline int load_relaxed(const int *address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
static inline void let_others_run() {
    sched_yield();
    emulated::wait(emulated::READY);
}
