"""Early launches of kernels (programmatic dependent launch): the rule, and what kernels in Triton and CUDA C++ call.

Decode steps are chains of small kernels. A kernel usually starts about a microsecond after the one before it on the
stream has ended. On Hopper, it can be launched early: it starts when every program of the kernel before it has allowed
that (`let_next_launch_start`) or has ended. Its programs read weights, and then wait until the kernel before has ended.

Every program of a kernel that is launched early waits before it reads anything but weights and before it writes
anything. After the wait, all earlier launches have ended, because the kernel before has waited in the same way or was
launched in order.

Before the wait, a program may prefetch anything into the L2 cache, where later writes reach it. The indices that it
reads to find the addresses can still change. So it checks that these addresses exist, keeps no copy in L1, and uses the
indices for nothing else (`prefetch_first_tiles` in index_topk/score.cu).

Kernels whose programs just fill the GPU are not launched early. Their programs would be spread unevenly over the
multiprocessors, because some still run programs of the launch before. Such a kernel is launched in order, and may let
the next launch start early.
"""
