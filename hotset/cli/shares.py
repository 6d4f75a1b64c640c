"""Divides the memory of one machine among its workers, if the configuration gives no sizes."""

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

CPU_DEVICE_PART = 0.4  # of a worker's share; the host store gets the rest, because it must not be the smaller pool
WEIGHTS_ROOM = 1.2  # memory that weights need while they load, relative to the size of their files
HOST_OVER_DEVICE = 1.1  # how much larger than the device pool the host store must be
SIZES = ("device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens")


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that could be allocated now, in bytes. `gpus` has one entry per usable GPU, and is empty on a CPU."""

    host: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The memory of one worker. It measures its own where a size is None."""

    device: str | None = None
    device_kv_gib: float | None = None
    host_kv_gib: float | None = None


def sized(config: EngineConfig) -> bool:
    """Returns True if the configuration gives the sizes of a worker's pools."""
    return any(getattr(config, size) is not None for size in SIZES) or config.tiers == "off"


def divide(config: EngineConfig, free: Free, workers: int, weight_bytes: int) -> list[Share]:
    """Returns a share for each worker, spread evenly over the GPUs. Raises ConfigError if the workers do not fit."""
    own_gpu = config.device in (None, "cuda") and bool(free.gpus)
    devices = [f"cuda:{number % len(free.gpus)}" if own_gpu else config.device for number in range(workers)]
    if sized(config):
        return [Share(device=device) for device in devices]
    if not free.gpus:
        share = 2 * cpu_pool_bytes(free.host) / workers  # all workers together take what one engine would
        sizes = (_gib(share * CPU_DEVICE_PART), _gib(share * (1 - CPU_DEVICE_PART)))
        return [Share(device, *sizes) for device in devices]
    host = host_store_bytes(free.host) / workers
    return [
        Share(device, _gib(_pool_on_gpu(device, devices, free, host, weight_bytes)), _gib(host)) for device in devices
    ]


def measure(config: EngineConfig) -> Free:
    """Measures this machine's free memory in another process, because torch would stay in the memory of this one."""
    command = [sys.executable, "-m", "hotset", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartupError(f"this machine cannot be measured: {done.stderr.strip()[-200:]}; give --device-kv-gib")
    machine = json.loads(done.stdout)
    gpus = () if config.device == "cpu" else tuple(gpu["free_bytes"] for gpu in machine["gpus"])
    return Free(machine["free_ram_bytes"], gpus)


def weight_bytes(model: str) -> int:
    """Returns the size of a model's weight files, or 0 if they are not found, which the workers then report."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0


def _pool_on_gpu(device: str | None, devices: Sequence[str | None], free: Free, host: float, weights: int) -> float:
    """Returns the bytes of one worker's device pool, after the weights of all workers on its GPU."""
    number, workers = int((device or "").partition(":")[2] or 0), devices.count(device)
    if number >= len(free.gpus):
        raise ConfigError(f"--device {device}: there is no such GPU; this machine has {len(free.gpus)}")
    room = gpu_pool_bytes(free.gpus[number] / workers - WEIGHTS_ROOM * weights)
    if room <= 0:
        raise ConfigError(f"{workers} workers do not fit on {device}; use fewer, or give --device-kv-gib")
    return min(room, host / HOST_OVER_DEVICE)


def _gib(size: float) -> float:
    return round(size / GIB, 3)
