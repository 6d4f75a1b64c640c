"""The GPUs and machines that `hotset plan` knows, including this machine."""

from dataclasses import dataclass, replace

from hotset.base.devices import has_gpu_driver
from hotset.base.errors import ConfigError
from hotset.base.host_memory import host_memory
from hotset.base.settings import nearest
from hotset.base.units import GIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU, with the rates of its data sheet. `costs.py` has the shares of these rates that are reached."""

    name: str
    memory_gib: float  # what the driver reports, which is less than the data sheet's figure
    tb_per_s: float  # bandwidth of its memory
    bus_gb_per_s: float  # from the host, in one direction
    link_gb_per_s: float  # to the other GPUs, in one direction
    bf16_tflops: float  # of dense matrix products
    fp8_tflops: float  # the same; equal to bf16_tflops if the GPU has no fp8 products

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


# Bandwidths and rates: NVIDIA's data sheets, without sparsity. The bus of SXM boards is PCIe Gen4 (A100) or Gen5.
# GPUs without NVLink reach each other over the bus.
GPUS = (
    Gpu("h200", 139.8, 4.8, 64.0, 450.0, 989.0, 1979.0),
    Gpu("h100", 79.1, 3.35, 64.0, 450.0, 989.0, 1979.0),
    Gpu("h20", 95.1, 4.0, 64.0, 450.0, 148.0, 296.0),
    Gpu("b200", 178.0, 8.0, 64.0, 900.0, 2250.0, 4500.0),
    Gpu("a100", 79.1, 2.04, 32.0, 300.0, 312.0, 312.0),
    Gpu("l40s", 44.4, 0.864, 32.0, 32.0, 362.0, 733.0),
    Gpu("rtx4090", 23.6, 1.008, 32.0, 32.0, 165.0, 330.0),
)
H200 = GPUS[0]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that serves the model. Without a GPU, the model runs on its CPU."""

    host_bytes: int  # free host memory
    gpu: Gpu | None = None
    gpus: int = 1


def find_gpu(
    name: str, memory_gib: float | None = None, tb_per_s: float | None = None, bus_gb_per_s: float | None = None
) -> Gpu:
    """Returns the GPU called `name`, with the figures that are given instead of those in the table.

    An unknown GPU needs its memory and bandwidth. Its other rates are those of an H200 without NVLink, scaled by the
    bandwidth. Raises ConfigError if the GPU is unknown or a figure is not above 0.
    """
    figures = {"--gpu-gib": memory_gib, "--gpu-tb-per-s": tb_per_s, "--bus-gb-per-s": bus_gb_per_s}
    for flag, value in figures.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be a finite number above 0, got {value}")
    known = {gpu.name: gpu for gpu in GPUS}
    key = name.lower().replace("-", "").replace(" ", "").removeprefix("nvidia")
    gpu = known.get(key)
    if gpu is None:
        if memory_gib is None or tb_per_s is None:
            match = nearest(key, known)
            meant = f"did you mean {match}? " if match else ""
            raise ConfigError(
                f"--gpu {name} is not known; {meant}give its memory and bandwidth with --gpu-gib and --gpu-tb-per-s, "
                f"or use one of {', '.join(known)}"
            )
        ratio = tb_per_s / H200.tb_per_s
        bus = bus_gb_per_s or H200.bus_gb_per_s
        return Gpu(name, memory_gib, tb_per_s, bus, bus, H200.bf16_tflops * ratio, H200.fp8_tflops * ratio)
    return replace(
        gpu,
        memory_gib=memory_gib or gpu.memory_gib,
        tb_per_s=tb_per_s or gpu.tb_per_s,
        bus_gb_per_s=bus_gb_per_s or gpu.bus_gb_per_s,
    )


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
