"""Decides which device each worker uses."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotset.base.config import EngineConfig
from hotset.base.devices import mps_pipe_directory
from hotset.base.errors import ConfigError
from hotset.engine.loading import choose_device, why_no_gpu

LOGGER = logging.getLogger("hotset.engine")


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """The device of one worker."""

    name: str  # "cpu", or a GPU like "cuda:2"
    ranks_on_gpu: int = 1  # number of workers that share this GPU; 1 on a CPU

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


def place_workers(config: EngineConfig) -> list[WorkerDevice]:
    """Returns the device of each worker, in the order of their numbers. Neighbours share a GPU.

    Raises ConfigError, with what to do, if a GPU does not exist or cannot be used, or if there are too few. Logs a
    warning if workers share GPUs.
    """
    shared = config.ranks_per_gpu
    if config.gpu_numbers is None:
        device = choose_device(config.device)
        if device.type == "cpu" and shared > 1:
            raise ConfigError(f"--ranks-per-gpu {shared} needs a GPU; leave it out to compute on the CPU")
        if device.type == "cpu" or config.workers == 1 or config.executor == "ray":  # Ray chooses the GPUs
            return [WorkerDevice(str(device))] * config.workers
    numbers = _gpu_numbers(config)
    for number in numbers:
        if (reason := why_no_gpu(number)) is not None:
            raise ConfigError(f"GPU {number} cannot be used: {reason}; name others with --gpus, or use --device cpu")
    if shared > 1:
        _warn_of_sharing(config)
    return [WorkerDevice(f"cuda:{number}", shared) for number in numbers for _ in range(shared)]


def _gpu_numbers(config: EngineConfig) -> Sequence[int]:
    """Returns the numbers of the GPUs that the engine uses. Raises ConfigError if there are too few or too many."""
    workers, needed = config.workers, config.workers // config.ranks_per_gpu
    numbers = range(torch.cuda.device_count()) if config.gpu_numbers is None else config.gpu_numbers
    need = f"{workers} workers with --ranks-per-gpu {config.ranks_per_gpu} need {needed} GPUs, but "
    if config.gpu_numbers is not None and len(numbers) > needed:
        raise ConfigError(f"{need}--gpus {config.gpus} has {len(numbers)}; name {needed}")
    if len(numbers) >= needed:
        return numbers[:needed]
    share = next(size for size in range(1, workers + 1) if workers % size == 0 and workers // size <= len(numbers))
    has = f"this machine has {len(numbers)}" if config.gpus is None else f"--gpus {config.gpus} has {len(numbers)}"
    more = "" if config.gpus is None else "name more GPUs, "
    raise ConfigError(
        f"{need}{has}; lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, {more}or use "
        f"--ranks-per-gpu {share} (for tests and small models)"
    )


def _warn_of_sharing(config: EngineConfig) -> None:
    LOGGER.warning(
        "%d workers share each GPU (--ranks-per-gpu), for tests and small models: each may use %.3g of its memory "
        "(--gpu-memory-utilization %g divided by %d)",
        config.ranks_per_gpu,
        config.gpu_memory_utilization / config.ranks_per_gpu,
        config.gpu_memory_utilization,
        config.ranks_per_gpu,
    )
    if not (control := mps_pipe_directory() / "control").exists():
        LOGGER.warning(
            "the multi-process service is not running (there is no %s), so workers on one GPU take turns, and each "
            "exchange between them takes tens of milliseconds; start it with: nvidia-cuda-mps-control -d",
            control,
        )
