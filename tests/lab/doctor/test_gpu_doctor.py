"""`hotset doctor` on a real GPU, and with two ranks on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine.symmetric_ranks import has_mps

ROOT = Path(__file__).resolve().parents[3]
Levels = dict[str, list[str]]


def checked(*arguments: str) -> Levels:
    """Returns the levels of what the command finds, by the name of the check."""
    command = [sys.executable, "-m", "hotset", "doctor", "--json", "--port", "0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ)
    print(done.stdout, done.stderr)
    assert done.returncode in (0, 1), "the packages of the server may be missing"
    return {
        check["name"]: [finding["level"] for finding in check["findings"]]
        for check in json.loads(done.stdout)["checks"]
    }


@pytest.mark.gpu
def test_one_gpu_is_checked() -> None:
    levels = checked("--gpus", "0")
    assert levels["GPUs"][:2] == ["good", "good"]
    assert levels["kernels"] == ["good", "good"]
    assert levels["copies"] in (["good"], ["slow"]) and levels["pinning"] in (["good"], ["slow"])
    assert [levels[name] for name in ("peer access", "NCCL", "symmetric memory")] == [["skipped"]] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not has_mps(), reason="needs nvidia-cuda-mps-control -d")
def test_two_ranks_on_one_gpu_exchange_data() -> None:
    levels = checked("--tensor-parallel-size", "2", "--ranks-per-gpu", "2")
    assert (levels["NCCL"], levels["symmetric memory"]) == (["good"], ["good"])


@pytest.mark.gpu
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "hotset", "doctor", "--gpus", "63"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "GPU 63" in done.stderr
