"""Two nodes on this machine: namespaces with a network, processes, shared memory and a host name of their own.

Two virtual networks connect them. Hotset is given the first one (`hot0`) and not the second (`cold0`). The nodes see
the files of this machine, except /tmp/ray and /dev/shm. When a node ends, the kernel kills all its processes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
GIVEN, OTHER = "hot0", "cold0"  # names of the interfaces, the same on both nodes
COMMAND_S = 60.0
UNSHARE = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
# Without these, Ray starts what a test does not need, and gives its workers a lower priority.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_worker_niceness": "0"}
RAY_PORT = 6379
RAY_OPTIONS = ["--num-cpus=1", "--object-store-memory=83886080", "--block"]


@dataclass
class Node:
    """A node. `init` is the first process of its namespaces, as this machine numbers it."""

    number: int
    init: int
    children: ExitStack
    ray: "subprocess.Popen[str] | None" = field(default=None, init=False)

    @property
    def address(self) -> str:
        """Its address on the interface that Hotset is given."""
        return f"10.77.0.{self.number}"

    @property
    def other_address(self) -> str:
        return f"10.78.0.{self.number}"

    def _inside(self, command: tuple[str, ...]) -> list[str]:
        namespaces = ["-U", "-n", "-m", "-p", "-i", "-u", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.init), *namespaces, "--", *command]

    def run(self, *command: str) -> str:
        """Runs a command to its end, and returns what it prints."""
        done = self.try_run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def try_run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command to its end, which may fail."""
        return subprocess.run(
            self._inside(command), capture_output=True, text=True, timeout=COMMAND_S, check=False, env=environment()
        )

    def start(self, *command: str, log: IO[str], stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        """Starts a command, whose errors go to `log`. It ends with the node at the latest."""
        process = subprocess.Popen(
            self._inside(command), stdin=stdin, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        )
        self.children.callback(_end, process)
        return process

    def start_ray(self, head: str, log: IO[str]) -> None:
        """Starts a Ray node, which is the head if `head` is its own address, unless it runs."""
        if self.ray is not None and self.ray.poll() is None:
            return
        is_head = head == self.address
        where = (
            [f"--port={RAY_PORT}", "--head", "--include-dashboard=false"]
            if is_head
            else [f"--address={head}:{RAY_PORT}"]
        )
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}"]
        self.ray = self.start(*ray, *where, *RAY_OPTIONS, log=log)
        assert self.ray.stdout is not None
        assert any("Ray runtime started" in line for line in self.ray.stdout), "Ray did not start"

    def set_link(self, state: str) -> None:
        """Sets the interface that Hotset is given `up` or `down`."""
        self.run("ip", "link", "set", GIVEN, state)

    def listening(self) -> list[dict[str, Any]]:
        """Returns the listening sockets of all processes of the node."""
        return [json.loads(line) for line in self.run(sys.executable, "-m", "listening").splitlines()]

    def commands(self) -> dict[int, str]:
        """Returns the command lines of all processes, by their numbers on the node, except this command's own."""
        lines = self.run("ps", "-e", "-o", "pid=,args=").splitlines()
        found = {int(line.split()[0]): line.split(None, 1)[1] for line in lines}
        return {pid: text for pid, text in found.items() if not text.startswith("ps -e")}


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**kept, **RAY_VARIABLES, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Starts two connected nodes. Skips the test on a machine that does not allow it."""
    missing = [command for command in ("unshare", "nsenter", "ip", "ps") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"this machine has no command {' and '.join(missing)}")
    Path("/tmp/ray").mkdir(exist_ok=True)
    with ExitStack() as stack:
        first = _start(stack, 1, ["unshare", "--map-root-user", *UNSHARE])
        beside = ["nsenter", "-t", str(first.init), "-U", "--preserve-credentials"]
        second = _start(stack, 2, [*beside, "unshare", *UNSHARE])
        for name in (GIVEN, OTHER):
            first.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-far")
            _move(first, f"{name}-far", second, name)
        for node in (first, second):
            for name, address in ((GIVEN, node.address), (OTHER, node.other_address)):
                node.run("ip", "addr", "add", f"{address}/24", "dev", name)
                node.run("ip", "link", "set", name, "up")
        yield first, second


def _move(owner: Node, interface: str, to: Node, name: str) -> None:
    """Moves an interface to another node. Only from outside both are their processes visible."""
    inside = ["nsenter", "-t", str(owner.init), "-U", "-n", "--preserve-credentials", "--"]
    command = [*inside, "ip", "link", "set", interface, "netns", str(to.init), "name", name]
    subprocess.run(command, check=True, timeout=COMMAND_S)


def _start(stack: ExitStack, number: int, unshare: list[str]) -> Node:
    # The shell is the parent of orphans. It collects those that end each time it has read a line.
    script = f"""
        mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /tmp/ray &&
        mount -t tmpfs tmpfs /dev/shm && hostname node{number} && ip link set lo up && echo ready && read _"""
    process = subprocess.Popen([*unshare, "sh", "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != "ready\n":
        pytest.skip(f"this machine does not allow nodes in namespaces: {process.stderr.read().strip()}")
    found: list[int] = []

    def has_started() -> bool:
        # `nsenter` may be between this process and `unshare`; the last child is the shell.
        found[:] = _last_descendant(process.pid)
        return bool(found)

    assert wait_until(has_started)
    return Node(number, found[0], stack)


def _last_descendant(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return _last_descendant(children[0]) or children if children else []


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(COMMAND_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
