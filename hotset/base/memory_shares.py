"""How much free memory the KV pools take by default. One definition for engines and for the CLI; it needs no torch."""

from hotset.base.units import GIB

CPU_POOL_SHARE = 0.25  # of free memory, for the device pool and again for the host store of an engine on a CPU
CPU_POOL_MAX_BYTES = 4 * GIB
GPU_POOL_SHARE = 0.9  # of what the weights leave free; the rest is for activations
HOST_STORE_SHARE = 0.5  # of free host memory, for the host store of an engine on a GPU


def cpu_pool_bytes(free: int) -> int:
    """Returns the size of each of the two pools of an engine on a CPU."""
    return min(int(free * CPU_POOL_SHARE), CPU_POOL_MAX_BYTES)


def gpu_pool_bytes(free: float) -> int:
    """Returns the size of a device pool, of what the weights leave free on the GPU."""
    return int(free * GPU_POOL_SHARE)


def host_store_bytes(free: int) -> int:
    """Returns the size of the host store beside a GPU, of the free host memory."""
    return int(free * HOST_STORE_SHARE)
