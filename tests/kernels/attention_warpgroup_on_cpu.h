// Emulates the GPU instructions of hotset/kernels/warpgroup.cu: products of float16 and bfloat16 matrices by a
// warpgroup. A product is computed when it begins.
#include "warpgroup_on_cpu.h"

typedef unsigned long long u64;

namespace emulated {

// Returns the value of a float16 or bfloat16 number.
template <bool half> static float number(uint16_t word) {
    static float values[1 << 16];
    static bool ready;
    if (!ready) {
        for (unsigned n = 0; n < 1 << 16; ++n) values[n] = half ? from_half(n) : from_bfloat(n);
        ready = true;
    }
    return values[word];
}
// Returns an element of a matrix in blocks of `rows` rows and 64 columns.
template <bool half, int rows = 64> static float element(unsigned long long description, unsigned row, unsigned column) {
    const unsigned char *block = reinterpret_cast<const unsigned char *>(description) + column / 64 * rows * 128;
    const unsigned chunk = column % 64 / 8;
    uint16_t word;
    memcpy(&word, block + row * 128 + (chunk ^ row % 8) * 16 + column % 8 * 2, 2);
    return number<half>(word);
}
// The row and the column of element n of this thread's part of a [64, columns] matrix.
static unsigned row_of(unsigned n) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + n / 2 % 2 * 8; }
static unsigned column_of(unsigned n) { return n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2; }

}  // namespace emulated

template <int count> static inline void release_registers() {}
template <int count> static inline void claim_registers() {}
static inline bool round_is_over(unsigned long long *barrier, unsigned round) {
    return emulated::state_of(barrier).rounds % 2 != round;
}
static inline int kept(int value) { return value; }
template <int rows = 64> static inline unsigned long long description_of(const void *at) {
    if ((static_cast<const char *>(at) - reinterpret_cast<const char *>(shared_memory)) % 1024) {
        emulated::fail("a matrix does not begin at a multiple of 1 KiB");
    }
    return reinterpret_cast<unsigned long long>(at);
}
namespace emulated {
// The blocks of `b` have `rows` rows, and `scores` has a column for each of them.
template <bool half, int rows> static void add_columns(float *scores, u64 a, u64 b, int step, bool first) {
    for (unsigned n = 0; n < rows / 2; ++n) {
        float sum = first ? 0 : scores[n];
        for (unsigned k = 16 * step; k < 16u * step + 16; ++k) {
            sum += element<half>(a, row_of(n), k) * element<half, rows>(b, column_of(n), k);
        }
        scores[n] = sum;
    }
}
template <bool half, int rows, int count>
static void add_rows(float (&sums)[count], const unsigned (&a)[4], u64 b, int step) {
    memcpy(words[current], a, sizeof a);
    wait(WARP);
    const unsigned quad = current / 4 * 4;
    for (unsigned n = 0; n < count; ++n) {
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned word = words[quad + k % 8 / 2][n / 2 % 2 + k / 8 * 2] >> k % 2 * 16;
            sums[n] += number<half>(static_cast<uint16_t>(word)) * element<half, rows>(b, 16 * step + k, column_of(n));
        }
    }
    wait(WARP);
}
}  // namespace emulated
template <bool half> static inline void multiply_columns(float (&scores)[32], u64 a, u64 b, int step, bool first) {
    emulated::add_columns<half, 64>(scores, a, b, step, first);
}
static inline void multiply_columns(float (&scores)[64], u64 a, u64 b, int step, bool first) {
    emulated::add_columns<false, 128>(scores, a, b, step, first);
}
template <bool half>
static inline void multiply_rows(float (&sums)[128], unsigned a0, unsigned a1, unsigned a2, unsigned a3, u64 b, int step) {
    emulated::add_rows<half, 64>(sums, {a0, a1, a2, a3}, b, step);
}
static inline void multiply_rows(float (&sums)[64], unsigned a0, unsigned a1, unsigned a2, unsigned a3, u64 b, int step) {
    emulated::add_rows<false, 128>(sums, {a0, a1, a2, a3}, b, step);
}
template <bool half>
static inline void multiply_rows(float (&sums)[128], unsigned long long a, unsigned long long b, int step) {
    using namespace emulated;
    for (unsigned n = 0; n < 128; ++n) {
        for (unsigned k = 16 * step; k < 16u * step + 16; ++k) {
            sums[n] += element<half>(a, row_of(n), k) * element<half>(b, k, column_of(n));
        }
    }
}
static inline unsigned multiply_bfloats(unsigned a, unsigned b) {
    using emulated::from_bfloat;
    return packed_bfloat(from_bfloat(a & 0xFFFF) * from_bfloat(b & 0xFFFF), from_bfloat(a >> 16) * from_bfloat(b >> 16));
}
static inline uint4 load_16(const unsigned char *at, bool there) {
    uint4 to = {};
    if (there && reinterpret_cast<uintptr_t>(at) % 16) emulated::fail("a read of 16 bytes is misaligned");
    if (there) memcpy(&to, at, 16);
    return to;
}
static inline void store_matrices(void *at, unsigned a, unsigned b, unsigned c, unsigned d) {
    using namespace emulated;
    static unsigned char *rows[MAX_THREADS];
    if (reinterpret_cast<uintptr_t>(at) % 16) fail("a misaligned row of a matrix");
    rows[current] = static_cast<unsigned char *>(at);
    wait(WARP);
    const unsigned values[4] = {a, b, c, d}, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (unsigned n = 0; n < 4; ++n) memcpy(rows[current / 32 * 32 + n * 8 + row] + 2 * column, &values[n], 4);
    wait(WARP);
}
// The bytes arrive only when the copy is waited for.
namespace emulated {
struct Store {
    void *to;
    const void *from;
    unsigned bytes;
};
static Store stores[MAX_THREADS];
}  // namespace emulated
static inline void begin_store(void *to, const void *from, unsigned bytes) {
    using namespace emulated;
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
        fail("a bulk copy is misaligned");
    }
    if (stores[current].to) fail("a thread began a second copy");
    stores[current] = {to, from, bytes};
}
static inline void end_stores() {
    emulated::Store &mine = emulated::stores[emulated::current];
    if (mine.to) memcpy(mine.to, mine.from, mine.bytes);
    mine.to = nullptr;
}
