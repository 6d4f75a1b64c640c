"""Settings and clusters that Ray cannot use are refused before anything starts. test_ray_cluster.py runs engines."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.ray_nodes import SETTINGS, sparse_model
from harness import tiny_directory

from hotset import LLM, __version__
from hotset.base.address import Address
from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, MissingDependency, StartupError
from hotset.engine import model_checks
from hotset.fleet.ray import nodes

REFUSED = [
    ({}, "there is only one"),
    ({"tensor_parallel_size": 2, "gpus": "0,1", "device": "cuda"}, "Ray assigns a GPU to each worker"),
    ({"tensor_parallel_size": 2, "ranks_per_gpu": 2, "device": "cuda"}, "Ray assigns a GPU to each worker"),
    ({"tensor_parallel_size": 2, "role": "decode", "transfer": "mooncake"}, "needs --transfer nixl"),
    ({"tensor_parallel_size": 2, "role": "prefill", "staging_mib": 32}, "are not staged but written directly"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_settings_that_ray_cannot_use_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(executor="ray", **settings)
    with pytest.raises(ConfigError, match="--ray-address is for --executor ray"):
        EngineConfig(ray_address="10.0.0.1:6379")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_cluster_that_cannot_be_reached_is_refused_at_once(tmp_path: Path, silent_port: int) -> None:
    model, threads = sparse_model(tmp_path), threading.active_count()
    for address, reason in (
        (f"127.0.0.1:{silent_port}", r"no Ray cluster can be reached at 127\.0\.0\.1:\d+ \(Connection refused\)"),
        ("ray://head:10001", "must be the host and port of a Ray head"),
    ):
        with pytest.raises(StartupError, match=reason):
            LLM(model, **SETTINGS, tensor_parallel_size=2, executor="ray", ray_address=address)
    assert threading.active_count() == threads


def test_a_head_that_accepts_connections_but_does_not_answer_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        assert nodes.unreachable(address, 0.2) == "timed out"


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks.importlib.util, "find_spec", lambda name: None)
    config = EngineConfig(tiny_directory(tmp_path), load_format="dummy", tensor_parallel_size=2, executor="ray")
    with pytest.raises(MissingDependency, match=r"--executor ray needs Ray: pip install 'hotset\[cluster\]'"):
        model_checks.check_model(config)


@pytest.mark.parametrize(
    ("workers", "tp_size", "capacities", "shares"),
    [
        (2, 2, [1, 1], [1]),
        (2, 2, [2, 0], [2]),
        (8, 4, [8, 8], [8, 4]),
        (8, 8, [4, 4, 8], [4]),
        (8, 8, [2, 2, 2, 2], [2]),
        (6, 2, [3, 3], []),  # a stage would have one rank on one node and one on another, the next stage both on one
        (6, 1, [3, 3], [3]),
        (4, 2, [0, 4], []),  # the first node has none
        (4, 2, [2, 1, 1], []),
        (3, 3, [2, 2], []),
    ],
)
def test_all_nodes_get_the_same_number_of_workers_and_stages_are_divided_evenly(
    workers: int, tp_size: int, capacities: list[int], shares: list[int]
) -> None:
    assert nodes.possible_shares(workers, tp_size, capacities) == shares


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, None),
        ({"Hotset": "0.0.1"}, f"node 10.0.0.2 has Hotset 0.0.1, but this node has Hotset {__version__}; install"),
        ({"Hotset": None}, "node 10.0.0.2 has no Hotset, but this node has"),
        ({"Python": "3.10"}, "node 10.0.0.2 has Python 3.10, but this node has"),
        ({"torch": "2.0"}, "node 10.0.0.2 has torch 2.0, but this node has"),
    ],
)
def test_nodes_with_other_versions_are_refused(found: dict[str, str | None], message: str | None) -> None:
    from hotset.fleet.ray.launcher import worker_stub

    class Context:
        def get_node_id(self) -> str:
            return "0123456789"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.get_runtime_context", Context)
        own = worker_stub()().versions()
    if message is None:
        nodes.check_versions(own)
        return
    with pytest.raises(StartupError) as raised:
        nodes.check_versions(own | {"node": "10.0.0.2"} | found)
    assert str(raised.value).startswith(message)
