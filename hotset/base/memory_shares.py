"""The shares of free memory that the KV pools take by default. The CLI uses this module too, without torch."""

from dataclasses import dataclass

from hotset.base.units import GIB

CPU_POOL_SHARE = 0.25  # share of free memory for each pool (device pool, host store) of an engine on a CPU
CPU_POOL_MAX_BYTES = 4 * GIB  # limit for each of these pools
HOST_STORE_SHARE = 0.5  # share of free host memory for the host store of an engine on a GPU
MAX_HOST_STORE_SHARE = 0.8  # upper limit of this share, if the device pool is large


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes. On a CPU, it is host memory."""

    total: int
    free: int


def cpu_pool_bytes(free: int) -> int:
    """Returns the size of the device pool or of the host store on a CPU, given `free` bytes of memory."""
    return min(int(free * CPU_POOL_SHARE), CPU_POOL_MAX_BYTES)


def usable_gpu_bytes(total: int, free: int, utilization: float) -> int:
    """Returns how many of the `free` bytes of a GPU the engine may use: the share `utilization` of all its memory."""
    return min(free, int(total * utilization))


def host_store_bytes(free: int) -> int:
    """Returns the size of the host store of an engine on a GPU, given `free` bytes of host memory."""
    return int(free * HOST_STORE_SHARE)
