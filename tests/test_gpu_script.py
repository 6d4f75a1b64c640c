"""`scripts/gpu ranks` starts the multi-process service, and ends it however its tests end. The programs are stubs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("tests", "status"), [("exit 0", 0), ("exit 1", 1), ("kill -TERM $PPID; exit 0", 1)])
def test_the_service_is_ended_in_every_case(tmp_path: Path, tests: str, status: int) -> None:
    log = tmp_path / "log"
    stub(tmp_path, "nvidia-cuda-mps-control", f'[ "$1" = -d ] && echo started >>{log} || cat >>{log}')
    stub(tmp_path, "python3", f'echo "tests $*" >>{log}\n{tests}')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    ended = subprocess.run([ROOT / "scripts" / "gpu", "ranks"], env=environment, timeout=60, capture_output=True)
    started, tested, quitted = log.read_text().splitlines()
    assert started == "started" and quitted == "quit -t 10"
    assert tested.startswith("tests -m pytest -m gpu") and tested.endswith("tests/engine/test_gpu_rank_failures.py")
    assert ended.returncode == status, ended.stdout


@pytest.mark.parametrize("name", ["collectives", "rank_step"])
def test_benchmarks_of_several_ranks_run_with_the_service(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    stub(tmp_path, "nvidia-cuda-mps-control", f'[ "$1" = -d ] && echo started >>{log} || cat >>{log}')
    stub(tmp_path, "python3", f"echo $* >>{log}")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    subprocess.run([ROOT / "scripts" / "gpu", name], env=environment, timeout=60, check=True, capture_output=True)
    command = f"benchmarks/{name}.py --json {tmp_path}/{name}.json"
    assert log.read_text().splitlines() == ["started", command, "quit -t 10"]


def test_without_the_service_no_test_runs(tmp_path: Path) -> None:
    stub(tmp_path, "nvidia-cuda-mps-control", "exit 1")
    stub(tmp_path, "python3", f"touch {tmp_path}/tested")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    ended = subprocess.run([ROOT / "scripts" / "gpu", "ranks"], env=environment, timeout=60, capture_output=True)
    assert ended.returncode == 1 and b"echo quit | nvidia-cuda-mps-control" in ended.stdout
    assert not (tmp_path / "tested").exists()


def test_help_says_what_can_be_run() -> None:
    ended = subprocess.run([ROOT / "scripts" / "gpu", "--help"], timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("Runs tests and benchmarks") and "scripts/gpu [--quick]" in ended.stdout
    assert not ended.stderr and "set -u" not in ended.stdout
