// all_reduce and reduce_scatter. Sums are taken in the order of the ranks, in float32 (float64 for float64), and are
// rounded once. Every rank therefore gets the same bits, and one shot gives the same bits as two.
//
// Compile-time constants: those of channel.cu, and ELEMENT: 0 float32, 1 bfloat16, 2 float64.
#include "channel.cu"

namespace {

#if ELEMENT == 0
typedef float Element;
typedef float Sum;
__device__ __forceinline__ Sum widened(Element value) { return value; }
__device__ __forceinline__ Element rounded(Sum sum) { return sum; }
#elif ELEMENT == 1
typedef unsigned short Element;
typedef float Sum;
__device__ __forceinline__ Sum widened(Element value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }
__device__ __forceinline__ Element rounded(Sum sum) {  // to the nearest, ties to even
    const unsigned bits = __float_as_uint(sum);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
    return static_cast<Element>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#else
typedef double Element;
typedef double Sum;
__device__ __forceinline__ Sum widened(Element value) { return value; }
__device__ __forceinline__ Element rounded(Sum sum) { return sum; }
#endif

constexpr int VECTOR = 16 / sizeof(Element);

// Writes the sums of `count` elements to `out`. The elements begin at `first` in the slots that all ranks filled in
// `round`; `first` is a multiple of VECTOR.
__device__ __forceinline__ void add_slots(const Channel &channel, unsigned round, i64 first, Element *out, i64 count) {
    const Element *slots[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) slots[r] = reinterpret_cast<const Element *>(channel.slot(r, round)) + first;
    const i64 vectors = misalignment(out) == 0 ? count / VECTOR : 0;
    for (i64 vector = threadIdx.x; vector < vectors; vector += THREADS) {
        uint4 loaded[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) loaded[r] = __ldcg(reinterpret_cast<const uint4 *>(slots[r]) + vector);
        Sum sums[VECTOR];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            Element elements[VECTOR];
            memcpy(elements, &loaded[r], 16);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sums[i] = r == 0 ? widened(elements[i]) : sums[i] + widened(elements[i]);
        }
        Element results[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) results[i] = rounded(sums[i]);
        uint4 stored;
        memcpy(&stored, results, 16);
        reinterpret_cast<uint4 *>(out)[vector] = stored;
    }
    for (i64 i = vectors * VECTOR + threadIdx.x; i < count; i += THREADS) {
        Sum sum = widened(__ldcg(slots[0] + i));
#pragma unroll
        for (int r = 1; r < RANKS; ++r) sum += widened(__ldcg(slots[r] + i));
        out[i] = rounded(sum);
    }
}

}  // namespace

// The launch bounds ask for one block per multiprocessor. Otherwise the compiler leaves room for two and spills registers.

// Every rank reads all slots and sums all elements. `x` may be `out`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_one_shot(
    const Element *x, Element *out, i64 count,
    i64 chunk,  // elements per block and round
    u8 *const *peers, i64 rank, i64 slot_bytes, const int *abort) {
    Channel channel(peers, rank, slot_bytes, abort);
    for (i64 first = blockIdx.x * chunk; first < count; first += gridDim.x * chunk) {
        const i64 size = part(first, chunk, count);
        channel.begin_round();
        copy(channel.own_slot(), x + first, size * sizeof(Element), whole_block());
        if (!channel.exchange()) return;
        add_slots(channel, channel.sequence, 0, out + first, size);
    }
}

// Each rank sums its share of the elements, and then gathers the shares of the others. `x` may be `out`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_shot(
    const Element *x, Element *out, i64 count, i64 chunk, u8 *const *peers, i64 rank, i64 slot_bytes,
    const int *abort) {
    Channel channel(peers, rank, slot_bytes, abort);
    for (i64 first = blockIdx.x * chunk; first < count; first += gridDim.x * chunk) {
        const i64 size = part(first, chunk, count);
        const i64 share = (size + RANKS * VECTOR - 1) / (RANKS * VECTOR) * VECTOR;
        channel.begin_round();
        copy(channel.own_slot(), x + first, size * sizeof(Element), whole_block());
        if (!channel.exchange()) return;
        const unsigned staged = channel.sequence;
        channel.begin_round();
        Element *const sums = reinterpret_cast<Element *>(channel.own_slot());
        add_slots(channel, staged, rank * share, sums, part(rank * share, share, size));
        if (!channel.exchange()) return;
        const RankTeam from = team_of_a_rank();
        if (from.rank < RANKS) {
            const i64 begin = from.rank * share;
            const u8 *const gathered = channel.slot(from.rank, channel.sequence);
            copy(out + first + begin, gathered, part(begin, share, size) * sizeof(Element), from.team);
        }
    }
}

// Rank r sums and receives only the elements of its own tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1) reduce_scatter(
    const Element *x,  // [all tokens, width]: the tokens of rank 0, then those of rank 1, ...
    Element *out,      // [own tokens, width]
    i64 width,
    i64 longest,  // the largest number of elements of any rank's tokens
    i64 chunk,    // elements of each rank's tokens per block and round, a multiple of VECTOR
    i64 tokens_0, i64 tokens_2, i64 tokens_4, i64 tokens_6, i64 tokens_8, i64 tokens_10, i64 tokens_12, i64 tokens_14,
    u8 *const *peers, i64 rank, i64 slot_bytes, const int *abort) {
    const TokenCounts counts = {{tokens_0, tokens_2, tokens_4, tokens_6, tokens_8, tokens_10, tokens_12, tokens_14}};
    Channel channel(peers, rank, slot_bytes, abort);
    for (i64 first = blockIdx.x * chunk; first < longest; first += gridDim.x * chunk) {
        channel.begin_round();
        const RankTeam to = team_of_a_rank();
        i64 before;
        if (to.rank < RANKS) {
            const i64 size = part(first, chunk, counts.of(to.rank, before) * width);
            u8 *const staged = channel.own_slot() + to.rank * chunk * sizeof(Element);
            copy(staged, x + before * width + first, size * sizeof(Element), to.team);
        }
        if (!channel.exchange()) return;
        const i64 own = part(first, chunk, counts.of(channel.rank, before) * width);
        add_slots(channel, channel.sequence, rank * chunk, out + first, own);
    }
}
