"""Shared routers and stub workers."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from running_router import Cluster, Router, Stub
from waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test. Its processes end with the test; otherwise its router would keep polling workers."""
    with closing(Cluster(tmp_path)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose workers and routers several tests share. Tests must not kill them."""
    with closing(Cluster(tmp_path_factory.mktemp("shared"))) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def workers(shared_cluster: Cluster) -> list[Stub]:
    return shared_cluster.stubs(p1="prefill", p2="prefill", d1="decode", d2="decode")


@pytest.fixture
def idle_workers(workers: list[Stub]) -> list[Stub]:
    """The shared workers after a reset: they behave well and have recorded no requests."""
    for worker in workers:
        worker.behave(behaviour="well", waiting_tokens=0, degraded=None, kv_events=[], stored_tokens=0)
    # The router may still have to disconnect from requests of the previous test.
    assert wait_until(lambda: not any(worker.seen()["open"] for worker in workers))
    for worker in workers:
        worker.behave()
    return workers


@pytest.fixture(scope="session")
def router(shared_cluster: Cluster, workers: list[Stub]) -> Router:
    return shared_cluster.router(workers[:2], workers[2:])


@pytest.fixture(scope="session")
def router_with_key(shared_cluster: Cluster) -> Router:
    """A router with a key and without workers."""
    return shared_cluster.router([], [], "--api-key", "sesame", ready=False)
