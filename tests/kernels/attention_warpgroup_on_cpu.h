// Emulates the GPU instructions of hotset/kernels/warpgroup.cu: products of float16 and bfloat16 matrices by a
// warpgroup, and copies of results.
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
static u64 described(const void *matrix) { return reinterpret_cast<u64>(matrix); }
// The blocks of the second matrix have `rows` rows, and the result has a column for each of them.
template <bool half, int rows> static void compute_columns(const Product &product) {
    for (unsigned n = 0; n < rows / 2; ++n) {
        float sum = product.first ? 0 : product.sums[n];
        for (unsigned k = 16 * product.step; k < 16u * product.step + 16; ++k) {
            sum += element<half>(described(product.left), row_of(n), k) *
                   element<half, rows>(described(product.matrix), column_of(n), k);
        }
        product.sums[n] = sum;
    }
}
template <bool half, int rows, int count> static void compute_rows(const Product &product) {
    for (unsigned n = 0; n < count; ++n) {
        for (unsigned k = 0; k < 16; ++k) {
            const float left = product.left ? element<half>(described(product.left), row_of(n), 16 * product.step + k)
                                            : product.rows[n / 2 % 2][k];
            product.sums[n] +=
                left * element<half, rows>(described(product.matrix), 16 * product.step + k, column_of(n));
        }
    }
}
template <bool half, int rows> static void begin_columns(float *scores, u64 a, u64 b, int step, bool first) {
    begin(Product{compute_columns<half, rows>, scores, reinterpret_cast<const void *>(b), step, first,
                  reinterpret_cast<const void *>(a)});
}
template <bool half, int rows, int count>
static void begin_rows(float *sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, u64 b, int step) {
    Product product = {compute_rows<half, rows, count>, sums, reinterpret_cast<const void *>(b), step};
    exchange_rows(a0, a1, a2, a3);
    for (unsigned k = 0; k < 16; ++k) {
        for (unsigned row = 0; row < 2; ++row) {
            const unsigned word = words[current / 4 * 4 + k % 8 / 2][row + k / 8 * 2];
            product.rows[row][k] = number<half>(static_cast<uint16_t>(word >> k % 2 * 16));
        }
    }
    wait(WARP);
    begin(product);
}
}  // namespace emulated
template <bool half> static inline void multiply_columns(float (&scores)[32], u64 a, u64 b, int step, bool first) {
    emulated::begin_columns<half, 64>(scores, a, b, step, first);
}
static inline void multiply_columns(float (&scores)[64], u64 a, u64 b, int step, bool first) {
    emulated::begin_columns<false, 128>(scores, a, b, step, first);
}
template <bool half>
static inline void multiply_rows(float (&sums)[128], unsigned a0, unsigned a1, unsigned a2, unsigned a3, u64 b, int step) {
    emulated::begin_rows<half, 64, 128>(sums, a0, a1, a2, a3, b, step);
}
static inline void multiply_rows(float (&sums)[64], unsigned a0, unsigned a1, unsigned a2, unsigned a3, u64 b, int step) {
    emulated::begin_rows<false, 128, 64>(sums, a0, a1, a2, a3, b, step);
}
template <bool half> static inline void multiply_rows(float (&sums)[128], u64 a, u64 b, int step) {
    const void *const left = reinterpret_cast<const void *>(a), *const right = reinterpret_cast<const void *>(b);
    emulated::begin(emulated::Product{emulated::compute_rows<half, 64, 128>, sums, right, step, false, left});
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
