"""What `hotset cluster` refuses before anything starts, what it says without Ray, and its commands on a cluster."""

import json
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
from harness import DEMO, tiny_directory
from listening import listening
from ports import reserved_port
from processes import command_line, descendants_of, is_running, wait_until_ended
from simulated import (
    INTERFACE,
    RAY_WARNINGS,
    SimulatedCluster,
    complete,
    simulated_cluster,
    spec_of,
    wait_for,
)

from hotset import __version__
from hotset.base.address import is_loopback
from hotset.base.errors import ConfigError
from hotset.fleet.cluster import application
from hotset.fleet.cluster.folders import make_folder
from hotset.fleet.cluster.spec import parse_spec

pytestmark = [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]
ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "docs" / "clusters" / "laptop.yaml"
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from hotset.cli import main
main()
"""


def hotset(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hotset", "cluster", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )


def refused(*arguments: str) -> str:
    done = hotset(*arguments)
    assert done.returncode in (1, 2) and done.stderr.startswith("error: "), done
    return done.stderr


def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, "cluster", "status"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        1,
        'error: the cluster needs ray; run: pip install "hotset[serve,cluster]"\n',
    )


def test_a_cluster_that_does_not_answer_is_refused_at_once() -> None:
    with reserved_port() as port:
        began = time.monotonic()
        for address, reason in (
            (f"127.0.0.1:{port}", "no Ray cluster answers at"),
            ("ray://127.0.0.1:10001", "Ray Client is not supported"),
            ("here", "looks like 10.0.0.1:6379"),
        ):
            with pytest.raises(ConfigError, match=reason), application.connected(address, "x"):
                pass
        assert time.monotonic() - began < 10
    with pytest.raises(ConfigError, match="expected the number of processes"):
        from hotset.fleet.cluster.command import _parse_counts

        _parse_counts(["decode=4", "decode=x"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(cpus=2, nodes=1) as cluster:
        yield cluster


def no_actors() -> bool:
    return not ray.util.list_named_actors(all_namespaces=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_does_not_suit_the_spec_is_refused_before_anything_starts(
    cluster: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_directory(tmp_path)
    dummy = {"load-format": "dummy"}
    one_cpu = {"resources": {"cpus": 1}}
    beyond_loopback = parse_spec(
        {"model": model, "flags": {**dummy, "device": "cpu"}, "decode": one_cpu, "prefill": one_cpu}
    )
    for spec, reason in (
        (spec_of(model, flags={**dummy, "device": "cuda"}), "one prefill engine needs .* 1 GPUs on one node"),
        (spec_of(model, flags=dummy, decode={**one_cpu, "count": 9}), "the nodes do not have room for"),
        (spec_of(model, flags=dummy, decode={"split": {"tensor": 3}}), "decode engines cannot run on node .* 3"),
        (spec_of("/nowhere/model"), "prefill engines cannot run on node .*/nowhere/model"),
        (spec_of(model, flags={**dummy, "transfer-interface": "eth9"}), "cannot run on node .* no interface 'eth9'"),
        (beyond_loopback, "cannot run on node .* so --transfer-interface must name the interface"),
    ):
        with pytest.raises(ConfigError, match=reason):
            cluster.up(spec)
        assert no_actors()
    good = spec_of(model, flags=dummy)
    monkeypatch.chdir(tmp_path)  # the processes of nodes would find Hotset in the directory of the repository
    for name, source in (("none", None), ("other", "print('hotset 9.9.9')\n")):
        folder = tmp_path / name / "hotset"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "__main__.py").write_text(source or "raise ImportError\n")
        node = cluster.add_node(1, env_vars={"PYTHONPATH": str(folder.parent)})
        expected = (
            "has no Hotset" if source is None else f"has Hotset 9.9.9, but this machine has {re.escape(__version__)}"
        )
        with pytest.raises(ConfigError, match=expected):
            cluster.up(good)
        assert no_actors()
        cluster.cluster.remove_node(node)
    # Python imports this module at its start.
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.99.1'\n")
    node = cluster.add_node(1, env_vars={"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))})
    with pytest.raises(ConfigError, match=r"has Python 3\.99\.1, but this machine has 3\."):
        cluster.up(good)
    assert no_actors()
    cluster.cluster.remove_node(node)
    with pytest.raises(ConfigError, match=r"no node is called '10\.9\.9\.9'; the nodes are "):
        application.find_node("10.9.9.9")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_documentation_works(cluster: SimulatedCluster, tmp_path: Path) -> None:
    laptop = tmp_path / "laptop.yaml"
    laptop.write_text(
        LAPTOP.read_text()
        .replace("port: 8000", "port: 0")
        .replace("models/demo-dsa", DEMO)
        .replace("device: cpu", f"device: cpu\n  transfer-interface: {INTERFACE}")
    )
    at = ("--address", cluster.address)
    started = hotset("up", str(laptop), *at)
    assert started.returncode == 0, started
    assert re.search(r"Hotset serves .*demo-dsa at http://\S+ \(application hotset\)", started.stdout)
    url = re.search(r"at (http://\S+)", started.stdout)
    assert url is not None and complete(url[1], [5, 6, 7]).status_code == 200
    table = hotset("status", *at)
    assert table.returncode == 0 and "decode-" in table.stdout and "KV in use" in table.stdout
    assert hotset("scale", "decode=2", *at).returncode == 0

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(hotset("status", "--json", *at).stdout)
        return found

    wait_for(lambda: application.is_complete(found := status()) and found["counts"]["decode"] == 2, "two engines")
    assert "the nodes do not have room for" in refused("scale", "decode=99", *at)
    (node,) = {member["node"] for member in status()["members"] if member["role"] == "router"}
    assert hotset("drain", node[:8], *at).returncode == 0
    wait_for(lambda: all(member["node"] != node for member in status()["members"]), "the drain")
    assert hotset("drain", node[:8], "--undo", *at).returncode == 0
    assert "no application 'other' runs" in refused("status", "--name", "other", *at)
    assert "is up already" in refused("up", str(laptop), *at)
    pids = [member["pid"] for member in status()["members"]]
    assert all(map(is_running, pids))
    assert hotset("down", *at).returncode == 0
    wait_until_ended(pids)
    assert "no application 'hotset' runs" in refused("status", *at)


@contextmanager
def local_cluster(folder: Path) -> Iterator["tuple[subprocess.Popen[str], set[int]]"]:
    """Runs the example of the documentation with --local until the end of the block. Yields its process, and the ids of
    all processes that it has started."""
    laptop = folder / "laptop.yaml"
    laptop.write_text(LAPTOP.read_text().replace("port: 8000", "port: 0").replace("  host: 127.0.0.1\n", ""))
    command = [sys.executable, "-m", "hotset", "cluster", "up", str(laptop), "--local"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"at (http://127.0.0.1:\d+)", process.stdout.readline())
            assert url is not None and complete(url[1], [5, 6, 7]).status_code == 200
            yield process, descendants_of(process.pid)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_local_cluster_listens_on_loopback_and_ends_with_its_command(tmp_path: Path) -> None:
    with local_cluster(tmp_path) as (process, started):
        found = listening([process.pid, *started])
        commands = b"".join(command_line(listener.pid) for listener in found)
        processes = (b"gcs_server", b"raylet", b"DashboardAgent", b"Supervisor", b"router", b"serve", b"spawn_main")
        assert all(name in commands for name in processes), "this test has missed a process"
        assert [listener for listener in found if not is_loopback(listener.host)] == []
        status = hotset("status", "--json")  # it finds the cluster
        assert status.returncode == 0, status.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    wait_until_ended(started)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_of_a_local_cluster_survives_when_its_command_is_killed(tmp_path: Path) -> None:
    with local_cluster(tmp_path) as (process, started):
        process.kill()
        wait_for(lambda: not any(map(is_running, started)), "the end of all processes")  # two agents take 60 s
        assert process.stderr is not None
        folder = re.search(r"its logs are in (\S+)/session_latest/logs", process.stderr.read())
    assert folder is not None and Path(folder[1]).is_dir()
    make_folder().rmdir()  # as the next cluster does
    assert not Path(folder[1]).exists()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"routers": {"host": "0.0.0.0"}}, "routers.host is 0.0.0.0, but --local listens on loopback only"),
        ({"flags": {"transfer-interface": "eth0"}}, "flags.transfer-interface is eth0, but --local"),
        ({"flags": {"kv-events": "tcp://0.0.0.0:5557", "kv-events-public": True}}, "flags.kv-events-public is true"),
        (
            {"decode": {"flags": {"kv-events": "tcp://*:5557", "kv-events-public": True}}},
            "flags.kv-events-public is true",
        ),
    ],
)
def test_a_local_cluster_refuses_to_listen_beyond_loopback(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        application.check_local(parse_spec({"model": "m", **spec}))


def test_a_local_cluster_accepts_loopback() -> None:
    local = {"routers": {"host": "127.0.0.1"}, "flags": {"transfer-interface": "lo"}}
    for spec in ({}, local):
        application.check_local(parse_spec({"model": "m", **spec}))
