"""Describes this machine to the planner."""

from hotset.base.devices import has_gpu_driver
from hotset.base.errors import ConfigError
from hotset.base.host_memory import host_memory
from hotset.base.units import GIB
from hotset.lab.plan.gpus import GPUS, Machine, find_gpu


def this_machine(gpus: int | None = None, tb_per_s: float | None = None, bus_gb_per_s: float | None = None) -> Machine:
    """Returns this machine with its GPUs, or the first `gpus` of them. Imports torch only if there is a GPU driver.

    Raises ConfigError if the type of its GPUs is not known and `tb_per_s`, their bandwidth, is not given.
    """
    host_bytes = host_memory().free
    names = _gpu_names() if has_gpu_driver() else []
    if not names:
        return Machine(host_bytes)
    if gpus is not None and gpus > len(names):
        raise ConfigError(f"--gpus {gpus}: this machine has {len(names)}; lower it, or name the machine with --gpu")
    name, memory_bytes = names[0]
    known = next((gpu.name for gpu in GPUS if gpu.name in name.lower().replace(" ", "")), name)
    gpu = find_gpu(known, memory_bytes / GIB, tb_per_s, bus_gb_per_s)
    return Machine(host_bytes, gpu, gpus or len(names))


def _gpu_names() -> list[tuple[str, int]]:
    """Returns the name and the memory of each GPU."""
    import torch

    found = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [(properties.name, properties.total_memory) for properties in found]
