"""An application is scaled and its nodes are drained while requests run, and no request fails."""

import time
from collections.abc import Iterator

import pytest
from harness import tiny_directory
from simulated import RAY_WARNINGS, SimulatedCluster, simulated_cluster, spec_of, wait_for
from traffic import Traffic, expected_tokens

from hotset.base.errors import ConfigError
from hotset.fleet.cluster import application
from hotset.fleet.cluster.spec import ClusterSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(cpus=1, nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_directory(tmp_path_factory.mktemp("model"))


def settled(cluster: SimulatedCluster, **counts: int) -> bool:
    """Returns whether there are exactly `counts` processes of each role, and all are ready."""
    found = cluster.status()
    return application.is_complete(found) and all(found["counts"][role] == count for role, count in counts.items())


def small_spec(model: str, **fields: object) -> ClusterSpec:
    return spec_of(model, flags={"load-format": "dummy", "dtype": "float64"}, **fields)


def test_no_request_fails_while_engines_come_and_go_and_nodes_are_drained(
    cluster: SimulatedCluster, model: str
) -> None:
    spec = small_spec(model)
    cluster.up(spec)
    cluster.wait_until_complete()
    traffic = Traffic(expected_tokens(cluster.members("decode")[0]["url"]))
    with traffic.running(lambda: cluster.url):
        for role, count in (("decode", 3), ("decode", 1), ("prefill", 2), ("prefill", 1)):
            application.check_scale(spec, {"decode": 1, "prefill": 1, "router": 1, role: count})
            application.call_controller("scale", {role: count})
            wait_for(lambda role=role, count=count: settled(cluster, **{role: count}), f"{role}={count}")
            before = traffic.outcomes["ok"]
            wait_for(lambda before=before: traffic.outcomes["ok"] >= before + 8, "requests after the change")
        # The router's address would change with its node, so only nodes without it are drained.
        (router,) = cluster.members("router")
        engines = [member for member in cluster.members() if member["role"] != "router"]
        drained = {engine["node"] for engine in engines} - {router["node"]}
        for node in drained:
            application.call_controller("drain", node, now=False)
        wait_for(
            lambda: settled(cluster) and not {m["node"] for m in cluster.members()} & drained, "the drain of the nodes"
        )
    assert traffic.failures == {}, traffic.details
    assert traffic.outcomes["ok"] > 40
    for node in drained:
        application.call_controller("undrain", node)
    cluster.down(now=False)


def test_the_number_of_decode_engines_follows_the_load(cluster: SimulatedCluster, model: str) -> None:
    target = {"min": 1, "max": 2, "waiting-requests": 0.01, "up-seconds": 1.0, "down-seconds": 2.0}
    cluster.up(small_spec(model, target={"decode": target}))
    cluster.wait_until_complete()
    with pytest.raises(ConfigError, match="allows 1 to 2"):
        application.check_scale(application.call_controller("spec"), {"decode": 3, "prefill": 1, "router": 1})
    traffic = Traffic(expected_tokens(cluster.members("decode")[0]["url"]))
    with traffic.running(lambda: cluster.url, clients=8):
        wait_for(lambda: cluster.status()["counts"]["decode"] == 2, "a second engine is wanted")
        wait_for(lambda: settled(cluster, decode=2), "a second engine")
    wait_for(lambda: settled(cluster, decode=1), "one engine")
    assert traffic.failures == {}, traffic.details
    assert traffic.outcomes["ok"] > 10
    cluster.down(now=False)


def test_a_drain_without_room_for_replacements_waits(cluster: SimulatedCluster, model: str) -> None:
    """Each node has room for one engine of one CPU."""
    one = {"resources": {"cpus": 1}}
    cluster.up(small_spec(model, prefill=one, decode={**one, "count": 2}))
    cluster.wait_until_complete()
    node = cluster.members("decode")[0]["node"]
    application.call_controller("drain", node, now=False)
    wait_for(lambda: cluster.members("decode", "starting"), "a replacement")
    time.sleep(3)  # nothing happens in this time
    assert [member["node"] for member in cluster.members("decode", "starting")] == [None]
    assert node in [member["node"] for member in cluster.members("decode", "ready")]
    application.call_controller("undrain", node)
    cluster.wait_until_complete()
    application.call_controller("drain", node, now=True)
    wait_for(lambda: all(m["node"] != node for m in cluster.members()), "a drain without replacements")
    cluster.down()
