"""The workers of `--disaggregate`: how many there are, and how they divide the memory of the machine if the
configuration does not set the sizes of their pools."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, StartupError
from hotset.base.memory_shares import DeviceMemory, cpu_pool_bytes, host_store_bytes, usable_gpu_bytes
from hotset.base.settings import flag_name
from hotset.base.units import GIB, show_bytes
from hotset.engine.model_checks import DTYPE_BYTES, context_length, dtype_name
from hotset.engine.step_memory import step_bytes
from hotset.models.checkpoint.files import find_model
from hotset.models.split import WHOLE_MODEL
from hotset.models.weight_sizes import worker_weight_bytes

MAX_WORKERS = 64
CPU_DEVICE_SHARE = 0.4  # the device pool's share of a worker's KV memory; the host store gets the remaining 0.6
MIN_HOST_TO_DEVICE = 1.1  # minimum size of the host store, relative to the device pool
SIZES = ("device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens")


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The number of workers of each role."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "WorkerCounts":
        """Parses a text like "2P1D". Raises ConfigError for any other text, for a role without workers, and for more
        than MAX_WORKERS workers in total."""
        match = re.fullmatch(r"([0-9]{1,3})P([0-9]{1,3})D", text, re.IGNORECASE)
        counts = None if match is None else cls(int(match[1]), int(match[2]))
        if counts is None or not (counts.prefill and counts.decode and counts.total <= MAX_WORKERS):
            raise ConfigError(
                f"--disaggregate takes the numbers of prefill and decode workers, like 1P1D or 2P1D, got {text!r}; "
                f"the limit is {MAX_WORKERS} workers in total"
            )
        return counts

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    @property
    def names(self) -> list[tuple[str, str]]:
        """The role and the name of each worker, like ("prefill", "prefill 1")."""
        numbered = [("prefill", n) for n in range(self.prefill)] + [("decode", n) for n in range(self.decode)]
        return [(role, f"{role} {number + 1}") for role, number in numbered]


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that could be allocated now. `host` is in bytes. `gpus` has one entry per usable GPU; none on a CPU."""

    host: int
    gpus: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The device and pool sizes of one worker. None means that the engine's configuration is not changed."""

    device: str | None = None
    device_kv_gib: float | None = None
    host_kv_gib: float | None = None


def check_worker_ports(engine: EngineConfig) -> None:
    """Rejects fixed ports of workers, which several workers cannot share."""
    for name in ("control", "advertise", "kv_events", "kv_events_replay"):
        address = getattr(engine, name)
        if address is not None and not address.endswith(":0"):
            raise ConfigError(f"--disaggregate gives each worker its own ports; use port 0 in --{flag_name(name)}")


def sizes_given(config: EngineConfig) -> bool:
    """Returns True if the configuration sets the size of a pool, or turns tiers off."""
    return any(getattr(config, size) is not None for size in SIZES) or config.tiers == "off"


def divide_memory(config: EngineConfig, free: FreeMemory, workers: int, needed_bytes: int) -> list[MemoryShare]:
    """Returns one share per worker. Spreads workers evenly over the GPUs, unless `config` names one device.

    On a GPU, each worker needs `needed_bytes` besides its KV (`bytes_besides_kv`). Raises ConfigError if workers
    without given pool sizes do not fit on their GPU.
    """
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
        MemoryShare(device, _gib(_pool_on_gpu(config, device, devices, free, host, needed_bytes)), _gib(host))
        for device in devices
    ]


def measure_free_memory(config: EngineConfig) -> FreeMemory:
    """Measures this machine's free memory in another process, because this one must not import torch."""
    command = [sys.executable, "-m", "hotset", "info", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise StartupError(f"free memory cannot be measured: {result.stderr.strip()[-200:]}; set --device-kv-gib")
    machine = json.loads(result.stdout)
    gpus = (
        ()
        if config.device == "cpu"
        else tuple(DeviceMemory(gpu["memory_bytes"], gpu["free_bytes"]) for gpu in machine["gpus"])
    )
    return FreeMemory(machine["free_ram_bytes"], gpus)


def bytes_besides_kv(config: EngineConfig) -> int:
    """Returns the GPU memory that one worker needs for weights and steps."""
    spec = find_model(config.model, config.weight_dtype).spec
    dtype_bytes = DTYPE_BYTES[dtype_name(config.dtype, spec, "cuda")]
    context = context_length(config, spec.context)
    steps = step_bytes(spec, WHOLE_MODEL, config, context, dtype_bytes)
    return worker_weight_bytes(spec, WHOLE_MODEL, dtype_bytes) + steps


def _pool_on_gpu(
    config: EngineConfig,
    device: str | None,
    devices: Sequence[str | None],
    free: FreeMemory,
    host: float,
    needed_bytes: int,
) -> float:
    """Returns the size of one worker's device pool, in bytes. The worker's host store limits it.

    Workers on one GPU divide the share of its memory that --gpu-memory-utilization allows.
    """
    number, workers = int((device or "").partition(":")[2] or 0), devices.count(device)
    if number >= len(free.gpus):
        raise ConfigError(f"--device {device} does not exist: this machine has {len(free.gpus)} GPUs")
    gpu = free.gpus[number]
    usable = usable_gpu_bytes(gpu.total, gpu.free, config.gpu_memory_utilization)
    available = usable / workers - needed_bytes
    if available <= 0:
        raise ConfigError(
            f"{workers} workers do not fit on {device}: each needs {show_bytes(needed_bytes)} besides its KV, but they "
            f"may use {show_bytes(usable)} together; use fewer, or raise --gpu-memory-utilization"
        )
    return min(available, host / MIN_HOST_TO_DEVICE)


def _gib(size: float) -> float:
    return round(size / GIB, 3)
