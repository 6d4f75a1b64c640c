// swap_in's copy on a GPU: a bounded grid over the rows that are to be copied.
//
// Constants given by the compilation:
//   THREADS         of a block: a multiple of 32
//   UNIT            bytes of one access: 16, 8, 4, 2 or 1; every row of both tiers begins at a multiple of it
//   ROWS_AT_ONCE    rows that a warp has under way, LOADS units of each in every lane
//
// A row of host memory takes about two microseconds to come, so the bytes under way at any time decide.

typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long Address;

namespace {

constexpr unsigned ALL = ~0u;  // lanes of a warp

#ifdef __CUDACC__
// A launch that was allowed to begin early waits here until all before it is done and visible. Else it does nothing.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

constexpr int LINE = 128;         // bytes; a request to the host never spans more
constexpr int LISTS_OF_LANE = 4;  // batch rows whose counts one lane holds

template <int bytes> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<1> { typedef u8 type; };
typedef Word<UNIT>::type Unit;

struct Row {
    const u8 *source;
    u8 *target;
    int skew;  // bytes from the beginning of a line of host memory to the row; negative: there is no row
};

// Copies rows with one warp: all loads of a stretch are on their way before the first store. Lanes are laid out along
// the lines of host memory, so that no line is asked for twice.
__device__ __forceinline__ void copy_with_warp(const Row (&rows)[ROWS_AT_ONCE], int row_bytes) {
    const int lane = threadIdx.x % 32;
    const int whole = row_bytes / UNIT * UNIT;
    for (int start = 0; start < whole + LINE; start += 32 * UNIT * LOADS) {
        Unit units[ROWS_AT_ONCE][LOADS];
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = start + (i * 32 + lane) * UNIT - rows[r].skew;
                if (rows[r].skew >= 0 && at >= 0 && at < whole) {
                    units[r][i] = __ldcg(reinterpret_cast<const Unit *>(rows[r].source + at));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = start + (i * 32 + lane) * UNIT - rows[r].skew;
                if (rows[r].skew >= 0 && at >= 0 && at < whole) {
                    *reinterpret_cast<Unit *>(rows[r].target + at) = units[r][i];
                }
            }
        }
    }
    const int rest = whole + lane;  // fewer bytes than a unit are left
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
        if (rows[r].skew >= 0 && rest < row_bytes) rows[r].target[rest] = rows[r].source[rest];
    }
}

}  // namespace

// The nth row to be copied, over all lists in order, is the business of warp n % warps. So rows that are near each
// other on the host are read at about the same time, which spares address translations.
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const i64 *copy_host, const i64 *copy_device,  // [batch, most]
    const int *copy_counts,                        // [batch]: entries of each list; fewer than 2^31 in all
    i64 batch, i64 most, const u8 *host, i64 host_stride, u8 *device, i64 device_stride, i64 row_bytes) {
    const int lane = threadIdx.x % 32;
    const unsigned warps = gridDim.x * (THREADS / 32);
    const unsigned warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    wait_for_earlier_launches();
    unsigned passed = 0;  // rows in the lists before `start`
    for (int start = 0; start < batch; start += 32 * LISTS_OF_LANE) {
        unsigned count[LISTS_OF_LANE], mine = 0;
#pragma unroll
        for (int i = 0; i < LISTS_OF_LANE; ++i) {
            const int list = start + lane * LISTS_OF_LANE + i;
            count[i] = list < batch ? __ldcg(copy_counts + list) : 0;
            mine += count[i];
        }
        unsigned end = mine;  // rows in the lists of this lane and those before it
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned below = __shfl_up_sync(ALL, end, step);
            end += lane >= step ? below : 0;
        }
        const unsigned total = __shfl_sync(ALL, end, 31);
        if (total == 0) continue;
        for (unsigned nth = (warp + warps - passed % warps) % warps; nth < total; nth += warps * ROWS_AT_ONCE) {
            Row rows[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) {
                const bool there = nth + r * warps < total;
                const unsigned index = there ? nth + r * warps : nth;
                const int owner = __popc(__ballot_sync(ALL, index >= end));  // the lane in whose lists it is
                unsigned within = index - __shfl_sync(ALL, end - mine, owner);
                int list = 0;
#pragma unroll
                for (int i = 0; i < LISTS_OF_LANE - 1; ++i) {
                    const unsigned length = __shfl_sync(ALL, count[i], owner);
                    const bool later = list == i && within >= length;
                    within -= later ? length : 0;
                    list += later;
                }
                const i64 entry = (start + owner * LISTS_OF_LANE + list) * most + within;
                rows[r].source = host + __ldcg(copy_host + entry) * host_stride;
                rows[r].target = device + __ldcg(copy_device + entry) * device_stride;
                rows[r].skew = there ? static_cast<int>(reinterpret_cast<Address>(rows[r].source) % LINE) : -1;
            }
            copy_with_warp(rows, static_cast<int>(row_bytes));
        }
        passed += total;
    }
}
