"""The check of `scripts/gpu` that every thread chooses its GPU: here with torch's device "meta" instead of a GPU."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "device_threads"
SCRIPT = """
import threading, torch
from concurrent.futures import ThreadPoolExecutor

torch.cuda.set_device = lambda device: None
torch.cuda.cudart = lambda: "called"
on_host, on_gpu = torch.zeros(3), torch.zeros(3, device="meta")

def chooses_first():
    torch.cuda.set_device(0)
    torch.cuda.cudart()
    return on_gpu + 1

def outcome(function):
    with ThreadPoolExecutor(1, "worker thread") as threads:
        error = threads.submit(function).exception()
    return "" if error is None else str(error)

on_gpu + 1  # the main thread is not checked
print(outcome(chooses_first))
print(outcome(lambda: on_host + 1))
print(outcome(lambda: on_gpu + 1))
print(outcome(lambda: torch.empty(2, device="meta")))
print(outcome(lambda: on_gpu.copy_(on_host)))
print(outcome(lambda: torch.cuda.cudart()))
"""


def test_a_thread_that_uses_a_gpu_without_choosing_it_fails_and_is_named() -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "HOTSET_CHECKED_DEVICE": "meta"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    allowed, wrong = done.stdout.split("\n")[:2], done.stdout.split("\n")[2:-1]
    assert allowed == ["", ""]
    used = ("aten.add.Tensor", "aten.empty.memory_format", "aten.copy_.default", "<lambda>")
    assert wrong == [f"thread 'worker thread_0' used CUDA ({name}) before it had chosen its GPU" for name in used]
