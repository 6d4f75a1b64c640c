"""Workers that run different software, or of which only some can use symmetric memory, find out before they start."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotset.base.devices import gpu_driver_version
from hotset.base.errors import ConfigError, StartupError
from hotset.engine.workers.agreement import check_same_software, exchange, software_of
from hotset.engine.workers.distributed import DistributedWorld, allocate_together
from hotset.engine.workers.messages import WorkerRank
from hotset.models.split import Split

T = TypeVar("T")
CPU = torch.device("cpu")
SOFTWARE = {"world size": "3", "NCCL": "2.28.9", "GPU driver": "580.95.05"}


def worker(number: int, size: int = 3, stages: int = 1, rendezvous: str = "") -> WorkerRank:
    return WorkerRank(
        number=number,
        workers=size * stages,
        stage=number // size,
        stages=stages,
        split=Split(number % size, size),
        rendezvous=rendezvous,
        device="cpu",
    )


def of_all(workers: int, call: Callable[[int], T]) -> list[T | StartupError]:
    """Calls `call` with the number of each worker, in a thread for each. Returns results and errors."""

    def attempt(number: int) -> T | StartupError:
        try:
            return call(number)
        except StartupError as error:
            return error

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(attempt, range(workers)))


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL", "2.27.5"), ("GPU driver", "570.1"), ("world size", "2"), ("NCCL", None)]
)
def test_all_workers_name_the_one_that_runs_other_software(name: str, value: str | None) -> None:
    store = dist.HashStore()
    other = {key: text for key, text in (SOFTWARE | {name: value}).items() if text is not None}
    errors = of_all(3, lambda number: check_same_software(store, worker(number), other if number == 2 else SOFTWARE))
    for error in errors:
        assert isinstance(error, ConfigError)
        assert f"worker 2 has {name} {value or 'none'}, but worker 0 has {name} {SOFTWARE[name]}" in str(error)


def test_workers_with_the_same_software_go_on() -> None:
    store = dist.HashStore()
    assert of_all(3, lambda number: check_same_software(store, worker(number), SOFTWARE)) == [None] * 3


def test_a_worker_that_does_not_answer_is_named_after_the_time_limit() -> None:
    store = dist.HashStore()
    store.set("greeting/0", "hello")
    with pytest.raises(StartupError, match=r"worker 1, worker 3 did not answer within 0\.1 s"):
        exchange(store, "greeting", 2, range(4), "hello", seconds=0.1)


def test_worker_0_compares_software_before_it_joins_the_others(tmp_path: Path) -> None:
    """The file already has the answer of worker 1, whose torch is older."""
    path = str(tmp_path / "rendezvous")
    other = software_of(CPU, 2) | {"torch": "2.0.0"}
    dist.FileStore(path, 2).set("software/1", json.dumps(other))
    joined = mock.patch.object(dist, "init_process_group", side_effect=AssertionError("joined"))
    with joined, pytest.raises(ConfigError, match=r"worker 1 has torch 2\.0\.0"):
        DistributedWorld(worker(0, size=2, rendezvous=path), CPU)


def test_no_rank_uses_symmetric_memory_if_it_fails_on_one() -> None:
    """Worker 4 is a rank of the second stage, so the first stage uses symmetric memory."""
    store, staging = dist.HashStore(), object()

    def allocate(number: int) -> Any:
        if number == 4:
            raise RuntimeError("CUDA driver error: invalid argument\nmore lines")
        return staging

    results = of_all(6, lambda n: allocate_together(lambda: allocate(n), store, worker(n, stages=2)))
    assert results[:3] == [(staging, None)] * 3
    reason = "symmetric memory fails on worker 4: CUDA driver error: invalid argument"
    assert results[3:] == [(None, reason)] * 3


def test_an_error_of_nccl_says_what_to_try(tmp_path: Path) -> None:
    error = dist.DistBackendError("NCCL error in: file.cpp\nncclSystemError: Cuda failure 'multicast'")
    rank = worker(0, size=1, rendezvous=str(tmp_path / "rendezvous"))
    with (
        mock.patch.object(dist, "init_process_group", side_effect=error),
        pytest.raises(ConfigError, match=r"Cuda failure 'multicast'; .*NCCL_NVLS_ENABLE=0"),
    ):
        DistributedWorld(rank, CPU)


def test_the_version_of_the_gpu_driver_is_read_from_proc(tmp_path: Path) -> None:
    assert gpu_driver_version(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: 12\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert gpu_driver_version(tmp_path) == "580.95.05"
