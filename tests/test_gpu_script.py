"""`scripts/gpu` passes options on, and starts and ends the multi-process service. The programs are stubs."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu"


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def stub_service(folder: Path, log: Path) -> None:
    stub(folder, "nvidia-cuda-mps-control", f'[ "$1" = -d ] && echo started >>{log} || cat >>{log}')


def run_script(stubs: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `scripts/gpu` with the programs in the folder `stubs`. Its results go to the folder `out` there."""
    environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "OUT": str(stubs / "out")}
    return subprocess.run([SCRIPT, *arguments], env=environment, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize(("tests", "status"), [("exit 0", 0), ("exit 1", 1), ("kill -TERM $PPID; exit 0", 1)])
def test_the_service_is_ended_in_every_case(tmp_path: Path, tests: str, status: int) -> None:
    log = tmp_path / "log"
    stub_service(tmp_path, log)
    stub(tmp_path, "python3", f'echo "tests $*" >>{log}\n{tests}')
    ended = run_script(tmp_path, "ranks")
    started, tested, quitted = log.read_text().splitlines()
    assert started == "started" and quitted == "quit -t 10"
    assert tested.startswith("tests -m pytest -m gpu") and tested.endswith("tests/engine/test_gpu_rank_failures.py")
    assert ended.returncode == status, ended.stdout


def test_the_benchmark_of_several_ranks_runs_with_the_service(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stub_service(tmp_path, log)
    stub(tmp_path, "python3", f"echo $* >>{log}")
    assert run_script(tmp_path, "collectives").returncode == 0
    command = f"benchmarks/collectives.py --json {tmp_path}/out/collectives.json"
    assert log.read_text().splitlines() == ["started", command, "quit -t 10"]


def test_without_the_service_no_test_runs(tmp_path: Path) -> None:
    stub(tmp_path, "nvidia-cuda-mps-control", "exit 1")
    stub(tmp_path, "python3", f"touch {tmp_path}/tested")
    ended = run_script(tmp_path, "ranks")
    assert ended.returncode == 1 and "echo quit | nvidia-cuda-mps-control" in ended.stdout
    assert not (tmp_path / "tested").exists()


def test_benchmarks_get_their_own_options_and_the_options_of_the_script_that_they_know(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    stub(tmp_path, "python3", f'echo "$*" >>{log}\n[ "$3 $5" != "{out}/one_rank-2.json glm-5.2" ]')
    ended = run_script(tmp_path, "--quick", "one_rank", "swap_in --sweep", "one_rank --model glm-5.2", "sampling")
    assert log.read_text().splitlines() == [
        f"benchmarks/one_rank.py --json {out}/one_rank.json",
        f"benchmarks/swap_in.py --json {out}/swap_in.json --png {out}/swap_in.png --quick --sweep",
        f"benchmarks/one_rank.py --json {out}/one_rank-2.json --model glm-5.2",
        f"benchmarks/sampling.py --json {out}/sampling.json --png {out}/sampling.png --quick",
    ]
    assert ended.returncode == 1 and ended.stdout.endswith("failed: one_rank --model glm-5.2\n") and not ended.stderr
    assert {path.stem for path in out.iterdir()} == {"one_rank", "one_rank-2", "swap_in", "sampling"}


def test_help_says_what_can_be_run(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "--help")
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.startswith("Runs tests and benchmarks") and "scripts/gpu [--quick]" in ended.stdout
    assert "set -u" not in ended.stdout
