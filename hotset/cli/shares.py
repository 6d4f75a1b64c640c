"""How several workers on one machine divide its memory, where nobody said how."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, StartupError
from hotset.base.units import GIB

# On a CPU, workers together take what a single engine would: half of what is free, and not without end.
CPU_SHARE = 0.5
CPU_MOST_BYTES = 8 * GIB
CPU_DEVICE_PART = 0.4  # of a worker's share; the host store gets the rest, since it must hold no less than the device
GPU_SHARE = 0.9  # of what weights leave; the rest is for activations
WEIGHTS_ROOM = 1.2  # weights take what their files take, and a little more while they load
HOST_SHARE = 0.5  # of free host memory, beside GPUs
HOST_OVER_DEVICE = 1.1
SIZES = ("device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens")


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that could be allocated now, in bytes. `gpus`: of each GPU that serves; none where the CPU computes."""

    host: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker gets. None: it measures for itself."""

    device: str | None = None
    device_kv_gib: float | None = None
    host_kv_gib: float | None = None


def sized(config: EngineConfig) -> bool:
    """Whether somebody said how much memory a worker takes."""
    return any(getattr(config, size) is not None for size in SIZES) or config.tiers == "off"


def divide(config: EngineConfig, free: Free, workers: int, weight_bytes: int) -> list[Share]:
    """A share for each worker. Each GPU gets as few workers as possible. ConfigError where they do not fit."""
    own_gpu = config.device in (None, "cuda") and bool(free.gpus)
    seats = [f"cuda:{number % len(free.gpus)}" if own_gpu else config.device for number in range(workers)]
    if sized(config):
        return [Share(device=seat) for seat in seats]
    if not free.gpus:
        each = min(free.host * CPU_SHARE, CPU_MOST_BYTES) / workers
        return [Share(seat, _gib(each * CPU_DEVICE_PART), _gib(each * (1 - CPU_DEVICE_PART))) for seat in seats]
    host = free.host * HOST_SHARE / workers
    return [Share(seat, _gib(_on_gpu(seat, seats, free, host, weight_bytes)), _gib(host)) for seat in seats]


def measure(config: EngineConfig) -> Free:
    """What is free on this machine, as another process sees it: torch would stay in the memory of this one."""
    command = [sys.executable, "-m", "hotset", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartupError(f"this machine cannot be measured: {done.stderr.strip()[-200:]}; give --device-kv-gib")
    machine = json.loads(done.stdout)
    gpus = () if config.device == "cpu" else tuple(gpu["free_bytes"] for gpu in machine["gpus"])
    return Free(machine["free_ram_bytes"], gpus)


def weight_bytes(model: str) -> int:
    """Of a model's files; 0 where they cannot be found, which the workers will report better than we could."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0


def _on_gpu(seat: str | None, seats: Sequence[str | None], free: Free, host: float, weights: int) -> float:
    number = int((seat or "").partition(":")[2] or 0)
    if number >= len(free.gpus):
        raise ConfigError(f"--device {seat}: there is no such GPU, only {len(free.gpus)}")
    room = GPU_SHARE * (free.gpus[number] / seats.count(seat) - WEIGHTS_ROOM * weights)
    if room <= 0:
        raise ConfigError(f"{seats.count(seat)} workers do not fit on {seat}; use fewer, or give --device-kv-gib")
    return min(room, host / HOST_OVER_DEVICE)


def _gib(size: float) -> float:
    return round(size / GIB, 3)
