// send and receive between two workers.
//
// Compile-time constants: those of channel.cu; RANKS is the number of workers.
//
// The sender writes to a slot in the receiver's buffer. Block b of a send exchanges data with block b of the matching
// receive. Each pair of workers, direction and block has two slots and four counters of chunks: the sender holds `SENT`
// and `ACKED`, the receiver `RECEIVED` and `ARRIVED`. A sender waits only if the receiver is two chunks behind.
#include "channel.cu"

namespace {

enum Counter { SENT, ACKED, RECEIVED, ARRIVED, COUNTERS };

struct Inboxes {
    u8 *const *buffers;  // [RANKS]: the buffer of each worker
    const i64 blocks;    // the largest number of blocks of a launch
    const i64 slot_bytes;

    __device__ __forceinline__ unsigned *counter(i64 at, Counter kind, i64 peer) const {
        return reinterpret_cast<unsigned *>(buffers[at] + (blockIdx.x * COUNTERS + kind) * FLAG_BYTES) + peer;
    }
    __device__ __forceinline__ u8 *slot(i64 at, i64 source, unsigned sequence) const {
        const i64 nth = (source * blocks + blockIdx.x) * 2 + sequence % 2;
        return buffers[at] + blocks * COUNTERS * FLAG_BYTES + nth * slot_bytes;
    }
};

// Waits with one thread. All threads of the block call this. Returns false if the abort flag is set.
__device__ __forceinline__ bool block_waits_for(const unsigned *counter, unsigned sequence, const int *abort) {
    return !__syncthreads_or(threadIdx.x == 0 && !wait_for(counter, sequence, abort));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) send(
    const u8 *x, i64 bytes, i64 chunk,  // bytes per block and round, a multiple of 16
    i64 to, u8 *const *buffers, i64 self, i64 blocks, i64 slot_bytes, const int *abort) {
    const Inboxes inboxes = {buffers, blocks, slot_bytes};
    unsigned sent = load_acquire(inboxes.counter(self, SENT, to));
    for (i64 first = blockIdx.x * chunk; first < bytes; first += gridDim.x * chunk) {
        ++sent;
        if (!block_waits_for(inboxes.counter(self, ACKED, to), sent - 2, abort)) return;
        copy(inboxes.slot(to, self, sent), x + first, part(first, chunk, bytes), whole_block());
        __syncthreads();
        if (threadIdx.x == 0) store_release(inboxes.counter(to, ARRIVED, self), sent);
    }
    if (threadIdx.x == 0) store_release(inboxes.counter(self, SENT, to), sent);
}

extern "C" __global__ void __launch_bounds__(THREADS) receive(
    u8 *x, i64 bytes, i64 chunk,
    i64 source, u8 *const *buffers, i64 self, i64 blocks, i64 slot_bytes, const int *abort) {
    const Inboxes inboxes = {buffers, blocks, slot_bytes};
    unsigned received = load_acquire(inboxes.counter(self, RECEIVED, source));
    for (i64 first = blockIdx.x * chunk; first < bytes; first += gridDim.x * chunk) {
        ++received;
        if (!block_waits_for(inboxes.counter(self, ARRIVED, source), received, abort)) return;
        copy(x + first, inboxes.slot(self, source, received), part(first, chunk, bytes), whole_block());
        __syncthreads();
        if (threadIdx.x == 0) store_release(inboxes.counter(source, ACKED, self), received);
    }
    if (threadIdx.x == 0) store_release(inboxes.counter(self, RECEIVED, source), received);
}
