"""Checks of GPUs, one at a time and in pairs. They run in a process that may import torch and use CUDA."""

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.base.config import EngineConfig
from hotset.base.devices import GPU_DRIVER, pci_address
from hotset.base.errors import HotsetError
from hotset.base.host_checks import Finding
from hotset.base.host_memory import host_memory
from hotset.base.numa import gpu_link_bytes_per_second
from hotset.base.units import GIB, MIB, show_bytes
from hotset.lab.doctor.child import first_line
from hotset.lab.doctor.findings import Subject, show_seconds

if TYPE_CHECKING:
    from torch import Tensor

COPY_BYTES = 256 * MIB
COPIES = 4
FULL_LINK = 0.7  # the share of its link's rate above which a copy is good: a busy link reaches 0.8 to 0.9
TOGETHER = 0.7  # the share of the rate of one GPU alone that each GPU should reach while all copy
PINNED_BYTES = GIB
SLOW_PINNING_SECONDS = 300.0


def find_gpus(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of the GPUs to check: those of the engine, or all GPUs if the configuration divides nothing
    over workers and names none. Returns none if the engine would compute on the CPU.

    Raises ConfigError if the configuration names a GPU that does not exist or cannot be used, or too many.
    """
    import torch

    from hotset.engine.loading import why_no_gpu
    from hotset.engine.workers.placement import place_workers

    if config.device is None and config.gpus is None and config.workers == 1 and why_no_gpu(0) is not None:
        return ()
    if config.workers == 1 or config.executor == "ray":
        named = config.gpu_numbers or ((0,) if ":" in (config.device or "") else range(torch.cuda.device_count()))
        config = EngineConfig(device=config.device, gpus=config.gpus, tensor_parallel_size=max(1, len(named)))
    names = dict.fromkeys(worker.name for worker in place_workers(config))
    return tuple(int(name.partition(":")[2] or 0) for name in names if name != "cpu")


def check_gpus(subject: Subject) -> list[Finding]:
    """Checks the driver, and the compute capability and free memory of each GPU."""
    import torch

    from hotset.engine.loading import why_no_gpu

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "unknown"
    driver = f"driver {_driver_version(subject.root)}, torch built for CUDA {torch.version.cuda}, NCCL {nccl}"
    if not subject.gpus:
        mend = "compare nvidia-smi with the CUDA version of torch; in a container: --gpus all"
        return [Finding("broken", f"{why_no_gpu(0)}; {driver}", mend)]
    found = [Finding("good", driver)]
    kinds: dict[str, list[int]] = {}
    for gpu in subject.gpus:
        properties = torch.cuda.get_device_properties(gpu)
        kind = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        kinds.setdefault(f"{kind}, {show_bytes(properties.total_memory)}", []).append(gpu)
        free, total = torch.cuda.mem_get_info(gpu)
        found += judge_free_memory(gpu, free, total, subject.config.gpu_memory_utilization)
    named = [f"GPU {','.join(map(str, numbers))}: {kind}" for kind, numbers in kinds.items()]
    if len(kinds) == 1:
        return [*found[:1], Finding("good", named[0]), *found[1:]]
    mend = "choose equal ones with --gpus: the slowest sets the pace"
    return [*found[:1], Finding("slow", "; ".join(named), mend), *found[1:]]


def judge_free_memory(gpu: int, free: int, total: int, utilization: float) -> list[Finding]:
    """Finds that other programs hold memory that the engine would use. A context of this process is no such memory."""
    if free >= total * utilization:
        return []
    mend = "end the programs that nvidia-smi shows, or lower --gpu-memory-utilization"
    found = f"GPU {gpu}: only {show_bytes(free)} of {show_bytes(total)} are free, less than the engine would use"
    return [Finding("slow", f"{found} ({utilization:g})", mend)]


def _driver_version(root: Path) -> str:
    """Returns the version of the GPU driver, and the newest CUDA that it supports."""
    text, supported = "", ctypes.c_int()
    with suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text()
    match = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    with suppress(OSError):
        ctypes.CDLL(GPU_DRIVER).cuDriverGetVersion(ctypes.byref(supported))
    cuda = f"{supported.value // 1000}.{supported.value % 1000 // 10}"
    return f"{match[0] if match else 'of unknown version'} for CUDA up to {cuda}"


def check_kernels(subject: Subject) -> list[Finding]:
    """Compiles a kernel in CUDA C++ and one in Triton, and compares their results with references on every GPU."""
    triton_mend = 'pip install "hotset[cuda]"; Triton needs a C compiler and Python\'s headers (gcc, python3-dev)'
    return [
        _try_kernel("CUDA C++ (NVRTC)", _copy_pages, subject.gpus, 'pip install "hotset[cuda]"'),
        _try_kernel("Triton", _swiglu, subject.gpus, triton_mend),
    ]


def _try_kernel(name: str, run: Callable[[int], bool], gpus: Sequence[int], mend: str) -> Finding:
    import torch

    began = time.monotonic()
    for gpu in gpus:
        try:
            with torch.cuda.device(gpu):
                right = run(gpu)
        except Exception as error:  # compilers and drivers raise errors of many types
            reason = str(error) if isinstance(error, HotsetError) else first_line(error)
            return Finding("broken", f"{name} on GPU {gpu}: {reason}", mend)
        if not right:
            return Finding("broken", f"{name} on GPU {gpu}: a kernel computed a wrong result", "report this output")
    return Finding("good", f"{name}: a kernel was compiled and ran, {show_seconds(time.monotonic() - began)}")


def _copy_pages(gpu: int) -> bool:
    import torch

    from hotset.kernels import page_copy

    rows = torch.arange(64 * 64, dtype=torch.int32, device=f"cuda:{gpu}").view(1, 64, 64)
    host = torch.zeros(1, 64, 64, dtype=torch.int32, pin_memory=True)
    page_copy.to_host(torch.tensor([[0, 0, 64]], device=rows.device), rows, host)
    torch.cuda.synchronize()
    return torch.equal(host, rows.cpu())


def _swiglu(gpu: int) -> bool:
    import torch

    from hotset.kernels import swiglu

    x = torch.linspace(-4, 4, 16 * 256, dtype=torch.bfloat16, device=f"cuda:{gpu}").view(16, 256)
    return torch.allclose(swiglu.swiglu(x), swiglu.reference.swiglu(x), rtol=0.02, atol=0.02)


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second of one GPU's copies from and to pinned host memory."""

    gpu: int
    to_device: float
    to_host: float
    together: float  # to the device, while all GPUs copy
    link: "PcieLink | None"  # None: the system does not show it


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The link between a GPU and the host, as the system shows it."""

    speed: str  # the highest, like "32.0 GT/s PCIe"; an idle link is slower
    lanes: int  # that are in use
    max_lanes: int
    bytes_per_second: float  # with all lanes, in one direction


def pcie_link(gpu: int, root: Path) -> PcieLink | None:
    address, rate = pci_address(gpu), gpu_link_bytes_per_second(gpu, root)
    if address is None or rate is None:
        return None
    folder = root / "sys/bus/pci/devices" / address
    speed, lanes, most = (
        (folder / name).read_text().strip() for name in ("max_link_speed", "current_link_width", "max_link_width")
    )
    return PcieLink(speed, int(lanes), int(most), rate)


def check_copies(subject: Subject) -> list[Finding]:
    """Measures copies between pinned host memory and each GPU, alone and with all GPUs at the same time."""
    import torch

    torch.cuda.set_device(subject.gpus[0])  # pinned memory is made in its context
    hosts = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in subject.gpus]
    devices = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in subject.gpus]
    alone = [
        (_copy_rate([host], [on_gpu]), _copy_rate([on_gpu], [host]))
        for host, on_gpu in zip(hosts, devices, strict=True)
    ]
    together = _copy_rate(hosts, devices) / len(hosts)
    return [
        judge_copies(CopyRates(gpu, *rates, together, pcie_link(gpu, subject.root)))
        for gpu, rates in zip(subject.gpus, alone, strict=True)
    ]


def _copy_rate(sources: Sequence["Tensor"], targets: Sequence["Tensor"]) -> float:
    """Returns the bytes per second of copies from all sources to their targets at the same time."""
    import torch

    gpus = [(target if target.is_cuda else source).device for source, target in zip(sources, targets, strict=True)]
    for measured in (False, True):
        began = time.monotonic()
        for _ in range(COPIES):
            for source, target, gpu in zip(sources, targets, gpus, strict=True):
                with torch.cuda.device(gpu):
                    target.copy_(source, non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        if measured:
            break
    return COPIES * sum(source.nbytes for source in sources) / (time.monotonic() - began)


def judge_copies(rates: CopyRates) -> Finding:
    found = f"GPU {rates.gpu}: {rates.to_device / 1e9:.1f} GB/s from the host, {rates.to_host / 1e9:.1f} GB/s to it"
    slowest, link = min(rates.to_device, rates.to_host), rates.link
    if link is not None:
        found += f", over PCIe with {link.lanes} of {link.max_lanes} lanes of {link.speed.removesuffix(' PCIe')}"
        found += f" ({link.bytes_per_second / 1e9:.1f} GB/s)"
    if link is not None and (link.lanes < link.max_lanes or slowest < FULL_LINK * link.bytes_per_second):
        mend = "see nvidia-smi -q (PCI: link width), the slot, the NUMA node of this process and other programs"
        return Finding("slow", found, mend)
    if rates.together < TOGETHER * rates.to_device:
        found += f"; {rates.together / 1e9:.1f} GB/s while all GPUs copy"
        return Finding("slow", found, "GPUs share a PCIe switch or the host's memory: expect misses to take longer")
    return Finding("good", found)


def check_pinning(subject: Subject) -> list[Finding]:
    """Allocates and pins 1 GiB of host memory in the way of the engine: of a store that workers share, if there are
    several."""
    import torch

    from hotset.base.numa import store_nodes
    from hotset.engine.workers.shared_memory import SharedMemory
    from hotset.kernels.rows import RowLayout
    from hotset.memory.device_pool import KvShape
    from hotset.memory.host_store import HostStore

    free = host_memory(subject.root).free
    planned = subject.store_bytes(free)
    if not planned:
        return [Finding("skipped", "--tiers off has no host store")]
    if free < 2 * PINNED_BYTES:
        return [Finding("skipped", f"only {show_bytes(free)} of host memory are free")]
    shape, gpu = KvShape(layers=4, row=RowLayout(1024, torch.bfloat16)), subject.gpus[0]
    torch.cuda.set_device(gpu)
    torch.cuda.synchronize()  # creates the context
    began = time.monotonic()
    shared = SharedMemory(PINNED_BYTES, nodes=store_nodes(subject.gpus)) if subject.ranks > 1 else None
    store = HostStore(
        shape,
        pages=PINNED_BYTES // shape.token_bytes // 64,
        page_rows=64,
        device=torch.device("cuda", gpu),
        memory=None if shared is None else shared.bytes,
    )
    seconds = time.monotonic() - began
    store.close()
    if shared is not None:
        shared.close()
    return [judge_pinning(PINNED_BYTES / seconds, planned, shared is not None)]


def judge_pinning(rate: float, planned: int, shared: bool) -> Finding:
    """Judges how long it takes to allocate and pin the planned host store."""
    found = (
        f"{rate / 1e9:.2f} GB/s; the planned host store of {show_bytes(planned)} takes {show_seconds(planned / rate)}"
    )
    found += ", in every worker" if shared else ""
    if planned / rate > SLOW_PINNING_SECONDS:
        return Finding("slow", found, "allow huge pages (see the check of huge pages), or lower --host-kv-gib")
    return Finding("good", found)


def check_peer_access(subject: Subject) -> list[Finding]:
    """Checks that each GPU can address the memory of each other one, and measures copies from each to the next."""
    import torch

    gpus = subject.gpus
    if len(gpus) < 2:
        return [Finding("skipped", "there is only one GPU")]
    without = [pair for pair in permutations(gpus, 2) if not torch.cuda.can_device_access_peer(*pair)]
    buffers = {gpu: torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus}
    rates = [_copy_rate([buffers[one]], [buffers[other]]) for one, other in zip(gpus, gpus[1:] + gpus[:1], strict=True)]
    return [judge_peer_access(gpus, without, rates)]


def judge_peer_access(gpus: Sequence[int], without: Sequence[tuple[int, int]], rates: Sequence[float]) -> Finding:
    """`without` are the pairs of GPUs without access, `rates` those of copies from each GPU to the next."""
    speed = f"copies from each to the next: {min(rates) / 1e9:.0f} to {max(rates) / 1e9:.0f} GB/s"
    if not without:
        return Finding("good", f"each of {len(gpus)} GPUs can address all others; {speed}")
    rows = (f"GPU {gpu} not {','.join(str(other) for one, other in without if one == gpu)}" for gpu in dict(without))
    mend = "collectives use NCCL alone. Look for the IOMMU (ACS), a virtual machine, or GPUs without this ability"
    return Finding("slow", f"{'; '.join(rows)}; {speed}", mend)
