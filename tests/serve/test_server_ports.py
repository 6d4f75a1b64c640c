"""A server with ranks listens only on the ports that it needs. A rank or router whose process has an unexpected port
does not serve."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from listening import listening
from processes import descendants_of
from running_server import serving

# Python imports a module of this name in every process that it starts.
SITECUSTOMIZE = """
import os, socket, sys
def kind(arguments):
    if "spawn_main" not in " ".join(arguments):
        return "http" if "hotset" in arguments else "other"
    return "rank" if "spawn_main" in open(f"/proc/{os.getppid()}/cmdline").read() else "engine"
if kind(sys.orig_argv) == os.environ["STRAY_LISTENER_IN"]:
    stray = socket.create_server(("127.0.0.2", 0))
"""
TWO_RANKS = ["--device", "cpu", "--device-kv-tokens", "4096", "--host-kv-tokens", "8192", "--load-format", "dummy"]
TWO_RANKS += ["--data-parallel-size", "2"]


@pytest.mark.slow
def test_defect_21_a_server_with_two_ranks_listens_on_its_own_address_and_the_ranks_on_loopback(
    tmp_path: Path, tiny_model: str
) -> None:
    flags = [*TWO_RANKS, "--host", "127.0.0.2"]
    with serving(tmp_path, tiny_model, *flags) as server:
        found = listening({server.process.pid} | descendants_of(server.process.pid))
        of_server = [listener for listener in found if listener.pid == server.process.pid]
    assert [f"http://{listener.host}:{listener.port}" for listener in of_server] == [server.url]
    of_ranks = [listener for listener in found if listener not in of_server]
    assert len({listener.pid for listener in of_ranks}) == 2
    assert {listener.host for listener in of_ranks} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("process", "command", "name"),
    [
        ("http", ["router", "--decode", "http://127.0.0.1:9"], "the HTTP server"),
        pytest.param("rank", ["serve", "MODEL", *TWO_RANKS], "rank", marks=pytest.mark.slow),
    ],
)
def test_defect_21_a_process_with_a_stray_listener_does_not_serve(
    tmp_path: Path, tiny_model: str, process: str, command: list[str], name: str
) -> None:
    """tests/engine/test_open_ports.py has the engine."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [tiny_model if word == "MODEL" else word for word in command]
    environment = {**os.environ, "PYTHONPATH": path, "STRAY_LISTENER_IN": process, "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "stderr.txt").open("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", "hotset", *arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as started,
    ):
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "", "the process serves"
            assert started.wait(60) == 1
        finally:
            started.kill()
        log.seek(0)
        error = log.readlines()[-1]
    assert error.startswith("error: ") and f"{name} " in error and "listens on 127.0.0.2:" in error
