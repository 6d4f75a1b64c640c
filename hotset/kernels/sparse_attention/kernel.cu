// sparse_attention on a GPU where few heads share the rows: rank 512, rope 64.
//
// Constants given by the compilation:
//   FP8         1: rows of [512 e4m3 | 4 float32 scales | 64 bfloat16], 0: rows of 576 bfloat16
//   HEADS       of a block: 16 or 32
//   KEYS        of a tile: 32 or 64
//   STAGES      tiles in shared memory: one is worked on, the others are on their way
//   BLOCKS      that a multiprocessor is to hold
//   SHARED_BYTES  as the launch sets them
//
// Rows are copied to shared memory as they are. Each of the four warps takes 128 of the 512 latents, for all heads and
// all keys: its share of the scores, which the warps then add up, and its share of the sums. Codes are made float16 in
// registers, once for each of the two products; the scale of a row's 128 latents is the same for all that a warp
// multiplies, so it is applied to the scores and to the weights, not to the latents.
//
// An fp8 row has a `unit`, the power of two below its largest scale; weights are kept times the unit, so that no weight
// exceeds 1 (as in triton_impl). Scores are in units of log2.

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;

namespace {

constexpr unsigned ALL = ~0u;
constexpr int WARPS = 4;
constexpr int RANK = 512, ROPE = 64, PART = RANK / WARPS;
constexpr int ROW_BYTES = FP8 ? RANK + 4 * WARPS + 2 * ROPE : 2 * (RANK + ROPE);
constexpr int SCALES_AT = RANK;
constexpr int ROPE_AT = ROW_BYTES - 2 * ROPE;
constexpr int PITCH = FP8 ? ROW_BYTES : ROW_BYTES + 16;  // an odd number of 16 bytes: eight rows meet in no bank
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int TURNS = HEADS / 16;            // of the matrix unit, which takes 16 heads
constexpr int ROWS_OF_WARP = KEYS / WARPS;   // that it copies
constexpr int HEADS_OF_WARP = HEADS / WARPS;  // whose weights it computes
constexpr int LANES_OF_HEAD = 32 / HEADS_OF_WARP;
constexpr int QUADS = KEYS / LANES_OF_HEAD / 4;  // of keys, in each of these lanes
constexpr float LOWEST = -1.0e30f;
constexpr float SMALLEST_UNIT = 9.094947017729282e-13f;  // 2**-40

struct Shared {
    alignas(16) u8 tiles[STAGES][KEYS][PITCH];
    alignas(16) float parts[WARPS][HEADS][KEYS + 8];  // scores: the share of each warp
    alignas(16) u16 weights[HEADS][KEYS + 8];
    alignas(16) u16 ratios[WARPS][KEYS];  // scales over units, float16
    alignas(16) float levels[KEYS];       // log2 of the units; minus infinity where there is no row
    alignas(16) float inverses[KEYS];     // 1 / unit, or 0
    int entries[STAGES][KEYS];
    float shrinks[HEADS];
    float totals[HEADS];
    float factors[HEADS];
    float largest[WARPS][HEADS];
    int ends[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launch and the kernel disagree");

#ifdef __CUDACC__
__device__ __forceinline__ u32 shared_address(const void *at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// 16 bytes, or zeros. `at` is not read unless `there`.
__device__ __forceinline__ void copy_unit(void *to, const u8 *at, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(at), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `left` of the groups of copies that this thread began are under way.
template <int left> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// Four 8 x 8 matrices of two bytes. Lane n gives where row n % 8 of matrix n / 8 lies; it gets, of row lane / 4, the
// columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(at))
                 : "memory");
}
// The same, transposed: of column lane / 4, the rows 2 * (lane % 4) and the next.
__device__ __forceinline__ void load_matrices_turned(u32 (&to)[4], const void *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(at))
                 : "memory");
}

// sums [16, 8] += a [16, 16] b [16, 8], of float16 or of bfloat16.
template <bool half> __device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (half) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Four e4m3 numbers as float16: the first two, and the others.
__device__ __forceinline__ void decode(u32 codes, u32 &first, u32 &second) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
        : "=r"(first), "=r"(second)
        : "r"(codes));
}
__device__ __forceinline__ u32 packed_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 packed_bfloat(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}
__device__ __forceinline__ float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

__device__ __forceinline__ float low_of(u32 bfloats) { return __uint_as_float(bfloats << 16); }
__device__ __forceinline__ float high_of(u32 bfloats) { return __uint_as_float(bfloats & 0xFFFF0000u); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
// The largest power of two that is not above x >= 0, and 1 over such a power.
__device__ __forceinline__ float unit_of(float x) {
    return __uint_as_float(__float_as_uint(fmaxf(x, SMALLEST_UNIT)) & 0x7F800000u);
}
__device__ __forceinline__ float inverse_of(float unit) { return __uint_as_float(0x7F000000u - __float_as_uint(unit)); }
__device__ __forceinline__ float level_of(float unit) {
    return static_cast<float>(static_cast<int>(__float_as_uint(unit) >> 23) - 127);
}

// What a block works on.
struct Place {
    i64 row;         // of the queries
    int split;
    int head_first;
    int first, stop;  // entries
};

__device__ __forceinline__ Place place_of(i64 k, i64 heads, i64 splits, i64 split_keys) {
    const int head_blocks = static_cast<int>((heads + HEADS - 1) / HEADS);
    Place place;
    place.head_first = static_cast<int>(blockIdx.x % head_blocks) * HEADS;  // side by side: they read the same rows
    place.split = static_cast<int>(blockIdx.x / head_blocks % splits);
    place.row = blockIdx.x / head_blocks / splits;
    place.first = static_cast<int>(place.split * split_keys);
    place.stop = static_cast<int>(min(place.first + split_keys, k));
    return place;
}

// The entries of the rows that this warp copies, one in each of the first lanes; EMPTY from `stop` on.
__device__ __forceinline__ int load_entry(const i64 *chosen, int start, int stop) {
    const int lane = threadIdx.x % 32, at = start + threadIdx.x / 32 * ROWS_OF_WARP + lane;
    return lane < ROWS_OF_WARP && at < stop ? static_cast<int>(chosen[at]) : -1;
}

__device__ __forceinline__ void begin_tile(Shared &shared, int stage, int entry, const u8 *rows, i64 row_stride) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS_OF_WARP;
    if (lane < ROWS_OF_WARP) shared.entries[stage][first + lane] = entry;
#pragma unroll
    for (int r = 0; r < ROWS_OF_WARP; ++r) {
        const int index = __shfl_sync(ALL, entry, r);
        const u8 *from = rows + static_cast<i64>(max(index, 0)) * row_stride + 16 * lane;
        u8 *to = shared.tiles[stage][first + r] + 16 * lane;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 32) {
            if (chunk + 32 <= CHUNKS || chunk + lane < CHUNKS) copy_unit(to + 16 * chunk, from + 16 * chunk, index >= 0);
        }
    }
}

// Where the entries end that are not all EMPTY up to `stop`. Contains a barrier.
__device__ __forceinline__ int end_of(Shared &shared, const i64 *chosen, int first, int stop) {
    int end = first;
#pragma unroll 4
    for (int at = first + threadIdx.x; at < stop; at += 32 * WARPS) {
        if (chosen[at] >= 0) end = at + 1;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) end = max(end, __shfl_xor_sync(ALL, end, step));
    if (threadIdx.x % 32 == 0) shared.ends[threadIdx.x / 32] = end;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) end = max(end, shared.ends[warp]);
    return end;
}

// The warp's latents of all heads, and 16 of their rope values, as the matrix unit takes them from the left: in each
// step of 16 values, words 0 and 1 belong to heads lane / 4 and lane / 4 + 8, and 2 and 3 to the same.
struct Query {
    u32 latents[TURNS][PART / 16][4];
    u32 rope[TURNS][4];
};

// In a step over codes a lane multiplies the values 4 * (lane % 4) to + 3, which lie in one word of codes; over bfloat16
// values those at 2 * (lane % 4) and, 8 later, the next two. The order of values is free if it is the same on both sides.
__device__ __forceinline__ void load_query(Query &query, const u16 *q, i64 head_stride, int heads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2, head = turn * 16 + later * 8 + lane / 4;
        const u16 *mine = q + head * head_stride;
        const bool there = head < heads;
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            u32 (&words)[4] = query.latents[turn][step];
            if (FP8) {
                const u16 *at = mine + warp * PART + step * 16 + 4 * (lane % 4);
                const uint2 values = there ? *reinterpret_cast<const uint2 *>(at) : uint2{0, 0};
                words[later] = values.x, words[later + 2] = values.y;
            } else {
                const u16 *at = mine + warp * PART + step * 16 + 2 * (lane % 4);
                words[later] = there ? *reinterpret_cast<const u32 *>(at) : 0;
                words[later + 2] = there ? *reinterpret_cast<const u32 *>(at + 8) : 0;
            }
        }
        const u16 *at = mine + RANK + warp * 16 + 2 * (lane % 4);
        query.rope[turn][later] = there ? *reinterpret_cast<const u32 *>(at) : 0;
        query.rope[turn][later + 2] = there ? *reinterpret_cast<const u32 *>(at + 8) : 0;
    }
}

// Divides the query of each head by a power of two, such that its latents fit float16, and makes them that. Writes the
// factors of the scores. Contains a barrier.
__device__ __forceinline__ void quantise_query(Shared &shared, Query &query, float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2;
        float most = 0;
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            const u32 (&words)[4] = query.latents[turn][step];
            most = fmaxf(most, fmaxf(fabsf(low_of(words[later])), fabsf(high_of(words[later]))));
            most = fmaxf(most, fmaxf(fabsf(low_of(words[later + 2])), fabsf(high_of(words[later + 2]))));
        }
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
        if (lane % 4 == 0) shared.largest[warp][turn * 16 + later * 8 + lane / 4] = most;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int turn = n / 2, later = n % 2, head = turn * 16 + later * 8 + lane / 4;
        float most = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) most = fmaxf(most, shared.largest[other][head]);
        const float unit = unit_of(most), inverse = inverse_of(unit);
#pragma unroll
        for (int step = 0; step < PART / 16; ++step) {
            u32 (&words)[4] = query.latents[turn][step];
            words[later] = packed_half(low_of(words[later]) * inverse, high_of(words[later]) * inverse);
            words[later + 2] = packed_half(low_of(words[later + 2]) * inverse, high_of(words[later + 2]) * inverse);
        }
        u32 (&rope)[4] = query.rope[turn];
        rope[later] = packed_bfloat(low_of(rope[later]) * inverse, high_of(rope[later]) * inverse);
        rope[later + 2] = packed_bfloat(low_of(rope[later + 2]) * inverse, high_of(rope[later + 2]) * inverse);
        if (warp == 0 && lane % 4 == 0) shared.factors[head] = scale * unit;
    }
}

// The warp's share of the scores of 16 keys.
__device__ __forceinline__ void score(Shared &shared, const u8 (*tile)[PITCH], int key, const Query &query) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[2][TURNS][4] = {}, of_rope[2][TURNS][4] = {};
    u32 words[4];
    load_matrices(words, tile[key + lane / 16 * 8 + lane % 8] + ROPE_AT + warp * 32 + lane / 8 % 2 * 16);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        multiply<false>(FP8 ? of_rope[0][turn] : sums[0][turn], query.rope[turn], words[0], words[1]);
        multiply<false>(FP8 ? of_rope[1][turn] : sums[1][turn], query.rope[turn], words[2], words[3]);
    }
#pragma unroll
    for (int start = 0; start < PART * (FP8 ? 1 : 2); start += 64) {  // bytes of a row
        u32 keys[2][4];
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            const u8 *from = tile[key + eight * 8 + lane % 8] + warp * (PART * (FP8 ? 1 : 2)) + start;
            load_matrices(keys[eight], from + lane / 8 * 16);
        }
#pragma unroll
        for (int n = 0; n < (FP8 ? 4 : 2); ++n) {
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                u32 b0 = keys[eight][2 * n % 4], b1 = keys[eight][(2 * n + 1) % 4];
                if (FP8) decode(keys[eight][n], b0, b1);
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    multiply<FP8>(sums[eight][turn], query.latents[turn][start / (FP8 ? 16 : 32) + n], b0, b1);
                }
            }
        }
    }
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
        const int at = key + eight * 8 + 2 * (lane % 4);
        if (FP8) {
            const float first = *reinterpret_cast<const float *>(tile[at] + SCALES_AT + 4 * warp);
            const float second = *reinterpret_cast<const float *>(tile[at + 1] + SCALES_AT + 4 * warp);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[eight][turn][i] = sums[eight][turn][i] * (i % 2 ? second : first) + of_rope[eight][turn][i];
                }
            }
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const float (&mine)[4] = sums[eight][turn];
            const int head = turn * 16 + lane / 4;
            *reinterpret_cast<float2 *>(&shared.parts[warp][head][at]) = float2{mine[0], mine[1]};
            *reinterpret_cast<float2 *>(&shared.parts[warp][head + 8][at]) = float2{mine[2], mine[3]};
        }
    }
}

// Of the rows that this warp copied: units, as they enter scores and weights.
__device__ __forceinline__ void note_rows(Shared &shared, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane >= ROWS_OF_WARP) return;
    const int key = threadIdx.x / 32 * ROWS_OF_WARP + lane;
    const bool there = shared.entries[stage][key] >= 0;
    float unit = 1;
    if (FP8) {
        const float4 scales = *reinterpret_cast<const float4 *>(shared.tiles[stage][key] + SCALES_AT);
        unit = unit_of(fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w)));
        const float inverse = inverse_of(unit);
        const u32 first = packed_half(scales.x * inverse, scales.y * inverse);
        const u32 second = packed_half(scales.z * inverse, scales.w * inverse);
        shared.ratios[0][key] = static_cast<u16>(first), shared.ratios[1][key] = static_cast<u16>(first >> 16);
        shared.ratios[2][key] = static_cast<u16>(second), shared.ratios[3][key] = static_cast<u16>(second >> 16);
    }
    shared.levels[key] = there ? level_of(unit) : minus_infinity();
    shared.inverses[key] = there ? inverse_of(unit) : 0;
}

// Adds the shares of the scores up and makes weights of them. A few lanes belong to each head: `most` is the largest
// score of the head so far, `mass` the sum of 2**(score - most) over the keys of this lane.
__device__ __forceinline__ void weigh(Shared &shared, float factor, float &most, float &mass) {
    const int lane = threadIdx.x % 32, mine = lane % LANES_OF_HEAD;
    const int head = threadIdx.x / 32 * HEADS_OF_WARP + lane / LANES_OF_HEAD;
    float scores[QUADS][4], now = most;
    int keys[QUADS];
#pragma unroll
    for (int n = 0; n < QUADS; ++n) {
        // Heads that are read together meet in no bank.
        keys[n] = 4 * (QUADS == 2 ? 2 * mine + (n ^ (head & 1)) : n * LANES_OF_HEAD + mine);
        float4 sum = *reinterpret_cast<const float4 *>(&shared.parts[0][head][keys[n]]);
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) {
            const float4 more = *reinterpret_cast<const float4 *>(&shared.parts[warp][head][keys[n]]);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        const float4 level = *reinterpret_cast<const float4 *>(&shared.levels[keys[n]]);
        scores[n][0] = sum.x * factor + level.x, scores[n][1] = sum.y * factor + level.y;
        scores[n][2] = sum.z * factor + level.z, scores[n][3] = sum.w * factor + level.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) now = fmaxf(now, scores[n][i]);
    }
#pragma unroll
    for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) now = fmaxf(now, __shfl_xor_sync(ALL, now, step));
    const float shrink = power_of_2(most - now);
    most = now, mass *= shrink;
    if (mine == 0) shared.shrinks[head] = shrink;
#pragma unroll
    for (int n = 0; n < QUADS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = power_of_2(scores[n][i] - now);
        const float4 inverse = *reinterpret_cast<const float4 *>(&shared.inverses[keys[n]]);
        mass += scores[n][0] * inverse.x + scores[n][1] * inverse.y + scores[n][2] * inverse.z + scores[n][3] * inverse.w;
        const uint2 packed = FP8 ? uint2{packed_half(scores[n][0], scores[n][1]), packed_half(scores[n][2], scores[n][3])}
                                 : uint2{packed_bfloat(scores[n][0], scores[n][1]),
                                         packed_bfloat(scores[n][2], scores[n][3])};
        *reinterpret_cast<uint2 *>(&shared.weights[head][keys[n]]) = packed;
    }
}

// Sums over keys of weight * latent: of heads lane / 4 (words 0, 1 of each four) and lane / 4 + 8. In fp8, sums 2n and
// 2n + 1 hold the latents 16n + 4 * (lane % 4) + {0, 2} and + {1, 3}; else sums n hold 8n + 2 * (lane % 4) + {0, 1}.
typedef float Sums[TURNS][PART / 8][4];

__device__ __forceinline__ void shrink_sums(const Shared &shared, Sums &sums) {
    const int lane = threadIdx.x % 32;
    float shrinks[TURNS][2];
    bool all_one = true;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        shrinks[n / 2][n % 2] = shared.shrinks[n * 8 + lane / 4];
        all_one &= shrinks[n / 2][n % 2] == 1;
    }
    if (__all_sync(ALL, all_one)) return;  // as soon as every head has met its largest score
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int n = 0; n < PART / 8; ++n) {
            sums[turn][n][0] *= shrinks[turn][0], sums[turn][n][1] *= shrinks[turn][0];
            sums[turn][n][2] *= shrinks[turn][1], sums[turn][n][3] *= shrinks[turn][1];
        }
    }
}

__device__ __forceinline__ void add_keys(const Shared &shared, const u8 (*tile)[PITCH], int key, Sums &sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 weights[TURNS][4];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        load_matrices(weights[turn], &shared.weights[turn * 16 + lane % 16][key + lane / 16 * 8]);
        if (FP8) {
            const u16 *ratios = &shared.ratios[warp][key + 2 * (lane % 4)];
            const u32 first = *reinterpret_cast<const u32 *>(ratios), second = *reinterpret_cast<const u32 *>(ratios + 8);
#pragma unroll
            for (int n = 0; n < 4; ++n) weights[turn][n] = multiply_halves(weights[turn][n], n < 2 ? first : second);
        }
    }
    const u8 *from = tile[key + lane % 16] + warp * (PART * (FP8 ? 1 : 2)) + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < PART / (FP8 ? 32 : 16); ++n) {
        u32 words[4];
        load_matrices_turned(words, from + 32 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b0 = words[2 * half], b1 = words[2 * half + 1];
            if (FP8) {
                // A word holds two codes of one key and then two of the next: to be multiplied, keys must come first.
                u32 even0, odd0, even1, odd1;
                decode(__byte_perm(b0, 0, 0x3120), even0, odd0);
                decode(__byte_perm(b1, 0, 0x3120), even1, odd1);
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    multiply<true>(sums[turn][4 * n + 2 * half], weights[turn], even0, even1);
                    multiply<true>(sums[turn][4 * n + 2 * half + 1], weights[turn], odd0, odd1);
                }
            } else {
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) multiply<false>(sums[turn][2 * n + half], weights[turn], b0, b1);
            }
        }
    }
}

__device__ __forceinline__ void store_four(void *out, bool partial, i64 at, float a, float b, float c, float d) {
    if (partial) {
        *reinterpret_cast<float4 *>(static_cast<float *>(out) + at) = float4{a, b, c, d};
    } else {
        *reinterpret_cast<uint2 *>(static_cast<u16 *>(out) + at) = uint2{packed_bfloat(a, b), packed_bfloat(c, d)};
    }
}
__device__ __forceinline__ void store_two(void *out, bool partial, i64 at, float a, float b) {
    if (partial) {
        *reinterpret_cast<float2 *>(static_cast<float *>(out) + at) = float2{a, b};
    } else {
        *reinterpret_cast<u32 *>(static_cast<u16 *>(out) + at) = packed_bfloat(a, b);
    }
}

__device__ __forceinline__ void store_sums(const Shared &shared, const Sums &sums, void *out, bool partial, i64 first,
                                           int heads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2 * TURNS; ++n) {
        const int head = n * 8 + lane / 4, i = n % 2 * 2;
        if (head >= heads) continue;
        const float inverse = 1 / shared.totals[head];
        const i64 at = first + head * RANK + warp * PART;
        const float (&mine)[PART / 8][4] = sums[n / 2];
#pragma unroll
        for (int m = 0; m < PART / 16; ++m) {
            const float (&one)[4] = mine[2 * m], (&other)[4] = mine[2 * m + 1];
            if (FP8) {
                store_four(out, partial, at + 16 * m + 4 * (lane % 4), one[i] * inverse, other[i] * inverse,
                           one[i + 1] * inverse, other[i + 1] * inverse);
            } else {
                store_two(out, partial, at + 16 * m + 2 * (lane % 4), one[i] * inverse, one[i + 1] * inverse);
                store_two(out, partial, at + 16 * m + 8 + 2 * (lane % 4), other[i] * inverse, other[i + 1] * inverse);
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attend(
    const u16 *q,       // [rows, heads, 576] bfloat16; heads begin at multiples of 8 bytes
    const u8 *rows,     // [device rows, row_stride bytes]
    const i64 *chosen,  // [rows, k], EMPTY-padded anywhere
    void *out,          // [rows, heads, 512] bfloat16; of several splits: [rows, splits, heads, 512] float32
    float *lse,         // [rows, splits, heads]: log2 of the sum of 2**score; written of several splits
    i64 q_row_stride, i64 q_head_stride, i64 row_stride, i64 chosen_stride, i64 k, i64 heads, i64 splits, i64 split_keys,
    i64 scale_bits) {
    extern __shared__ int4 shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_next_launch_begin();
    const Place place = place_of(k, heads, splits, split_keys);
    const int first = place.first, my_heads = static_cast<int>(heads) - place.head_first;
    const i64 *my_chosen = chosen + place.row * chosen_stride;
    const float scale = __uint_as_float(static_cast<u32>(scale_bits));

    int entry = load_entry(my_chosen, first, place.stop);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        begin_tile(shared, stage, entry, rows, row_stride);
        end_copies();
        entry = load_entry(my_chosen, first + (stage + 1) * KEYS, place.stop);
    }
    Query query;
    load_query(query, q + place.row * q_row_stride + place.head_first * q_head_stride, q_head_stride, my_heads);
    const int tiles = (end_of(shared, my_chosen, first, place.stop) - first + KEYS - 1) / KEYS;
    if (FP8) quantise_query(shared, query, scale);
    __syncthreads();
    const int weighed_head = warp * HEADS_OF_WARP + lane / LANES_OF_HEAD;
    const float factor = FP8 ? shared.factors[weighed_head] : scale;
    float most = LOWEST, mass = 0;
    Sums sums = {};
    for (int n = 0; n < tiles; ++n) {
        const int stage = n % STAGES;
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the tile is there, for all; that of the step before may be replaced
        const int coming = n + STAGES - 1;
        begin_tile(shared, coming % STAGES, entry, rows, row_stride);  // of zeros, past the last entry
        end_copies();
        entry = load_entry(my_chosen, first + (coming + 1) * KEYS, place.stop);
        note_rows(shared, stage);
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) score(shared, shared.tiles[stage], key, query);
        __syncthreads();
        weigh(shared, factor, most, mass);
        __syncthreads();
        shrink_sums(shared, sums);
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) add_keys(shared, shared.tiles[stage], key, sums);
    }
    wait_for_copies<0>();
#pragma unroll
    for (int step = LANES_OF_HEAD / 2; step > 0; step /= 2) mass += __shfl_xor_sync(ALL, mass, step);
    if (lane % LANES_OF_HEAD == 0) shared.totals[weighed_head] = tiles > 0 ? mass : 1;
    const bool partial = splits > 1;
    if (partial && lane % LANES_OF_HEAD == 0 && weighed_head < my_heads) {
        const i64 at = (place.row * splits + place.split) * heads + place.head_first + weighed_head;
        lse[at] = tiles > 0 ? most + log2f(mass) : minus_infinity();
    }
    __syncthreads();
    if (partial && tiles == 0) return;  // the merge does not read the sums of a split without a row
    const i64 part = place.row * splits + place.split;
    store_sums(shared, sums, out, partial, (part * heads + place.head_first) * RANK, my_heads);
}
