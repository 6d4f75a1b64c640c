"""Engines and handoffs between two nodes, which are namespaces of this machine connected by virtual networks."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from engine.ray_nodes import SETTINGS, sparse_model
from two_nodes import GIVEN, RAY_PORT, Node, two_nodes
from waiting import wait_until

from hotset import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS, ANSWER_SECONDS, NOTICED_SECONDS, SERVED_SECONDS = 120.0, 60.0, 10.0, 90.0
LONG: dict[str, Any] = SETTINGS | {"max_model_len": 4096, "device_kv_tokens": 4200, "host_kv_tokens": 8192}
del LONG["progress"]
PROMPTS = [[position * step % 60 for position in range(length)] for step, length in ((1, 1), (7, 25), (11, 33))]
LONG_PROMPT = [position % 60 for position in range(1500)]
TOKENS = 12
SECRET = "a secret that both nodes share"
SPLITS = {"TP2": {"tensor_parallel_size": 2}, "PP2": {"pipeline_parallel_size": 2}}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None


class NodeEngine:
    """An engine that runs on a node (node_engine.py)."""

    def __init__(self, node: Node, folder: Path, **settings: Any) -> None:
        self.log = folder / f"engine-{node.number}-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "engine.node_engine", json.dumps(LONG | settings)]
            self.process = node.start(*command, log=log, stdin=subprocess.PIPE)
        self.answers: dict[str, Answer] = {}
        self.reports: list[dict[str, Any]] = []
        self._ready: list[str | None] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            if "control" in line:
                self._ready.append(line["control"])
            elif "name" not in line:
                self.reports.append(line)
            elif "end" in line:
                self.answers[line["name"]].error = line["end"]
                self.answers[line["name"]].ended = True
            else:
                self.answers[line["name"]].tokens += line["token_ids"]

    def wait_ready(self) -> str | None:
        """Waits until the engine serves, and returns its control address."""
        assert wait_until(lambda: self._ready or self.process.poll() is not None, START_SECONDS), self.log.read_text()
        assert self._ready, self.log.read_text()
        return self._ready[0]

    def _write(self, **line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def ask(self, name: str, prompt: list[int], tokens: int = TOKENS, prefill_at: str | None = None) -> Answer:
        self.answers[name] = Answer()
        self._write(name=name, prompt=prompt, tokens=tokens, prefill_at=prefill_at)
        return self.answers[name]

    def tokens(self, name: str, prompt: list[int], prefill_at: str | None = None) -> list[int]:
        answer = self.ask(name, prompt, prefill_at=prefill_at)
        assert wait_until(lambda: answer.ended, ANSWER_SECONDS), self.log.read_text()
        assert answer.error is None, answer.error
        return answer.tokens

    def stats(self) -> dict[str, Any]:
        """Returns the statistics after the engine has audited itself."""
        count = len(self.reports)
        self._write()
        assert wait_until(lambda: len(self.reports) > count, ANSWER_SECONDS)
        return self.reports[-1]

    def end(self) -> None:
        """Ends the engine, and waits until its program has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sparse_model(tmp_path_factory.mktemp("model"))


def of_one_process(model: str, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, **LONG, progress=False) as single:
        outputs = single.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """What one process answers to PROMPTS."""
    return of_one_process(model, PROMPTS)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as started:
        yield started


@dataclass
class RayCluster:
    nodes: tuple[Node, Node]
    log: IO[str]

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{RAY_PORT}"

    def start(self) -> None:
        """Starts the nodes of Ray that do not run."""
        for node in self.nodes:
            node.start_ray(self.nodes[0].address, self.log)


@pytest.fixture(scope="module")
def cluster(nodes: tuple[Node, Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with (tmp_path_factory.mktemp("ray") / "log").open("w+") as log:
        started = RayCluster(nodes, log)
        started.start()
        yield started


def workers_on(node: Node) -> list[int]:
    """Returns the processes of workers of engines that Ray has started on a node."""
    return [pid for pid, command in node.commands().items() if "WorkerStub" in command]


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_on_two_nodes_give_the_tokens_of_one_process(
    model: str, expected: list[list[int]], cluster: RayCluster, tmp_path: Path, split: str
) -> None:
    engine = NodeEngine(
        cluster.nodes[0], tmp_path, model=model, executor="ray", ray_address=cluster.address, **SPLITS[split]
    )
    engine.wait_ready()
    assert [len(workers_on(node)) for node in cluster.nodes] == [1, 1]
    assert [engine.tokens(f"{number}", prompt) for number, prompt in enumerate(PROMPTS)] == expected
    assert engine.stats()["held"] == 0
    engine.end()
    assert all(wait_until(lambda node=node: not workers_on(node)) for node in cluster.nodes)


def serves_again(
    model: str, expected: list[list[int]], cluster: RayCluster, folder: Path, split: str, lost_at: float
) -> None:
    """Starts engines until one serves, like the supervisor of an engine. Restarts the nodes of Ray that have ended."""
    while True:
        cluster.start()
        engine = NodeEngine(
            cluster.nodes[0], folder, model=model, executor="ray", ray_address=cluster.address, **SPLITS[split]
        )
        assert wait_until(lambda engine=engine: engine._ready or engine.process.poll() is not None, START_SECONDS)
        if engine._ready:
            break
        assert time.monotonic() - lost_at < SERVED_SECONDS, engine.log.read_text()
    assert [engine.tokens(f"{number}", prompt) for number, prompt in enumerate(PROMPTS)] == expected
    engine.end()


@pytest.mark.parametrize("split", SPLITS)
def test_a_link_that_is_cut_during_decoding_ends_the_engine_with_an_error_that_names_the_node(
    model: str, expected: list[list[int]], cluster: RayCluster, tmp_path: Path, split: str
) -> None:
    near, far = cluster.nodes
    engine = NodeEngine(near, tmp_path, model=model, executor="ray", ray_address=cluster.address, **SPLITS[split])
    engine.wait_ready()
    answer = engine.ask("long", PROMPTS[1], tokens=2000)
    assert wait_until(lambda: len(answer.tokens) > TOKENS)
    far.set_link("down")
    lost_at = time.monotonic()
    try:
        assert wait_until(lambda: answer.ended), "the loss was not noticed"
        noticed = time.monotonic() - lost_at
        assert answer.error is not None and answer.tokens[:TOKENS] == expected[1]
        assert re.match(rf"EngineStopped: .*worker 1 \(.* node {re.escape(far.address)}/\w+\) died", answer.error)
        assert noticed < NOTICED_SECONDS
        engine.end()
        for node in cluster.nodes:
            assert wait_until(lambda node=node: not workers_on(node)), f"a worker of {node.address} still runs"
    finally:
        far.set_link("up")
    print(f"noticed after {noticed:.1f} s", file=sys.stderr)
    serves_again(model, expected, cluster, tmp_path, split, time.monotonic())


@dataclass
class Pair:
    """A decode engine on the first node, and a prefill engine on the second one."""

    decode: NodeEngine
    prefill: NodeEngine
    control: str  # address of the prefill engine

    def hand_over(self, name: str, prompt: list[int]) -> list[int]:
        return self.decode.tokens(name, prompt, self.control)

    def end(self) -> None:
        for engine in (self.decode, self.prefill):
            stats = engine.stats()
            assert (stats["held"], stats["quarantined"]) == (0, 0), stats
            engine.end()


def start_pair(nodes: tuple[Node, Node], folder: Path, model: str, transfer: str) -> Pair:
    common = {"model": model, "transfer": transfer, "transfer_interface": GIVEN, "handoff_secret": SECRET}
    engines = [
        NodeEngine(node, folder, role=role, control=f"{node.address}:0", **common)
        for node, role in zip(nodes, ("decode", "prefill"), strict=True)
    ]
    controls = [engine.wait_ready() for engine in engines]
    assert controls[1] is not None
    return Pair(engines[0], engines[1], controls[1])


each_transfer = pytest.mark.parametrize("transfer", ["nixl", "mooncake"])


@each_transfer
def test_contexts_of_one_node_land_on_the_other_with_the_tokens_of_one_process(
    model: str, expected: list[list[int]], nodes: tuple[Node, Node], tmp_path: Path, transfer: str
) -> None:
    pytest.importorskip(transfer)
    pair = start_pair(nodes, tmp_path, model, transfer)
    assert [pair.hand_over(f"{number}", prompt) for number, prompt in enumerate(PROMPTS)] == expected
    assert pair.decode.stats()["landed"] == len(PROMPTS)
    log = pair.prefill.log.read_text()
    assert re.search(rf"routes to {nodes[0].address}:\d+ over .*\W(tcp/{GIVEN})\): host to host", log), log
    pair.end()


@each_transfer
@pytest.mark.parametrize("when", ["landing", "idle"])
def test_a_link_that_is_cut_before_or_during_a_handoff_ends_the_request_and_the_next_ones_are_served(
    model: str, expected: list[list[int]], nodes: tuple[Node, Node], tmp_path: Path, transfer: str, when: str
) -> None:
    """After a cut during a landing, the decode engine closes its endpoint. After the other one, it uses it again."""
    pytest.importorskip(transfer)
    far = nodes[1]
    (expected_long,) = of_one_process(model, [LONG_PROMPT])
    pair = start_pair(nodes, tmp_path, model, transfer)
    assert pair.hand_over("before", PROMPTS[1]) == expected[1]
    sent = sent_bytes(far)
    if when == "idle":
        far.set_link("down")
    answer = pair.decode.ask("cut", LONG_PROMPT, prefill_at=pair.control)
    if when == "landing":
        assert wait_until(lambda: sent_bytes(far) > sent + 100_000), "no rows travel"
        far.set_link("down")
    lost_at = time.monotonic()
    try:
        assert wait_until(lambda: answer.ended), "the loss was not noticed"
        noticed = time.monotonic() - lost_at
        assert answer.error is not None and answer.error.startswith("HandoffLost: "), answer
        assert pair.control in answer.error and noticed < NOTICED_SECONDS
        assert pair.decode.tokens("local", PROMPTS[2]) == expected[2], "the decode engine serves on"
        for engine in (pair.decode, pair.prefill):
            assert wait_until(lambda engine=engine: is_clean(engine.stats())), engine.log.read_text()
    finally:
        far.set_link("up")
    print(f"noticed after {noticed:.1f} s", file=sys.stderr)
    assert pair.hand_over("after", LONG_PROMPT) == expected_long
    pair.end()


def is_clean(stats: dict[str, Any]) -> bool:
    return (stats["held"], stats["quarantined"], stats["running"]) == (0, 0, 0)


def sent_bytes(node: Node) -> int:
    return int(node.run("cat", f"/sys/class/net/{GIVEN}/statistics/tx_bytes"))


@pytest.mark.parametrize(
    "discipline", ["netem delay 50ms rate 10mbit", "tbf rate 10mbit burst 32kbit latency 400ms"], ids=["netem", "tbf"]
)
def test_over_a_slow_link_answers_are_right_and_nothing_times_out(
    model: str, expected: list[list[int]], cluster: RayCluster, tmp_path: Path, discipline: str
) -> None:
    for node in cluster.nodes:
        done = node.try_run("tc", "qdisc", "replace", "dev", GIVEN, "root", *discipline.split())
        if done.returncode != 0:
            pytest.skip(f"this machine cannot slow down a link: {done.stderr.strip()}")
    try:
        engine = NodeEngine(
            cluster.nodes[0], tmp_path, model=model, executor="ray", ray_address=cluster.address, **SPLITS["PP2"]
        )
        engine.wait_ready()
        assert [engine.tokens(f"{number}", prompt) for number, prompt in enumerate(PROMPTS)] == expected
        engine.end()
        pair = start_pair(cluster.nodes, tmp_path, model, "nixl")
        assert [pair.hand_over(f"{number}", prompt) for number, prompt in enumerate(PROMPTS)] == expected
        assert "did not arrive" not in pair.decode.log.read_text(), "a handoff was tried again"
        pair.end()
    finally:
        for node in cluster.nodes:
            node.run("tc", "qdisc", "del", "dev", GIVEN, "root")


def test_nothing_listens_on_an_interface_that_it_was_not_given(model: str, cluster: RayCluster, tmp_path: Path) -> None:
    """Not an engine, a rank or a transfer engine. Ray has a port on all interfaces in each process that it connects."""
    nodes = cluster.nodes
    engine = NodeEngine(nodes[0], tmp_path, model=model, executor="ray", ray_address=cluster.address, **SPLITS["TP2"])
    engine.wait_ready()
    pairs = [start_pair(nodes, tmp_path, model, transfer) for transfer in ("nixl", "mooncake")]
    for number, pair in enumerate(pairs):
        pair.hand_over(f"{number}", PROMPTS[1])  # a decode engine opens further ports for its peer
    for node, other, engines in ((nodes[0], nodes[1], 3), (nodes[1], nodes[0], 2)):
        found = [each for each in node.listening() if is_ours(each["command"])]
        assert len({each["pid"] for each in found}) == engines + 1, "the engine processes and one rank"
        beyond = [each for each in found if each["host"] != node.address and each["interface"] != GIVEN]
        assert {each["host"] for each in beyond} <= {"::"}, f"others than Ray: {beyond}"
        assert len(beyond) == len({each["pid"] for each in beyond}) == 3 - node.number, f"others than Ray: {beyond}"
        assert {each["protocol"] for each in found} == {socket.IPPROTO_TCP}
        ports = sorted({each["port"] for each in found if each not in beyond})
        assert reached_ports(other, node.address, ports) == ports
        assert reached_ports(other, node.other_address, ports) == []
    for pair in pairs:
        pair.end()
    engine.end()


@each_transfer
def test_other_nodes_reach_no_port_of_a_worker_on_loopback(
    model: str, nodes: tuple[Node, Node], tmp_path: Path, transfer: str
) -> None:
    pytest.importorskip(transfer)
    engine = NodeEngine(nodes[0], tmp_path, model=model, role="decode", transfer=transfer)
    engine.wait_ready()
    ports = [found["port"] for found in nodes[0].listening() if is_ours(found["command"])]
    assert len(ports) > 1
    assert (
        reached_ports(nodes[1], nodes[0].address, ports) == reached_ports(nodes[1], nodes[0].other_address, ports) == []
    )
    engine.end()


def test_of_a_worker_on_all_addresses_only_the_control_port_is_on_other_interfaces(
    model: str, nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    pytest.importorskip("mooncake")
    near, far = nodes
    common = {"model": model, "handoff_secret": SECRET, "transfer": "mooncake", "transfer_interface": GIVEN}
    engine = NodeEngine(near, tmp_path, role="decode", control="0.0.0.0:0", advertise=f"{near.address}:0", **common)
    control = engine.wait_ready()
    assert control is not None and control.startswith(near.address)
    ports = [found["port"] for found in near.listening() if is_ours(found["command"])]
    assert len(ports) > 1 and reached_ports(far, near.address, ports) == sorted(ports)
    assert reached_ports(far, near.other_address, ports) == [int(control.rpartition(":")[2])]
    engine.end()


def reached_ports(node: Node, address: str, ports: list[int]) -> list[int]:
    """Returns the ports of an address to which a process of a node can connect."""
    reached: list[int] = json.loads(node.run(sys.executable, "-c", CONNECT, address, *map(str, sorted(ports))))
    return reached


# Prints the ports of an address to which it can connect.
CONNECT = """
import json, socket, sys
reached = []
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), 5).close()
        reached.append(port)
    except ConnectionRefusedError:
        pass
print(json.dumps(reached))
"""


def is_ours(command: str) -> bool:
    """Returns whether this is an engine process, or a worker that Ray has started."""
    return "multiprocessing.spawn" in command or "WorkerStub" in command
