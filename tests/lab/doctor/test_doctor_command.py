"""`hotset doctor` as users run it: on this machine, with wrong flags, and with something that is broken."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from socket import create_server

import pytest
from pseudo_terminal import run_on_terminal
from typer.testing import CliRunner

from hotset import __version__
from hotset.base.devices import has_gpu_driver
from hotset.cli import app
from hotset.lab.doctor import checks
from hotset.lab.doctor.checks import CPUS, MACHINE

ROOT = Path(__file__).resolve().parents[3]
DEMO = str(ROOT / "models" / "demo-dsa")
WITHOUT_GPU = pytest.mark.skipif(has_gpu_driver(), reason="this machine has a GPU")
RUN = "import sys; from hotset.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
MAX_CPU_SECONDS = 30.0  # of all processes; two of them import torch


@WITHOUT_GPU
def test_this_machine_is_good() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", RUN, "doctor", DEMO, "--port", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["hotset"], report["level"]) == (__version__, "skipped")
    found = {check["name"]: check["findings"] for check in report["checks"]}
    assert list(found) == [*(check.name for check in MACHINE), "GPUs", CPUS[0].name]
    assert [finding["level"] for finding in found["GPUs"]] == ["skipped"]
    assert found["gloo"][0]["what"].startswith("2 workers communicate over gloo: 256 KiB in ")
    assert [found[name][0]["level"] for name in ("versions", "ports", "disk", "gloo")] == ["good"] * 4
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_CPU_SECONDS


def test_what_is_broken_is_repeated_last_with_the_mend_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CPUS", ())
    secrets = ("--role", "decode", "--handoff-secret", "s3cret-that-is-long-enough", "--api-key", "s3cret")
    with create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--port", port, *secrets])
    assert done.exit_code == 1
    reason = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert done.stdout.count(reason) == 2
    *_, counts, empty, broken, mend = done.stdout.splitlines()
    assert counts.startswith("1 broken, ") and counts.endswith(" good") and not empty
    assert (broken, mend) == (f"ports: {reason}", "→ choose another --host or --port")
    assert "\x1b" not in done.stdout and "s3cret" not in done.stdout


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda"), "--device 'cuda': no GPU was found"),
        (("--gpus", "0,1"), "no GPU was found"),
        (("/nowhere",), "/nowhere does not exist"),
        (("--gpus", "0,0"), "--gpus 0,0 has GPU 0 twice"),
        (("--port", "65536"), "--port must lie in [0, 65535]"),
        (("--api-key-file", "/nowhere"), "cannot read --api-key-file"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


@WITHOUT_GPU
def test_a_terminal_shows_colours_and_the_progress() -> None:
    command = [sys.executable, "-m", "hotset", "doctor", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    code, output = run_on_terminal(command, ROOT, environment)
    assert code == 0 and "\x1b[32mgood" in output and "Checking: gloo" in output
