"""Divides the memory of one machine among its workers if the configuration does not give the sizes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, StartupError
from hotset.base.memory_shares import cpu_pool_bytes, gpu_pool_bytes, host_store_bytes
from hotset.base.units import GIB

CPU_DEVICE_SHARE = 0.4  # share of a worker's memory; the host store gets the rest, which must be larger
WEIGHT_LOAD_FACTOR = 1.2  # peak memory while weights load, relative to the size of their files
MIN_HOST_TO_DEVICE = 1.1  # minimum size of the host store, relative to the device pool
SIZES = ("device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that could be allocated now, in bytes. `gpus` has one entry per usable GPU, and is empty on a CPU."""

    host: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The memory of one worker. If a size is None, the worker measures free memory itself."""

    device: str | None = None
    device_kv_gib: float | None = None
    host_kv_gib: float | None = None


def sizes_given(config: EngineConfig) -> bool:
    """Returns True if the configuration gives the sizes of a worker's pools."""
    return any(getattr(config, size) is not None for size in SIZES) or config.tiers == "off"


def divide_memory(config: EngineConfig, free: FreeMemory, workers: int, weight_bytes: int) -> list[MemoryShare]:
    """Returns a share for each worker, spread evenly over the GPUs. Raises ConfigError if the workers do not fit."""
    own_gpu = config.device in (None, "cuda") and bool(free.gpus)
    devices = [f"cuda:{number % len(free.gpus)}" if own_gpu else config.device for number in range(workers)]
    if sizes_given(config):
        return [MemoryShare(device=device) for device in devices]
    if not free.gpus:
        share = 2 * cpu_pool_bytes(free.host) / workers  # all workers together take as much memory as one engine would
        device_gib, host_gib = _gib(share * CPU_DEVICE_SHARE), _gib(share * (1 - CPU_DEVICE_SHARE))
        return [MemoryShare(device, device_gib, host_gib) for device in devices]
    host = host_store_bytes(free.host) / workers
    return [
        MemoryShare(device, _gib(_pool_on_gpu(device, devices, free, host, weight_bytes)), _gib(host))
        for device in devices
    ]


def measure_free_memory(config: EngineConfig) -> FreeMemory:
    """Measures this machine's free memory in another process, because this one must not load torch."""
    command = [sys.executable, "-m", "hotset", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartupError(f"free memory cannot be measured: {done.stderr.strip()[-200:]}; set --device-kv-gib")
    machine = json.loads(done.stdout)
    gpus = () if config.device == "cpu" else tuple(gpu["free_bytes"] for gpu in machine["gpus"])
    return FreeMemory(machine["free_ram_bytes"], gpus)


def weight_bytes(model: str) -> int:
    """Returns the size of a model's weight files, or 0 if they are not found; the workers report that error."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0


def _pool_on_gpu(
    device: str | None, devices: Sequence[str | None], free: FreeMemory, host: float, weights: int
) -> float:
    """Returns the bytes of one worker's device pool, after the weights of all workers on its GPU."""
    number, workers = int((device or "").partition(":")[2] or 0), devices.count(device)
    if number >= len(free.gpus):
        raise ConfigError(f"--device {device}: there is no such GPU; this machine has {len(free.gpus)}")
    available = gpu_pool_bytes(free.gpus[number] / workers - WEIGHT_LOAD_FACTOR * weights)
    if available <= 0:
        raise ConfigError(f"{workers} workers do not fit on {device}; use fewer, or set --device-kv-gib")
    return min(available, host / MIN_HOST_TO_DEVICE)


def _gib(size: float) -> float:
    return round(size / GIB, 3)
