// all_gather_columns, all_gather_tokens and barrier. Data is copied as bytes.
//
// Compile-time constants: those of channel.cu.
#include "channel.cu"

namespace {

constexpr int TENSORS = 4;  // of one launch of gather_tokens

// Copies `bytes` bytes of a rank's [tokens, row_bytes], starting with byte `first` of it, to the rank's columns of the
// output. Units do not cross the end of a row, because rows are a multiple of them.
template <class Unit>
__device__ __forceinline__ void copy_to_columns(u8 *columns, const u8 *source, unsigned first, unsigned bytes,
                                                unsigned row_bytes, Team team) {
    for (unsigned at = team.index * sizeof(Unit); at < bytes; at += team.threads * sizeof(Unit)) {
        const unsigned row = (first + at) / row_bytes, column = (first + at) % row_bytes;
        u8 *const target = columns + static_cast<i64>(row) * RANKS * row_bytes + column;
        *reinterpret_cast<Unit *>(target) = __ldcg(reinterpret_cast<const Unit *>(source + at));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) barrier(u8 *const *peers, i64 rank, i64 slot_bytes,
                                                              const int *abort) {
    Channel channel(peers, rank, slot_bytes, abort);
    channel.begin_round();
    channel.exchange();
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_columns(
    const u8 *x,  // [tokens, row_bytes], `bytes` bytes
    u8 *out,      // [tokens, RANKS, row_bytes]
    i64 bytes,    // less than 4 GiB
    i64 row_bytes,
    i64 chunk,  // bytes per block and round, a multiple of 16
    u8 *const *peers, i64 rank, i64 slot_bytes, const int *abort) {
    Channel channel(peers, rank, slot_bytes, abort);
    for (i64 first = blockIdx.x * chunk; first < bytes; first += gridDim.x * chunk) {
        const unsigned size = static_cast<unsigned>(part(first, chunk, bytes)), start = static_cast<unsigned>(first);
        channel.begin_round();
        copy(channel.own_slot(), x + first, size, whole_block());
        if (!channel.exchange()) return;
        const RankTeam from = team_of_a_rank();
        if (from.rank == RANKS) continue;
        const u8 *const source = channel.slot(from.rank, channel.sequence);
        u8 *const columns = out + from.rank * row_bytes;
        const unsigned row = static_cast<unsigned>(row_bytes);
        if ((misalignment(columns) | row % 16) == 0) {
            copy_to_columns<uint4>(columns, source, start, size, row, from.team);
        } else if ((misalignment(columns) | row) % 4 == 0) {
            copy_to_columns<unsigned>(columns, source, start, size, row, from.team);
        } else {
            copy_to_columns<u8>(columns, source, start, size, row, from.team);
        }
    }
}

// Gathers up to TENSORS tensors [tokens, row_bytes] of every rank, in the order of the ranks. An unused tensor has
// row_bytes 0. Each block copies `chunk` bytes of every rank's tensor in a round; all chunks together fit into a slot.
extern "C" __global__ void __launch_bounds__(THREADS) gather_tokens(
    const u8 *x_0, u8 *out_0, i64 row_bytes_0, i64 chunk_0,  // a chunk is a multiple of 16 bytes
    const u8 *x_1, u8 *out_1, i64 row_bytes_1, i64 chunk_1,
    const u8 *x_2, u8 *out_2, i64 row_bytes_2, i64 chunk_2,
    const u8 *x_3, u8 *out_3, i64 row_bytes_3, i64 chunk_3,
    i64 rounds,
    i64 tokens_0, i64 tokens_2, i64 tokens_4, i64 tokens_6, i64 tokens_8, i64 tokens_10, i64 tokens_12, i64 tokens_14,
    u8 *const *peers, i64 rank, i64 slot_bytes, const int *abort) {
    const u8 *const xs[TENSORS] = {x_0, x_1, x_2, x_3};
    u8 *const outs[TENSORS] = {out_0, out_1, out_2, out_3};
    const i64 row_bytes[TENSORS] = {row_bytes_0, row_bytes_1, row_bytes_2, row_bytes_3};
    const i64 chunks[TENSORS] = {chunk_0, chunk_1, chunk_2, chunk_3};
    const TokenCounts counts = {{tokens_0, tokens_2, tokens_4, tokens_6, tokens_8, tokens_10, tokens_12, tokens_14}};
    Channel channel(peers, rank, slot_bytes, abort);
    i64 before;
    const i64 own = counts.of(channel.rank, before);
    const RankTeam from = team_of_a_rank();
    const i64 tokens = counts.of(from.rank, before);
    for (i64 round = 0; round < rounds; ++round) {
        const i64 nth = round * gridDim.x + blockIdx.x;
        channel.begin_round();
        u8 *staged = channel.own_slot();
#pragma unroll
        for (int i = 0; i < TENSORS; ++i) {
            const i64 first = nth * chunks[i];
            copy(staged, xs[i] + first, part(first, chunks[i], own * row_bytes[i]), whole_block());
            staged += chunks[i];
        }
        if (!channel.exchange()) return;
        if (from.rank == RANKS) continue;
        const u8 *source = channel.slot(from.rank, channel.sequence);
#pragma unroll
        for (int i = 0; i < TENSORS; ++i) {
            const i64 first = nth * chunks[i];
            u8 *const target = outs[i] + before * row_bytes[i] + first;
            copy(target, source, part(first, chunks[i], tokens * row_bytes[i]), from.team);
            source += chunks[i];
        }
    }
}
