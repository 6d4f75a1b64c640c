// Copies rows from the host with the threads of a warp. All copies of swap_in use this.
//
// Compile-time constants:
//   UNIT            bytes per access: 16, 8, 4, 2 or 1; every row of both tiers begins at a multiple of it
//   ROWS_AT_ONCE    rows in flight per warp
//   LOADS           units in flight per lane and row
//
// A read of a host row takes about two microseconds, so the number of bytes in flight decides the speed.
#pragma once
#include "../block.cu"

namespace {

constexpr int LINE = 128;                    // the most bytes that one read from the host transfers
constexpr int STRETCH = 32 * UNIT * LOADS;  // bytes of a row in flight at once

template <int bytes> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<1> { typedef u8 type; };
typedef Word<UNIT>::type Unit;

// The memory of one layer in both tiers.
struct Layer {
    const u8 *host;
    i64 host_stride;
    u8 *device;
    i64 device_stride;
    int row_bytes;
};

// Rows that a warp copies together. `set_source` and `begin_loads` come first; `put` follows when the targets are
// known. All loads of a stretch are issued before its first store.
struct Rows {
    const u8 *source[ROWS_AT_ONCE];
    int skew[ROWS_AT_ONCE];  // bytes from the start of a host cache line to the row; negative: no row
    Unit units[ROWS_AT_ONCE][LOADS];

    __device__ __forceinline__ void set_source(int r, const Layer &layer, i64 row, bool there) {
        source[r] = layer.host + row * layer.host_stride;
        skew[r] = there ? static_cast<int>(reinterpret_cast<unsigned long long>(source[r]) % LINE) : -1;
    }
    __device__ __forceinline__ void begin_loads(const Layer &layer) { load(0, whole(layer)); }
    __device__ __forceinline__ void put(const Layer &layer, const i64 (&device_rows)[ROWS_AT_ONCE]) {
        u8 *target[ROWS_AT_ONCE];
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) target[r] = layer.device + device_rows[r] * layer.device_stride;
        const int end = whole(layer);
        store(target, 0, end);
        for (int start = STRETCH; start < end + LINE; start += STRETCH) {
            load(start, end);
            store(target, start, end);
        }
        const int rest = end + threadIdx.x % 32;  // fewer bytes than a unit remain
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            if (skew[r] >= 0 && rest < layer.row_bytes) target[r][rest] = source[r][rest];
        }
    }

  private:
    static __device__ __forceinline__ int whole(const Layer &layer) { return layer.row_bytes / UNIT * UNIT; }

    // The byte of row r that load i of this lane begins with. Lane 0 reads at the start of a host cache line, so that
    // no line is read twice.
    __device__ __forceinline__ int place(int r, int i, int start) const {
        return start + (i * 32 + static_cast<int>(threadIdx.x % 32)) * UNIT - skew[r];
    }
    __device__ __forceinline__ void load(int start, int end) {
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = place(r, i, start);
                if (skew[r] < 0 || at < 0 || at >= end) continue;
                units[r][i] = __ldcg(reinterpret_cast<const Unit *>(source[r] + at));
            }
        }
    }
    __device__ __forceinline__ void store(u8 *const (&target)[ROWS_AT_ONCE], int start, int end) const {
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = place(r, i, start);
                if (skew[r] >= 0 && at >= 0 && at < end) *reinterpret_cast<Unit *>(target[r] + at) = units[r][i];
            }
        }
    }
};

}  // namespace
