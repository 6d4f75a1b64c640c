"""Checks that need no GPU: versions, packages, host memory, and the ports of a server."""

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata

from hotset import __version__
from hotset.base.address import control_port
from hotset.base.errors import ConfigError
from hotset.base.host_checks import (
    Finding,
    HostNeeds,
    Level,
    check_cpus,
    check_free_memory,
    check_huge_pages,
    check_locked_memory,
    check_numa,
    check_shared_folder,
)
from hotset.base.host_memory import host_memory
from hotset.base.listeners import bound_socket, check_free
from hotset.base.rdma import active_ports
from hotset.lab.doctor.findings import Subject

# The distributions of the extras in pyproject.toml.
EXTRAS = {
    "serve": (
        *("aiohttp", "fastapi", "fastapi-swagger", "llguidance", "msgspec", "prometheus-client", "pydantic"),
        *("pyzmq", "uvicorn"),
    ),
    "cuda": ("cuda-core", "triton"),
    "transfer": ("msgspec", "nixl", "pyzmq"),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
    "cluster": ("pyyaml", "pyzmq", "ray"),
}
OTHER_NAMES = {"mooncake-transfer-engine-non-cuda": "mooncake-transfer-engine"}  # the same library, built for CUDA


def check_versions(subject: Subject) -> list[Finding]:
    torch, system = _version("torch"), f"{platform.system()} {platform.release()} {platform.machine()}"
    found = f"Hotset {__version__}, Python {platform.python_version()}, {system}"
    if torch is None:
        return [Finding("broken", f"{found}; torch is missing", "pip install torch")]
    return [Finding("good", f"{found}, torch {torch}")]


def check_packages(subject: Subject) -> list[Finding]:
    """Checks the packages of the extras: they are broken if this configuration needs them."""
    config = subject.config
    needed = {"serve": True, "cuda": bool(subject.gpus), "cluster": config.executor == "ray"}
    if config.role != "both":
        needed |= {"transfer": config.transfer == "nixl", "mooncake": config.transfer == "mooncake"}
    found = []
    for extra, distributions in EXTRAS.items():
        versions = {name: _version(name) or _version(OTHER_NAMES.get(name, name)) for name in distributions}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            level: Level = "broken" if needed.get(extra) else "skipped"
            found.append(Finding(level, f"{extra}: without {', '.join(missing)}", f'pip install "hotset[{extra}]"'))
        else:
            found.append(Finding("good", f"{extra}: {', '.join(f'{name} {v}' for name, v in versions.items())}"))
    return found


def _version(distribution: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def check_host(subject: Subject) -> list[Finding]:
    """Makes the checks that engines make when they start, all of them: for one worker and for several."""
    root, free = subject.root, host_memory(subject.root).free
    store = subject.store_bytes(free)
    needs = HostNeeds(store, store, subject.ranks, subject.gpus)
    found = [check_free_memory(needs, root), check_cpus(needs, root)]
    if not store:
        return found
    found += [check_huge_pages(replace(needs, workers=workers), root) for workers in (1, max(2, subject.ranks))]
    found += [check_numa(subject.gpus, root), check_shared_folder(root)]
    if active_ports(sysfs=root / "sys"):
        locked = check_locked_memory(needs, root)
        if subject.config.role == "both" and locked.level == "broken":
            locked = replace(locked, level="slow", what=f"for handoffs, {locked.what}")
        found.append(locked)
    return found


def check_ports(subject: Subject) -> list[Finding]:
    """Checks that the ports of `hotset serve` are free."""
    config, serve = subject.config, subject.serve
    control = control_port(config.control, config.advertise, config.handoff_secret).listen
    checks: list[tuple[str, Callable[[], object]]] = [
        (f"--port {serve.port}", lambda: bound_socket(serve.host, serve.port).close()),
    ]
    if config.role != "both":
        checks.append((f"--control {control}", lambda: check_free(control, "--control")))
    for endpoint in config.events_endpoints:
        checks.append((f"--kv-events {endpoint.live}", partial(check_free, endpoint.live, "--kv-events")))
    found = []
    for flag, check in checks:
        try:
            check()
            found.append(Finding("good", f"{flag} is free"))
        except ConfigError as error:
            reason, _, mend = str(error).rpartition("; ")
            found.append(Finding("broken", reason, mend))
    return found
