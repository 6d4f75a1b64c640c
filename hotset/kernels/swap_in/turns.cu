// Limits the number of queries whose rows are copied at the same time.
#pragma once
#include "../block.cu"

namespace {

#ifdef __CUDACC__
// A query that takes its turn has a ticket. turns[0] counts the tickets taken, turns[1] the tickets finished, both since
// the start of the process. The holder of a ticket is running and waits only for earlier tickets, so there is no deadlock.
__device__ __forceinline__ unsigned take_turn(unsigned *turns) { return atomicAdd(turns, 1u); }
__device__ __forceinline__ void end_turn(unsigned *turns) { atomicAdd(turns + 1, 1u); }
// Waits until more than `number` tickets are finished. The counters and `number` may wrap around.
__device__ __forceinline__ void wait_until_over(const unsigned *turns, unsigned number) {
    unsigned over;
    do {
        asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(over) : "l"(turns + 1) : "memory");
    } while (static_cast<int>(over - number) <= 0);
}
#endif

}  // namespace
