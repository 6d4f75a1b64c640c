"""Divides the GPUs and the memory of this machine among the engines of `--disaggregate`."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from hotset.base.config import EngineConfig
from hotset.base.devices import has_gpu_driver
from hotset.base.endings import wait_for_ending
from hotset.base.errors import ConfigError, StartupError
from hotset.base.host_memory import host_memory
from hotset.base.memory_shares import DeviceMemory, cpu_pool_bytes, host_store_bytes, usable_gpu_bytes
from hotset.base.status_line import StatusLine
from hotset.base.units import GIB, show_bytes
from hotset.engine.drafts.settings import with_default_drafts
from hotset.engine.model_checks import context_length, model_splits
from hotset.engine.step_memory import step_bytes
from hotset.models.checkpoint.files import find_model
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.spec import DTYPE_BYTES, dtype_name

CPU_DEVICE_SHARE = 0.4  # the device pools' share of an engine's KV memory; the host store gets the remaining 0.6
MIN_HOST_TO_DEVICE = 1.1  # minimum size of the host store, relative to the device pools
SIZES = ("device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens")


@dataclass(frozen=True, slots=True)
class RoleEngine:
    """One engine of a deployment."""

    name: str  # like "prefill 1"
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that could be allocated now. `host` is in bytes. `gpus` has one entry per usable GPU."""

    host: int
    gpus: tuple[DeviceMemory, ...] = ()


def place_engines(engines: Sequence[RoleEngine]) -> list[RoleEngine]:
    """Returns the engines with their GPUs and with their shares of this machine's memory."""
    if all(engine.config.device == "cpu" and sizes_given(engine.config) for engine in engines):
        return list(engines)
    with StatusLine("Measuring the free memory") as status:
        wait_for_ending(status.show)
    free = measure_free_memory()
    return divide_memory(divide_gpus(engines, len(free.gpus)), free)


def sizes_given(config: EngineConfig) -> bool:
    """Returns True if the configuration sets the size of a pool, or turns tiers off."""
    return any(getattr(config, size) is not None for size in SIZES) or config.tiers == "off"


def divide_gpus(engines: Sequence[RoleEngine], gpus: int) -> list[RoleEngine]:
    """Returns the engines with the GPUs of each in `config.gpus`, on a machine with `gpus` GPUs.

    An engine that names its GPUs keeps them. The others get the GPUs that are left, in order. If these are too few,
    engines that need only one GPU each share them. Engines with `--device cpu` or `cuda:N` are not changed. Raises
    ConfigError if there are too few GPUs, or if two engines name the same one.
    """
    unplaced = [engine for engine in engines if gpus and engine.config.device in (None, "cuda")]
    owners = _owners(unplaced, gpus)
    left = [number for number in range(gpus) if number not in owners]
    unplaced = [engine for engine in unplaced if engine.config.gpus is None]
    needed = [_num_gpus(engine) for engine in unplaced]
    if sum(needed) > len(left) and (max(needed) > 1 or not left):
        raise ConfigError(_too_few_gpus(unplaced, len(left), named=len(owners)))
    in_turn = cycle(left)
    placed = []
    for engine in engines:
        if engine in unplaced:
            numbers = ",".join(str(number) for number in islice(in_turn, _num_gpus(engine)))
            engine = replace(engine, config=replace(engine.config, gpus=numbers))
        placed.append(engine)
    return placed


def _num_gpus(engine: RoleEngine) -> int:
    return engine.config.workers // engine.config.ranks_per_gpu


def _owners(engines: Sequence[RoleEngine], gpus: int) -> dict[int, str]:
    """Returns the name of the engine that names each GPU. Raises ConfigError if an engine names a GPU that does not
    exist, more or fewer GPUs than it needs, or a GPU of another engine."""
    owners: dict[int, str] = {}
    for engine in engines:
        numbers = engine.config.gpu_numbers
        if numbers is None:
            continue
        if len(numbers) != _num_gpus(engine):
            raise ConfigError(
                f"{engine.name} has {engine.config.workers} ranks, {engine.config.ranks_per_gpu} on each GPU, but "
                f"--gpus {engine.config.gpus} has {len(numbers)}; name {_num_gpus(engine)}"
            )
        for number in numbers:
            if number >= gpus:
                raise ConfigError(
                    f"{engine.name}: GPU {number} of --gpus {engine.config.gpus} does not exist: this machine has "
                    f"{gpus}, numbered from 0"
                )
            if number in owners:
                raise ConfigError(
                    f"GPU {number} is named by {owners[number]} and by {engine.name}; give each engine GPUs of its "
                    "own, or leave --gpus out"
                )
            owners[number] = engine.name
    return owners


def _too_few_gpus(engines: Sequence[RoleEngine], left: int, named: int) -> str:
    needs = ", ".join(f"{engine.name} needs {_num_gpus(engine)}" for engine in engines)
    beside = f"only {left} are left beside the {named} that --gpus names" if named else f"this machine has {left}"
    largest = max(engine.config.workers for engine in engines)
    sharing = f", or put all ranks of an engine on one GPU (--ranks-per-gpu {largest}), for tests and small models"
    return f"too few GPUs: {needs}, but {beside}; use smaller splits{sharing if left and largest > 1 else ''}"


def divide_memory(engines: Sequence[RoleEngine], free: FreeMemory) -> list[RoleEngine]:
    """Returns the engines with the sizes of their KV pools, unless their configurations set a size.

    The device pool of an engine that shares no GPU gets no size here: the engine measures it when it starts. Raises
    ConfigError if engines do not fit on a GPU that they share.
    """
    ranks_on_gpu = _ranks_on_gpus(engines)
    unsized = [engine for engine in engines if not sizes_given(engine.config)]
    given = sum(int((engine.config.host_kv_gib or 0) * GIB) for engine in engines)
    sized = []
    for engine in engines:
        config = engine.config
        if engine not in unsized:
            sized.append(engine)
        elif free.gpus and config.device != "cpu":
            host = host_store_bytes(max(0, free.host - given)) / len(unsized)
            device_gib = None
            if any(ranks_on_gpu[number] > config.ranks_per_gpu for number in _gpus_of(config)):
                device_gib = _gib(_shared_pool(engine, ranks_on_gpu, free, host))
            sized.append(_with_sizes(engine, device_gib, _gib(host)))
        else:  # all engines together take as much memory as one engine would
            share = 2 * cpu_pool_bytes(free.host) / len(engines)
            device_gib = _gib(share * CPU_DEVICE_SHARE / config.workers)  # the flag sets the pool of one rank
            sized.append(_with_sizes(engine, device_gib, _gib(share * (1 - CPU_DEVICE_SHARE))))
    return sized


def _with_sizes(engine: RoleEngine, device_kv_gib: float | None, host_kv_gib: float) -> RoleEngine:
    return replace(engine, config=replace(engine.config, device_kv_gib=device_kv_gib, host_kv_gib=host_kv_gib))


def _gpus_of(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of the GPUs that an engine uses. Returns an empty tuple for a CPU."""
    if config.gpu_numbers is not None:
        return config.gpu_numbers
    return () if config.device in (None, "cpu") else (int(config.device.partition(":")[2] or 0),)


def _ranks_on_gpus(engines: Sequence[RoleEngine]) -> Mapping[int, int]:
    """Returns how many ranks of all engines there are on each GPU."""
    ranks: dict[int, int] = {}
    for engine in engines:
        for number in _gpus_of(engine.config):
            ranks[number] = ranks.get(number, 0) + engine.config.ranks_per_gpu
    return ranks


def _shared_pool(engine: RoleEngine, ranks_on_gpu: Mapping[int, int], free: FreeMemory, host: float) -> float:
    """Returns the size of the device pool of each rank of an engine that shares GPUs with others, in bytes.

    The ranks on one GPU divide the share of its memory that --gpu-memory-utilization allows. The host store of `host`
    bytes limits the pools too.
    """
    config, needed = engine.config, bytes_besides_kv(engine.config)
    available = host / MIN_HOST_TO_DEVICE / config.workers
    for number in _gpus_of(config):
        if number >= len(free.gpus):
            raise ConfigError(f"--device {config.device} does not exist: this machine has {len(free.gpus)} GPUs")
        gpu, ranks = free.gpus[number], ranks_on_gpu[number]
        usable = usable_gpu_bytes(gpu.total, gpu.free, config.gpu_memory_utilization)
        if usable / ranks <= needed:
            raise ConfigError(
                f"the {ranks} ranks of all engines on GPU {number} do not fit: each of {engine.name} needs "
                f"{show_bytes(needed)} besides its KV, but they may use {show_bytes(usable)} together; use more GPUs "
                "or fewer ranks, or raise --gpu-memory-utilization"
            )
        available = min(available, usable / ranks - needed)
    return available


def measure_free_memory() -> FreeMemory:
    return FreeMemory(host_memory().free, _measure_gpus() if has_gpu_driver() else ())


def _measure_gpus() -> tuple[DeviceMemory, ...]:
    """Measures the GPUs in another process. This process runs as long as the engines, and must neither import torch nor
    keep a context on any GPU."""
    command = [sys.executable, "-m", "hotset", "info", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise StartupError(f"free memory cannot be measured: {result.stderr.strip()[-200:]}; set --device-kv-gib")
    return tuple(DeviceMemory(gpu["memory_bytes"], gpu["free_bytes"]) for gpu in json.loads(result.stdout)["gpus"])


def bytes_besides_kv(config: EngineConfig) -> int:
    """Returns the GPU memory that the largest rank of an engine needs for weights and steps."""
    config = with_default_drafts(config, on_gpu=True)
    spec = find_model(config.model, config.weight_dtype, with_mtp=config.drafts_by_mtp).spec
    dtype_bytes = DTYPE_BYTES[dtype_name(config.dtype, spec, "cuda")]
    context = context_length(config, spec.context)
    return max(
        worker_weight_bytes(spec, split, dtype_bytes) + step_bytes(spec, split, config, context, dtype_bytes)
        for split in model_splits(config, spec)
    )


def _gib(size: float) -> float:
    return round(size / GIB, 3)
