"""Every split over simulated nodes of a Ray cluster, and clusters that do not suit an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from engine.ray_nodes import SETTINGS, answers, simulated_nodes, sparse_model, stores_by_node
from harness import pids_of
from processes import wait_until_ended

from hotset import LLM
from hotset.base.errors import StartupError

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("split", ["TP2", "PP2", "TP2 PP2", "DP2"])
def test_ranks_on_different_nodes_give_the_tokens_of_one_process(model: str, four_nodes: str, split: str) -> None:
    workers = 4 if split == "TP2 PP2" else 2
    check_split(model, four_nodes, workers, **SPLITS[split])


def test_two_ranks_on_each_node_share_a_store_that_the_other_node_does_not_see(model: str) -> None:
    with simulated_nodes([2, 2]) as cluster:
        for split in ("TP2 PP2", "TP4"):
            check_split(model, cluster.address, 2, **SPLITS[split])


def test_splits_that_do_not_fit_and_nodes_in_use_are_refused(model: str, four_nodes: str) -> None:
    settings = SETTINGS | {"executor": "ray", "ray_address": four_nodes}
    with pytest.raises(StartupError, match=r"^8 workers do not fit the nodes.*each worker takes one CPU.* has 1,"):
        LLM(model, **settings, tensor_parallel_size=4, pipeline_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotset.fleet.ray.nodes.PLACEMENT_SECONDS", 2.0)
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
