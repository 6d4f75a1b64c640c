"""Each kind of process, and a node, is killed or stopped while requests run: the application heals, no answer is wrong,
and nothing is left behind."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import plain_http
import pytest
import ray
from harness import tiny_directory
from processes import children_of, descendants_of, is_spawned, parent_of, wait_until_ended
from ray.experimental import internal_kv
from simulated import RAY_WARNINGS, SimulatedCluster, complete, simulated_cluster, spec_of, wait_for
from traffic import LONG_PROMPTS, NO_ROUTER, PROMPTS, Traffic, expected_tokens

from hotset.engine.process import AUDIT_AFTER_IDLE_S
from hotset.fleet.cluster.controller import CONTROLLER
from hotset.fleet.cluster.spec import ClusterSpec
from hotset.fleet.cluster.supervisor import silence_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]

SILENT_SECONDS = 6.0
NOTICED_SECONDS = 10.0
SERVED_SECONDS = 90.0
# What a request may end with while something it needs is gone. Everything else is an error of ours.
EXPECTED_FAILURES = {"worker_lost", "no_workers", "prefill_lost", "engine_stopped"}
SETTINGS = {
    "load-format": "dummy",
    "dtype": "float64",
    "max-num-batched-tokens": 16,  # so that long prompts are computed, and land, in many steps
    "device-kv-tokens": 8192,
    "host-kv-tokens": 16384,
}
ALL_PROMPTS = [*PROMPTS, *LONG_PROMPTS]
BUSY_PHASES = {"prefill", "landing", "decode"}
LEAKED = ("hotset_pages_quarantined ", "hotset_device_pages_held ", "hotset_host_pages_held ")
Victim = Callable[[SimulatedCluster], int]


def process_of(role: str) -> Victim:
    return lambda cluster: int(random.choice(cluster.members(role, "ready"))["pid"])


def engine_of(role: str) -> Victim:
    """Returns the process that computes, the child of the server."""
    return lambda cluster: next(pid for pid in children_of(process_of(role)(cluster)) if is_spawned(pid))


def supervisor_of(role: str) -> Victim:
    return lambda cluster: parent_of(process_of(role)(cluster))


def controller(cluster: SimulatedCluster) -> int:
    return int(cluster.status()["controller_pid"])


VICTIMS: dict[str, Victim] = {
    "decode process": process_of("decode"),
    "prefill process": process_of("prefill"),
    "decode engine": engine_of("decode"),
    "prefill engine": engine_of("prefill"),
    "router": process_of("router"),
    "decode supervisor": supervisor_of("decode"),
    "prefill supervisor": supervisor_of("prefill"),
    "router supervisor": supervisor_of("router"),
    "controller": controller,
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    model = tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    return spec_of(
        model, flags=SETTINGS, decode={"count": 2}, restart={"silent-seconds": SILENT_SECONDS, "head-seconds": 10.0}
    )


@pytest.fixture(scope="module")
def cluster(spec: ClusterSpec) -> Iterator[SimulatedCluster]:
    with simulated_cluster(cpus=1, nodes=2) as cluster:
        cluster.up(spec)
        cluster.wait_until_complete()
        yield cluster
        cluster.down()


@pytest.fixture(scope="module")
def expected(cluster: SimulatedCluster) -> list[list[int]]:
    """The answers of a decode engine that computes the prompts itself, without a router or a handoff."""
    return expected_tokens(cluster.members("decode")[0]["url"], ALL_PROMPTS)


def phases(cluster: SimulatedCluster) -> set[str]:
    """Returns the phases of all requests at all engines, as they were about half a second ago."""
    found = set()
    for member in cluster.members(phase="ready"):
        if member["role"] != "router":
            with plain_http.stream("GET", f"{member['url']}/live", timeout=30) as stream:
                found |= {request["phase"] for request in json.loads(next(stream.iter_lines()))["requests"]}
    return found


@contextmanager
def busy_or_idle(cluster: SimulatedCluster, traffic: Traffic, when: str) -> Iterator[None]:
    """If `when` is "busy", sends requests during the block, which begins when some of them are in prefill, others are
    landing and others are in decode. If it is "idle", sends requests only after the block."""
    if when == "idle":
        yield
        with traffic.running(lambda: cluster.url):
            wait_for(lambda: traffic.outcomes["ok"] >= 8, "traffic")
        return
    with traffic.running(lambda: cluster.url, clients=8):
        wait_for(lambda: traffic.outcomes["ok"] >= 8 and phases(cluster) >= BUSY_PHASES, "requests in all phases")
        yield


def leaked_pages(cluster: SimulatedCluster) -> float:
    """Returns how many pages idle engines hold or have in quarantine."""
    urls = [member["url"] for member in cluster.members(phase="ready") if member["role"] != "router"]
    lines = [line for url in urls for line in plain_http.get(f"{url}/metrics", timeout=30).text.splitlines()]
    return sum(float(line.split()[-1]) for line in lines if line.startswith(LEAKED))


def check_clean(cluster: SimulatedCluster) -> None:
    """Waits until no page is held or in quarantine, and until the engines have audited themselves. An engine whose
    audit fails ends."""
    wait_for(lambda: leaked_pages(cluster) == 0, "the end of quarantine", 60)
    names = names_of(cluster)
    time.sleep(AUDIT_AFTER_IDLE_S + 1.0)
    assert names_of(cluster) == names and len(cluster.members(phase="ready")) == len(names), cluster.status()


def check_healed(cluster: SimulatedCluster, traffic: Traffic, began: float) -> None:
    """Waits until everything serves again, and checks what clients got meanwhile."""
    cluster.wait_until_complete(max(1.0, SERVED_SECONDS - (time.monotonic() - began)))
    for prompt, tokens in zip(PROMPTS[:4], traffic.expected, strict=False):
        answer = complete(cluster.url, prompt, max_tokens=24)
        assert answer.json()["choices"][0]["token_ids"] == tokens
    print(f"healed after {time.monotonic() - began:.1f} s; {dict(traffic.outcomes)}", file=sys.stderr)


def names_of(cluster: SimulatedCluster) -> set[str]:
    return {member["name"] for member in cluster.members()}


def is_noticed(before: dict[str, Any]) -> bool:
    """Returns whether the loss of a process was noticed. `before` is the status before the loss.

    The loss of the controller is noticed if a supervisor has written that it hangs, or if there is another one.
    """
    if internal_kv._internal_kv_exists(silence_key(before["name"], before["controller_epoch"])):
        return True
    try:
        found = ray.get(ray.get_actor(CONTROLLER).status.remote(), timeout=0.5)
    except Exception:  # it hangs, or is being restarted
        return False
    if found["controller_epoch"] != before["controller_epoch"]:
        return True
    names = {member["name"] for member in before["members"]}
    members = found["members"]
    return {member["name"] for member in members} != names or any(member["phase"] != "ready" for member in members)


def check_reaction(cluster: SimulatedCluster, loss: str, before: dict[str, Any]) -> float:
    """Waits until a loss that happened just now is noticed, and until everything serves again. Returns when it
    happened."""
    began = time.monotonic()
    wait_for(lambda: is_noticed(before), "a reaction", 3 * NOTICED_SECONDS)
    noticed = time.monotonic() - began
    print(f"{loss}: noticed after {noticed:.1f} s", file=sys.stderr)
    cluster.wait_until_complete(SERVED_SECONDS)
    print(f"{loss}: served again after {time.monotonic() - began:.1f} s", file=sys.stderr)
    assert noticed < NOTICED_SECONDS
    return began


@pytest.mark.parametrize("when", ["busy", "idle"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_lost_process_is_replaced(
    cluster: SimulatedCluster, expected: list[list[int]], victim: str, how: signal.Signals, when: str
) -> None:
    before = cluster.wait_until_complete()
    pid = VICTIMS[victim](cluster)
    traffic = Traffic(expected, ALL_PROMPTS)
    with busy_or_idle(cluster, traffic, when):
        os.kill(pid, how)
        began = check_reaction(cluster, f"{victim} {how.name} {when}", before)
    check_healed(cluster, traffic, began)
    allowed = EXPECTED_FAILURES | ({*NO_ROUTER} if "router" in victim else set())
    assert set(traffic.failures) <= (allowed if when == "busy" else set()), (traffic.failures, traffic.details)
    wait_until_ended([pid])
    check_clean(cluster)


@pytest.mark.parametrize("when", ["busy", "idle"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_processes_of_a_lost_node_start_on_others(
    cluster: SimulatedCluster, expected: list[list[int]], how: signal.Signals, when: str
) -> None:
    before = cluster.wait_until_complete()
    node = next(node for node in cluster.nodes if any(m["node"] == node.node_id for m in cluster.members()))
    lost = [member for member in cluster.members() if member["node"] == node.node_id]
    raylet = node.all_processes["raylet"][0].process.pid
    pids = [raylet] if how == signal.SIGKILL else [raylet, *descendants_of(raylet)]
    # Nobody closes the connections to a router on a node that is stopped.
    traffic = Traffic(expected, ALL_PROMPTS, patience=30.0)
    try:
        with busy_or_idle(cluster, traffic, when):
            for pid in pids:
                os.kill(pid, how)
            began = check_reaction(cluster, f"node {how.name} {when}", before)
        check_healed(cluster, traffic, began)
    finally:  # a stopped node continues, and its processes notice that they were replaced
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    allowed = EXPECTED_FAILURES | {*NO_ROUTER} | ({"timed_out"} if how == signal.SIGSTOP else set())
    assert set(traffic.failures) <= (allowed if when == "busy" else set()), (traffic.failures, traffic.details)
    assert not {member["name"] for member in lost} & names_of(cluster)
    wait_until_ended([member["pid"] for member in lost])
    check_clean(cluster)
    cluster.nodes.remove(node)
    cluster.cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(1)


def test_twenty_random_losses_in_one_run(cluster: SimulatedCluster, expected: list[list[int]]) -> None:
    cluster.wait_until_complete()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}", file=sys.stderr)
    rng = random.Random(seed)
    traffic = Traffic(expected, ALL_PROMPTS)
    with traffic.running(lambda: cluster.url):
        wait_for(lambda: traffic.outcomes["ok"] >= 8, "traffic")
        losses = 0
        while losses < 20:
            victim, how = rng.choice(sorted(VICTIMS)), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            with suppress(Exception):  # there is no such process at this moment
                os.kill(VICTIMS[victim](cluster), how)
                losses += 1
                print(victim, how.name, file=sys.stderr)
            time.sleep(rng.uniform(0.5, 6.0))
        began = time.monotonic()
        cluster.wait_until_complete(2 * SERVED_SECONDS)
    check_healed(cluster, traffic, time.monotonic())
    print(f"healed {time.monotonic() - began:.1f} s after the last loss", file=sys.stderr)
    assert set(traffic.failures) <= EXPECTED_FAILURES | {*NO_ROUTER}, (traffic.failures, traffic.details)
    check_clean(cluster)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_the_ray_head_processes_end_with_a_named_error(tmp_path: Path, how: signal.Signals) -> None:
    spec = spec_of(tiny_directory(tmp_path), flags={"load-format": "dummy"}, restart={"head-seconds": 10.0})
    with simulated_cluster(cpus=1, nodes=1) as cluster:
        cluster.up(spec)
        found = cluster.wait_until_complete()
        logs = Path(cluster.cluster.head_node.get_logs_dir_path())
        head = cluster.cluster.head_node.all_processes["gcs_server"][0].process.pid
        try:
            os.kill(head, how)
            wait_until_ended([member["pid"] for member in found["members"]])
        finally:
            if how == signal.SIGSTOP:
                os.kill(head, signal.SIGCONT)
        texts = [path.read_text(errors="replace") for path in logs.glob("worker-*.err")]
        for member in found["members"]:
            assert any(f"[{member['name']}] error: head_lost: the Ray head at" in text for text in texts), member[
                "name"
            ]
