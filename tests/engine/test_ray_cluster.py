"""Every split over simulated nodes of a Ray cluster, and workers, nodes and the head of the cluster that die."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from engine.ray_nodes import SETTINGS, answers, executor_of, pids_of, simulated_nodes, sparse_model, stores_by_node
from processes import is_running, pause, wait_until_ended

from hotset import LLM, SamplingParams
from hotset.base.errors import EngineStopped, StartupError

pytestmark = pytest.mark.slow

NOTICED_SECONDS = 10.0
LONG = {"max_model_len": 4096, "device_kv_tokens": 4200, "host_kv_tokens": 8192}
SPLITS = {
    "TP2": {"tensor_parallel_size": 2},
    "PP2": {"pipeline_parallel_size": 2},
    "TP2 PP2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "DP2": {"data_parallel_size": 2},
    "TP4": {"tensor_parallel_size": 4},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sparse_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[str]:
    """The address of a cluster with one CPU per node: every worker is on a node of its own."""
    with simulated_nodes([1, 1, 1, 1]) as cluster:
        yield cluster.address


def check_split(model: str, address: str, nodes: int, **split: Any) -> None:
    with LLM(model, **SETTINGS) as single:
        expected = answers(single, seed=5)
    with LLM(model, **SETTINGS, **split, executor="ray", ray_address=address) as llm:
        assert answers(llm, seed=5) == expected
        llm.audit()
        stats, stores, pids = llm.stats(), stores_by_node(llm), pids_of(llm)
        assert stats.parks > 0, "the pools were large enough, so this test checks nothing"
        assert stats.host_pages_held == 0
    assert len(stores) == nodes
    assert sum(map(len, stores.values())) == len(set().union(*stores.values())), "nodes share memory"
    wait_until_ended(pids)


@pytest.mark.parametrize("split", ["PP2", "TP2 PP2", "DP2"])
def test_ranks_on_different_nodes_give_the_tokens_of_one_process(model: str, four_nodes: str, split: str) -> None:
    workers = 4 if split == "TP2 PP2" else 2
    check_split(model, four_nodes, workers, **SPLITS[split])


def test_two_ranks_on_each_node_share_a_store_that_the_other_node_does_not_see(model: str) -> None:
    with simulated_nodes([2, 2]) as cluster:
        for split in ("TP2 PP2", "TP4"):
            check_split(model, cluster.address, 2, **SPLITS[split])


def begin_long_answer(llm: LLM) -> Any:
    stream = llm.stream(
        {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    )
    next(stream)
    return stream


@pytest.mark.parametrize("when", ["decode", "idle"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_worker_is_named_and_all_workers_end(model: str, four_nodes: str, how: str, when: str) -> None:
    settings = SETTINGS | LONG
    with LLM(model, **settings, tensor_parallel_size=2, executor="ray", ray_address=four_nodes) as llm:
        pids = pids_of(llm)
        node = executor_of(llm).workers[1].rank.node
        stream = begin_long_answer(llm) if when == "decode" else None
        lost_at = time.monotonic()
        os.kill(pids[1], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        name = rf"worker 1 \(stage 0 of 1, rank 1 of 2, node {node}\)"
        message = rf"^{name} died \(it was killed or stopped, or its node is lost\)$"
        with pytest.raises(EngineStopped, match=message):
            if stream is not None:
                list(stream)
            while time.monotonic() < lost_at + 60:
                executor_of(llm).check()
                time.sleep(0.05)
        assert time.monotonic() - lost_at < NOTICED_SECONDS
        wait_until_ended(pids)
    with LLM(model, **SETTINGS, tensor_parallel_size=2, executor="ray", ray_address=four_nodes) as llm:
        assert answers(llm, seed=1), "the cluster cannot be used again"


@contextmanager
def controller_process(model: str, address: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Starts a process with an idle engine that prints why it has ended. Yields it with the ids of its workers."""
    code = f"""
import time
from hotset import LLM
from hotset.base.errors import EngineStopped
llm = LLM({model!r}, **{SETTINGS!r}, tensor_parallel_size=2, executor="ray", ray_address={address!r})
print("workers", *[worker.process.pid for worker in llm._engine.executor.workers], flush=True)
try:
    while True:
        llm._engine.executor.check()
        time.sleep(0.05)
except EngineStopped as error:
    print(f"EngineStopped: {{error}}", flush=True)
    llm.close()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            workers = next(line for line in controller.stdout if line.startswith("workers "))
            yield controller, [int(pid) for pid in workers.split()[1:]]
        finally:
            controller.kill()


def test_if_the_controller_dies_its_workers_end_also_one_that_is_stopped(model: str, four_nodes: str) -> None:
    with controller_process(model, four_nodes) as (controller, pids):
        assert all(is_running(pid) for pid in pids)
        pause(pids[1])
        controller.kill()
        wait_until_ended(pids)


def test_a_lost_node_ends_the_engine_with_an_error_that_names_it(model: str) -> None:
    with simulated_nodes([1, 1]) as cluster:
        settings = SETTINGS | LONG | {"executor": "ray", "ray_address": cluster.address}
        with LLM(model, **settings, tensor_parallel_size=2) as llm:
            pids, stream = pids_of(llm), begin_long_answer(llm)
            (node,) = [node for node in cluster.list_all_nodes() if not node.head]
            cluster.remove_node(node, allow_graceful=False)
            lost_at = time.monotonic()
            with pytest.raises(EngineStopped, match=r"^worker 1 \(.*\) died \(.*or its node is lost\)$"):
                list(stream)
            assert time.monotonic() - lost_at < NOTICED_SECONDS
        wait_until_ended(pids)


def test_a_lost_head_ends_the_engine_with_an_error_that_names_it(model: str) -> None:
    with simulated_nodes([1, 1]) as cluster, controller_process(model, cluster.address) as (controller, pids):
        assert controller.stdout is not None
        cluster.head_node.kill_gcs_server()
        lost_at = time.monotonic()
        error = next(line for line in controller.stdout if line.startswith("EngineStopped"))
        assert re.match(r"EngineStopped: the head of the Ray cluster at \S+ is lost \(Connection refused\)$", error)
        assert time.monotonic() - lost_at < NOTICED_SECONDS
        wait_until_ended(pids)


def test_splits_that_do_not_fit_and_nodes_in_use_are_refused(model: str, four_nodes: str) -> None:
    settings = SETTINGS | {"executor": "ray", "ray_address": four_nodes}
    with pytest.raises(StartupError, match=r"^8 workers do not fit the nodes.*each worker takes one CPU.* has 1,"):
        LLM(model, **settings, tensor_parallel_size=4, pipeline_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotset.engine.workers.ray_cluster.PLACEMENT_SECONDS", 2.0)
        with LLM(model, **settings, tensor_parallel_size=4), pytest.raises(StartupError, match="others use the CPUs"):
            LLM(model, **settings, tensor_parallel_size=2)
    assert not ray.is_initialized()


def test_a_node_with_another_hotset_is_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    # Python imports this module at its start. Ray puts the driver's own path before PYTHONPATH.
    code = "import sys, types\nsys.modules['hotset'] = types.SimpleNamespace(__version__='0.0.1')\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    with (
        simulated_nodes([1, 1], [{"PYTHONPATH": str(tmp_path)}]) as cluster,
        pytest.raises(StartupError, match=r"^node \S+ has Hotset 0\.0\.1, but this node has Hotset"),
    ):
        LLM(model, **SETTINGS, tensor_parallel_size=2, executor="ray", ray_address=cluster.address)
