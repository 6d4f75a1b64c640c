"""Tests where the host stores of several workers are, and how workers pin them and report it, without a GPU."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.threaded import ThreadWorkers, split_engine
from memory.fake_cudart import FakeCudart
from models.split_workers import SPECS

from hotset.base.config import EngineConfig
from hotset.engine import build_runner
from hotset.engine.model_checks import model_splits
from hotset.engine.sizing import KvBudget, shared_budget
from hotset.engine.workers import processes
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.kernels.rows import RowLayout
from hotset.memory import host_store
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.mapping import populate
from hotset.models.checkpoint.files import find_model

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"
SIZES: dict[str, Any] = {"page_rows": 16, "max_num_seqs": 4, "device_kv_tokens": 256, "host_kv_tokens": 768}


@pytest.mark.parametrize(
    ("split", "stores_per_rank"), [({"tensor_parallel_size": 2}, 1), ({"pipeline_parallel_size": 2}, 0.5)]
)
def test_progress_counts_all_pinned_bytes(
    split: dict[str, int], stores_per_rank: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, stores = FakeCudart(), []
    reported: list[tuple[int, int]] = []

    def pinned_store(shape: Any, pages: int, page_rows: int, _device: Any, *args: Any, **options: Any) -> HostStore:
        store = HostStore(shape, pages, page_rows, torch.device("cuda", 0), *args, **options)
        stores.append(store)
        return store

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(build_runner, "HostStore", pinned_store)
    spec = SPECS["deepseek_v32"]
    with closing(split_engine(spec, 3, on_pinned=lambda *each: reported.append(each), **split, **SIZES)) as engine:
        (shard, *_) = engine.executor.hosts()
        whole = sum(each.store.rows.nbytes + each.store.keys.nbytes for each in engine.executor.hosts())
        total = sum(cudart.pinned.values())
        assert total == sum(store.pinned_bytes for store in stores) == len(stores) * stores_per_rank * whole
        assert [done for done, _ in reported] == sorted({done for done, _ in reported})
        assert {each for _, each in reported} == {total} and reported[-1][0] == total
        assert len(reported) == len(cudart.pinned) and shard.store.pinned_bytes == 0, "the controller pins nothing"
    assert not cudart.pinned, "workers unpin their stores"


@pytest.mark.parametrize(
    ("model", "split", "gpus_of_stores"),
    [
        ("deepseek_v32", {"tensor_parallel_size": 2}, [[0, 1]]),
        ("deepseek_v32", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, [[0, 1], [2, 3]]),
        ("deepseek_v32", {"data_parallel_size": 2}, [[0], [1]]),
        ("llama", {"tensor_parallel_size": 2}, [[0], [1]]),
    ],
)
def test_a_store_is_placed_for_the_gpus_of_the_ranks_that_use_it(
    model: str,
    split: dict[str, int],
    gpus_of_stores: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[list[int]] = []

    def init_cache_on_gpus(executor: MultiprocessExecutor, budget: KvBudget, progress: Any) -> None:
        """Allocates the stores as if rank n was on GPU n."""
        executor._on_gpu = True
        for worker in executor.workers:
            worker.rank = replace(worker.rank, device=f"cuda:{worker.rank.number}")
        init_cache(executor, budget, progress)

    init_cache = MultiprocessExecutor.init_cache
    monkeypatch.setattr(MultiprocessExecutor, "init_cache", init_cache_on_gpus)
    monkeypatch.setattr(processes, "store_nodes", lambda gpus: placed.append(gpus) or ())
    with closing(split_engine(SPECS[model], 3, **split, **SIZES)):
        assert placed == gpus_of_stores


def test_host_memory_counts_as_pinned_until_all_workers_have_released_it() -> None:
    """The time limit of closing depends on this number, also while workers drop the MTP layer."""
    config = EngineConfig(model=str(DEMO), device="cpu", speculate=1, tensor_parallel_size=2, **SIZES)
    spec = find_model(config.model, with_mtp=True).spec
    with closing(ThreadWorkers(config, model_splits(config, spec), kv_heads=1)) as workers:
        workers.plan()
        budget = shared_budget(config, workers.load(lambda *_: None), spec.context, torch.device("cpu"))
        workers.init_cache(budget, lambda *_: None)
        workers._on_gpu = True
        pinned = workers.pinned_bytes
        workers.drop_mtp(replace(config, speculate=0))
        assert workers.pinned_bytes == pinned > 0
        workers.plan()
        assert workers.pinned_bytes == 0


BOUND = """
import os, sys, threading
from hotset.engine.workers import worker
from hotset.engine.workers.messages import WorkerRank
from hotset.models.split import WHOLE_MODEL
ready, go, found = threading.Event(), threading.Event(), []
def run():
    ready.set()
    go.wait()
    found.append(os.sched_getaffinity(0))
reader = threading.Thread(target=run)  # as the thread that reads commands
reader.start()
ready.wait()
cpu = max(os.sched_getaffinity(0))
worker.first_touch_cpus = lambda gpus: frozenset({cpu}) if gpus == [3] else frozenset()
before = os.sched_getaffinity(0)
rank = WorkerRank(1, 2, 0, 1, WHOLE_MODEL, "", "cuda:3")
worker._run_near_gpu(rank, 2)
assert os.sched_getaffinity(0) == before, "there was nothing to choose"
worker._run_near_gpu(rank, 3)
go.set()
reader.join()
assert found == [{cpu}] == [os.sched_getaffinity(0)]
"""


def test_a_worker_and_its_threads_run_near_its_gpu_where_memory_cannot_be_placed() -> None:
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=120)


def test_only_the_threads_that_touch_memory_first_run_near_the_gpu_of_an_engine_in_the_programs_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, touched = os.sched_getaffinity(0), list[set[int]]()

    def touch(memory: torch.Tensor, threads: Any) -> list[Any]:
        return [threads.submit(lambda: touched.append(os.sched_getaffinity(0))), *populate(memory, threads)]

    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(host_store, "populate", touch)
    monkeypatch.setattr(host_store, "first_touch_cpus", lambda gpus: {min(before)} if gpus == [5] else set())
    shape = KvShape(2, RowLayout(64, torch.bfloat16), (0,), None, 8)
    for gpu, cpus in ((5, {min(before)}), (4, before)):
        touched.clear()
        HostStore(shape, 4, 16, torch.device("cuda", gpu)).close()
        assert touched == [cpus] * 2, "of both layers"
        assert os.sched_getaffinity(0) == before, "the program's own threads run where they did"
