"""Early launches of kernels (programmatic dependent launch): the rule, and what kernels in Triton and CUDA C++ call.

Decode steps are chains of small kernels. A kernel usually starts about a microsecond after the one before it on the
stream has ended. On Hopper, it can be launched early: it starts when all programs of the kernel before it have started
and let it, or else when they have ended. Its programs read weights, and then wait for that kernel's end.

Every program of a kernel that is launched early waits, before it reads anything but weights and before it writes
anything. Then all that was launched before it has ended too, because the kernel before it has waited in the same way or
was launched in order.

Before the wait, a program may prefetch anything into the L2 cache, where later writes reach it. What it reads to find
out what to prefetch can still change. So it checks that these addresses exist, keeps no copy in L1, and uses what it
has read for nothing else (`prefetch_first_tiles` in index_topk/score.cu).

Kernels whose programs just fill the GPU are not launched early. Their programs would be spread unevenly over the
multiprocessors, because some still run programs of the launch before. Started in order, they may let the next launch
start early.
"""
