// Emulates the GPU instructions of index_topk's instructions.cu: bulk copies, products of e4m3 matrices by a warpgroup, and
// conversions. A copy writes its target when a thread waits for it; until then the target holds NaN.
#include "matrix_units_on_cpu.h"

#define __align__(...)

static inline float __fdiv_rn(float a, float b) { return a / b; }

namespace emulated {

struct BulkCopy {
    void *to;
    const void *from;
    unsigned bytes;
    unsigned begun, done;  // number of copies of this barrier
};
static BulkCopy bulk_copies[64];
static unsigned bulk_count;

// A barrier holds the index of its copy, plus one. Barriers that were never prepared hold poison.
static BulkCopy &copy_of(const unsigned long long *arrival) {
    if (*arrival - 1 >= 64) fail("a barrier was used before it was prepared");
    return bulk_copies[*arrival - 1];
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

}  // namespace emulated

static inline void prepare_arrival(unsigned long long *arrival) {
    const unsigned n = emulated::bulk_count++ % 64;
    emulated::bulk_copies[n] = emulated::BulkCopy{};
    *arrival = n + 1;
}
static inline void begin_copy(void *to, const void *from, unsigned bytes, unsigned long long *arrival) {
    using namespace emulated;
    BulkCopy &copy = copy_of(arrival);
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
        fail("a bulk copy is misaligned");
    }
    if (copy.begun != copy.done) fail("a copy began before the previous one of its barrier was waited for");
    copy.to = to, copy.from = from, copy.bytes = bytes, ++copy.begun;
    memset(to, 0xFF, bytes);
}
static inline void wait_for_copy(unsigned long long *arrival, unsigned round) {
    using namespace emulated;
    BulkCopy &copy = copy_of(arrival);
    if (copy.begun > copy.done) memcpy(copy.to, copy.from, copy.bytes), copy.done = copy.begun;
    if (copy.done % 2 == round) fail("deadlock: a thread waits for a copy that has not begun");
}
static inline void publish_to_tensor_cores() {}
static inline void begin_products() {}
static inline void end_products() {}
template <int left> static inline void wait_for_products() {}
template <int count> static inline void pin(float (&)[count]) {}

static inline void multiply(float (&sums)[16], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                            const unsigned char *heads, int part, bool first) {
    using namespace emulated;
    unsigned (&mine)[8] = words[current];
    mine[0] = a0, mine[1] = a1, mine[2] = a2, mine[3] = a3;
    wait(WARP);
    const unsigned quad = current / 4 * 4, lane = current % 32;
    for (unsigned n = 0; n < 16; ++n) {
        const unsigned head = n / 4 * 8 + lane % 4 * 2 + n % 2, row = n / 2 % 2;
        float sum = first ? 0 : sums[n];
        for (unsigned k = 0; k < 32; ++k) {
            const unsigned key = words[quad + k % 16 / 4][row + k / 16 * 2] >> k % 4 * 8;
            const unsigned column = 32 * part + k;
            sum += value_of(key) * value_of(heads[head * 128 + (column / 16 ^ head % 8) * 16 + column % 16]);
        }
        sums[n] = sum;
    }
    wait(WARP);
}
static inline unsigned e4m3_codes(float first, float second) {
    return emulated::code_of(first) | emulated::code_of(second) << 8;
}
static inline void from_halves(unsigned halves, float &first, float &second) {
    first = emulated::from_half(halves & 0xFFFF), second = emulated::from_half(halves >> 16);
}
