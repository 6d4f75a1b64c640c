// Shared by the collective kernels: flags between ranks, staging slots, copies by a block.
//
// Compile-time constants: RANKS of the group, up to 16, and THREADS per block, a multiple of 32.
//
// Block b of every rank forms a channel with the blocks b of the other ranks. Channels share nothing, so blocks of one
// rank never wait for each other, and launches with different numbers of blocks may alternate. In a rank's staging
// buffer, a channel has one line of flags and two slots. Calls advance in rounds:
//
// 1. Write data to the own slot `sequence % 2`.
// 2. Store `sequence` to the own flag in the buffer of every rank (release), and wait until the flags of all ranks in
//    the own buffer have reached it (acquire).
// 3. Read the slots of the other ranks.
//
// A slot is written again two rounds later. By then every rank has published the round in between, and each rank has
// read all slots of a round before it publishes the next one. The sequence number is the rank's flag in its own buffer,
// so it continues in the next launch, also if a graph is replayed.
#pragma once

typedef long long i64;
typedef unsigned char u8;

namespace {

constexpr int FLAG_BYTES = 128;  // of one channel in one buffer: a flag of every rank
constexpr int LOADS = 4;         // loads in flight per thread of a copy
// Other ranks may be far behind. The abort flag is in host memory, where each load takes about a microsecond.
constexpr unsigned SPINS_PER_ABORT_POLL = 256;
static_assert(RANKS * 4 <= FLAG_BYTES && RANKS <= THREADS, "too many ranks");

#ifdef __CUDACC__
__device__ __forceinline__ unsigned load_acquire(const unsigned *address) {
    unsigned value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(unsigned *address, unsigned value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ int load_relaxed(const int *address) {
    int value;
    asm volatile("ld.relaxed.sys.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ void let_others_run() {}  // the emulation runs other threads here
#endif

// Waits until `*flag`, which may wrap around, has reached `sequence`. Returns false if the abort flag is set.
__device__ __forceinline__ bool wait_for(const unsigned *flag, unsigned sequence, const int *abort) {
    for (unsigned spins = 1; static_cast<int>(load_acquire(flag) - sequence) < 0; ++spins) {
        if (spins % SPINS_PER_ABORT_POLL == 0 && load_relaxed(abort) != 0) return false;
        let_others_run();
    }
    return true;
}

// The threads of a block that work on one copy. With several copies at a time, their loads overlap.
struct Team {
    int index, threads;
};

template <class Unit> __device__ __forceinline__ void copy_units(u8 *target, const u8 *source, i64 bytes, Team team) {
    const i64 units = bytes / sizeof(Unit);
    const Unit *from = reinterpret_cast<const Unit *>(source);
    Unit *to = reinterpret_cast<Unit *>(target);
    for (i64 start = team.index; start < units; start += team.threads * LOADS) {
        Unit values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (start + team.threads * i < units) values[i] = __ldcg(from + start + team.threads * i);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (start + team.threads * i < units) to[start + team.threads * i] = values[i];
        }
    }
    for (i64 rest = units * sizeof(Unit) + team.index; rest < bytes; rest += team.threads) {
        target[rest] = __ldcg(source + rest);
    }
}

__device__ __forceinline__ unsigned misalignment(const void *address) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address) % 16);
}

// Copies in units of 16, 4 or 1 bytes: the widest to which source and target are aligned. Bypasses the L1 cache, which
// may hold old data of another rank's slot. Not inlined, which takes fewer registers and less time to compile.
__device__ __noinline__ void copy(void *target, const void *source, i64 bytes, Team team) {
    u8 *const to = static_cast<u8 *>(target);
    const u8 *const from = static_cast<const u8 *>(source);
    const unsigned both = misalignment(to) | misalignment(from);
    if (both == 0) {
        copy_units<uint4>(to, from, bytes, team);
    } else if (both % 4 == 0) {
        copy_units<unsigned>(to, from, bytes, team);
    } else {
        copy_units<u8>(to, from, bytes, team);
    }
}

// Returns the number of values of [first, first + chunk) that are below `count`.
__device__ __forceinline__ i64 part(i64 first, i64 chunk, i64 count) {
    return max(static_cast<i64>(0), min(chunk, count - first));
}

// This block's channel.
struct Channel {
    u8 *const *peers;  // [RANKS]: the staging buffer of each rank
    const int rank;
    const i64 slot_bytes;  // a multiple of 16
    const int *const abort;
    unsigned sequence;  // of the current round

    __device__ __forceinline__ Channel(u8 *const *peers, i64 rank, i64 slot_bytes, const int *abort)
        : peers(peers), rank(static_cast<int>(rank)), slot_bytes(slot_bytes), abort(abort) {
        sequence = load_acquire(flag(this->rank, this->rank));
    }

    __device__ __forceinline__ u8 *area(int of) const {
        return peers[of] + blockIdx.x * (FLAG_BYTES + 2 * slot_bytes);
    }
    __device__ __forceinline__ unsigned *flag(int at, int from) const {
        return reinterpret_cast<unsigned *>(area(at)) + from;
    }
    __device__ __forceinline__ u8 *slot(int of, unsigned round) const {
        return area(of) + FLAG_BYTES + round % 2 * slot_bytes;
    }
    __device__ __forceinline__ u8 *own_slot() const { return slot(rank, sequence); }

    __device__ __forceinline__ void begin_round() { ++sequence; }

    // Publishes the own slot, and waits until every rank has published its slot of this round. All threads of the block
    // call this. Returns false if the abort flag is set.
    __device__ __forceinline__ bool exchange() const {
        __syncthreads();
        bool aborted = false;
        if (threadIdx.x < RANKS) {
            const int peer = static_cast<int>(threadIdx.x);
            store_release(flag(peer, rank), sequence);
            aborted = !wait_for(flag(rank, peer), sequence, abort);
        }
        return !__syncthreads_or(aborted);
    }
};

__device__ __forceinline__ Team whole_block() { return {static_cast<int>(threadIdx.x), THREADS}; }

// Divides the block into one team per rank, and returns this thread's. The threads that are left have rank RANKS.
struct RankTeam {
    int rank;
    Team team;
};
__device__ __forceinline__ RankTeam team_of_a_rank() {
    constexpr int PER_RANK = THREADS / RANKS;
    const int thread = static_cast<int>(threadIdx.x);
    return {thread / PER_RANK < RANKS ? thread / PER_RANK : RANKS, {thread % PER_RANK, PER_RANK}};
}

// The numbers of tokens of up to 16 ranks, two of them in each parameter of a kernel.
struct TokenCounts {
    i64 words[8];

    // Returns the tokens of a rank. `before` becomes the tokens of all ranks before it.
    __device__ __forceinline__ i64 of(int rank, i64 &before) const {
        i64 own = 0;
        before = 0;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const i64 count = words[r / 2] >> (32 * (r % 2)) & 0xffffffffLL;
            if (r < rank) before += count;
            if (r == rank) own = count;
        }
        return own;
    }
};

}  // namespace
