// Emulates the GPU instructions of hotset/kernels/matrix_units.cu: asynchronous copies, matrix products, and 8- and
// 16-bit numbers. A copy writes its target when the kernel waits for the copy; until then the target holds NaN. Shared
// memory that was never written holds NaN too.
#undef __launch_bounds__
#define __launch_bounds__(...)

struct alignas(16) float4 {
    float x, y, z, w;
};

static inline bool __all_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) == ~0u; }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int n = 0; n < 4; ++n) {
        result |= static_cast<unsigned>(both >> (selector >> 4 * n & 7) * 8 & 0xFF) << 8 * n;
    }
    return result;
}

namespace emulated {

static const bool poisoned = (poison = 0xFF);

struct Copy {
    void *to;
    const unsigned char *at;  // the source
    bool there;               // false: the copy writes zeros and does not read `at`
};
struct Copies {
    enum { MAX_COPIES = 512, MAX_GROUPS = 64 };
    Copy begun[MAX_COPIES];
    int count, groups[MAX_GROUPS], group_count;
};
static Copies copies[MAX_THREADS];

static float from_bfloat(unsigned half) { return __uint_as_float(half << 16); }
static float from_half(unsigned half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? ldexpf(1024 + mantissa, exponent - 25)
                                      : ldexpf(mantissa, -24);
    return half >> 15 ? -size : size;
}
// Rounds to nearest, ties to even.
static unsigned to_bfloat(float value) {
    const unsigned word = __float_as_uint(value);
    if (value != value) return 0x7FFF;
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}
static unsigned to_half(float value) {
    const unsigned sign = __float_as_uint(value) >> 31 << 15;
    const float size = fabsf(value);
    if (value != value) return 0x7FFF;
    if (size == 0) return sign;
    if (size >= 65520) return sign | 0x7C00;
    int exponent;
    frexpf(size, &exponent);
    const int step = (exponent < -13 ? -14 : exponent - 1) - 10;  // log2 of the spacing of float16 numbers at `size`
    const unsigned count = static_cast<unsigned>(nearbyintf(ldexpf(size, -step)));  // multiples of the spacing, <= 2048
    return sign | (exponent < -13 ? count : (static_cast<unsigned>(step + 24) << 10) + count);
}
static unsigned from_e4m3(unsigned code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = (code & 127) == 127 ? NAN
                       : exponent          ? ldexpf(8 + mantissa, exponent - 10)
                                           : ldexpf(mantissa, -9);
    return to_half(code >> 7 ? -size : size);
}

static unsigned words[MAX_THREADS][8];  // by thread: its fragments of a and b in a matrix product
static const unsigned char *row_at[MAX_THREADS];  // by thread: the row that it passes to load_matrices

static unsigned of_matrix(unsigned matrix, unsigned row, unsigned column) {
    uint16_t half;
    memcpy(&half, row_at[current / 32 * 32 + matrix * 8 + row] + 2 * column, 2);
    return half;
}

}  // namespace emulated

static inline void begin_copy_16(void *to, const unsigned char *at, bool there) {
    using namespace emulated;
    Copies &mine = copies[current];
    if (reinterpret_cast<uintptr_t>(to) % 16) fail("the target of a copy is misaligned");
    if (there && reinterpret_cast<uintptr_t>(at) % 16) fail("the source of a copy is misaligned");
    if (mine.count == Copies::MAX_COPIES) fail("too many copies in flight");
    memset(to, 0xFF, 16);
    mine.begun[mine.count++] = Copy{to, at, there};
}
static inline void close_copy_group() {
    emulated::Copies &mine = emulated::copies[emulated::current];
    if (mine.group_count == emulated::Copies::MAX_GROUPS) emulated::fail("too many groups of copies in flight");
    mine.groups[mine.group_count++] = mine.count;
}
template <int left> static inline void wait_for_copies() {
    emulated::Copies &mine = emulated::copies[emulated::current];
    if (mine.group_count <= left) return;
    const int over = mine.group_count - left, end = mine.groups[over - 1];
    for (int n = 0; n < end; ++n) {
        if (mine.begun[n].there) {
            memcpy(mine.begun[n].to, mine.begun[n].at, 16);
        } else {
            memset(mine.begun[n].to, 0, 16);
        }
    }
    memmove(mine.begun, mine.begun + end, (mine.count - end) * sizeof *mine.begun);
    mine.count -= end, mine.group_count = left;
    for (int n = 0; n < left; ++n) mine.groups[n] = mine.groups[n + over] - end;
}
static inline void load_matrices(unsigned (&to)[4], const void *at) {
    using namespace emulated;
    if (reinterpret_cast<uintptr_t>(at) % 16) fail("a misaligned row of a matrix");
    row_at[current] = static_cast<const unsigned char *>(at);
    wait(WARP);
    const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int n = 0; n < 4; ++n) to[n] = of_matrix(n, row, column) | of_matrix(n, row, column + 1) << 16;
    wait(WARP);
}
static inline void load_matrices_transposed(unsigned (&to)[4], const void *at) {
    using namespace emulated;
    if (reinterpret_cast<uintptr_t>(at) % 16) fail("a misaligned row of a matrix");
    row_at[current] = static_cast<const unsigned char *>(at);
    wait(WARP);
    const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int n = 0; n < 4; ++n) to[n] = of_matrix(n, column, row) | of_matrix(n, column + 1, row) << 16;
    wait(WARP);
}
template <bool half> static inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    using namespace emulated;
    unsigned (&mine)[8] = words[current];
    for (int n = 0; n < 4; ++n) mine[n] = a[n];
    mine[4] = b0, mine[5] = b1;
    wait(WARP);
    const unsigned warp = current / 32 * 32, lane = current % 32;
    for (int i = 0; i < 4; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
        float sum = sums[i];
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned shift = k % 2 * 16;
            const unsigned left = words[warp + row * 4 + k % 8 / 2][i / 2 + k / 8 * 2] >> shift & 0xFFFF;
            const unsigned right = words[warp + column * 4 + k % 8 / 2][4 + k / 8] >> shift & 0xFFFF;
            sum += half ? from_half(left) * from_half(right) : from_bfloat(left) * from_bfloat(right);
        }
        sums[i] = sum;
    }
    wait(WARP);
}
static inline void decode(unsigned codes, unsigned &first, unsigned &second) {
    using emulated::from_e4m3;
    first = from_e4m3(codes & 0xFF) | from_e4m3(codes >> 8 & 0xFF) << 16;
    second = from_e4m3(codes >> 16 & 0xFF) | from_e4m3(codes >> 24) << 16;
}
static inline unsigned packed_half(float low, float high) {
    return emulated::to_half(low) | emulated::to_half(high) << 16;
}
static inline unsigned packed_bfloat(float low, float high) {
    return emulated::to_bfloat(low) | emulated::to_bfloat(high) << 16;
}
static inline unsigned multiply_halves(unsigned a, unsigned b) {
    using emulated::from_half;
    return packed_half(from_half(a & 0xFFFF) * from_half(b & 0xFFFF), from_half(a >> 16) * from_half(b >> 16));
}
static inline float power_of_2(float x) { return exp2f(x); }
