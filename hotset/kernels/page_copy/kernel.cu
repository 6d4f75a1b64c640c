// page_copy on a GPU: a few blocks copy the pieces of all layers, in chunks of `chunk_rows` rows.
//
// Compile-time constants: THREADS per block, a multiple of 32 up to 1024, and SHARED_BYTES, as set by the launch.

typedef long long i64;
typedef unsigned char u8;

namespace {

constexpr int WARPS = THREADS / 32;
constexpr int LOADS = 4;                     // `Unit`s in flight per lane
constexpr int STRIP_BYTES = 32 * 16 * LOADS;  // contiguous bytes that a warp copies at a time
constexpr unsigned ALL = ~0u;

struct Shared {
    i64 pieces[THREADS][3];  // a copy, since the originals may be in slow host memory
    unsigned ends[THREADS];  // number of chunks up to and including each piece
    unsigned warp_totals[32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree about the size of Shared");

template <class Unit> __device__ __forceinline__ void copy_units(u8 *target, const u8 *source, i64 bytes) {
    const int lane = threadIdx.x % 32;
    const i64 units = bytes / sizeof(Unit);
    const Unit *from = reinterpret_cast<const Unit *>(source);
    Unit *to = reinterpret_cast<Unit *>(target);
    for (i64 start = lane; start < units; start += 32 * LOADS) {
        Unit values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (start + 32 * i < units) values[i] = __ldcg(from + start + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (start + 32 * i < units) to[start + 32 * i] = values[i];
        }
    }
    for (i64 rest = units * sizeof(Unit) + lane; rest < bytes; rest += 32) target[rest] = source[rest];
}

// Copies with one warp, in units of 16, 4 or 1 bytes: the widest to which source and target are aligned.
__device__ __forceinline__ void copy_with_warp(u8 *target, const u8 *source, i64 bytes) {
    typedef unsigned long long Address;
    const Address both = reinterpret_cast<Address>(target) | reinterpret_cast<Address>(source);
    if (both % 16 == 0) {
        copy_units<uint4>(target, source, bytes);
    } else if (both % 4 == 0) {
        copy_units<unsigned>(target, source, bytes);
    } else {
        copy_units<u8>(target, source, bytes);
    }
}

// Copies rows with the warps of a block.
__device__ __forceinline__ void copy_rows(u8 *target, i64 target_stride, const u8 *source, i64 source_stride, i64 rows,
                                          i64 row_bytes) {
    const int warp = threadIdx.x / 32;
    if (target_stride == row_bytes && source_stride == row_bytes) {
        const i64 bytes = rows * row_bytes;
        for (i64 start = warp * STRIP_BYTES; start < bytes; start += WARPS * STRIP_BYTES) {
            copy_with_warp(target + start, source + start, min(static_cast<i64>(STRIP_BYTES), bytes - start));
        }
    } else {
        for (i64 row = warp; row < rows; row += WARPS) {
            copy_with_warp(target + row * target_stride, source + row * source_stride, row_bytes);
        }
    }
}

// Returns the number of chunks of the pieces of all threads up to and including this one. Contains a barrier.
__device__ __forceinline__ unsigned count_chunks(Shared &shared, unsigned chunks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = chunks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL, sum, step);
        sum += lane >= step ? below : 0;
    }
    if (lane == 31) shared.warp_totals[warp] = sum;
    __syncthreads();
    for (int before = 0; before < warp; ++before) sum += shared.warp_totals[before];
    return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(
    const i64 *pieces,  // [count, 3]: device row, host row, number of rows. `source_column` and `target_column` are 0 or 1.
    i64 count, i64 layers, i64 row_bytes, i64 chunk_rows,
    const u8 *source, i64 source_layer_stride, i64 source_stride, i64 source_column,  // strides in bytes
    u8 *target, i64 target_layer_stride, i64 target_stride, i64 target_column) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    for (i64 start = 0; start < count; start += THREADS) {
        const i64 mine = start + threadIdx.x;
        i64 rows = 0;
        if (mine < count) {
            for (int i = 0; i < 3; ++i) shared.pieces[threadIdx.x][i] = pieces[3 * mine + i];
            rows = shared.pieces[threadIdx.x][2];
        }
        shared.ends[threadIdx.x] = count_chunks(shared, static_cast<unsigned>((rows + chunk_rows - 1) / chunk_rows));
        __syncthreads();
        const unsigned total = shared.ends[THREADS - 1];
        for (i64 work = blockIdx.x; work < total * layers; work += gridDim.x) {
            const i64 layer = work / total;
            const unsigned chunk = static_cast<unsigned>(work % total);
            int low = 0, high = THREADS - 1;  // searches for the first piece whose `ends` exceeds `chunk`
            while (low < high) {
                const int middle = (low + high) / 2;
                if (shared.ends[middle] > chunk) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            const i64 *piece = shared.pieces[low];
            const i64 first = (chunk - (low > 0 ? shared.ends[low - 1] : 0)) * chunk_rows;
            u8 *to = target + layer * target_layer_stride + (piece[target_column] + first) * target_stride;
            const u8 *from = source + layer * source_layer_stride + (piece[source_column] + first) * source_stride;
            copy_rows(to, target_stride, from, source_stride, min(chunk_rows, piece[2] - first), row_bytes);
        }
        __syncthreads();  // before the next pieces overwrite `shared`
    }
}
