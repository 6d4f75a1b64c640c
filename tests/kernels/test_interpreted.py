"""Runs the tests of all Triton kernels in a process in which Triton interprets its kernels on the CPU.

Triton reads TRITON_INTERPRET when a kernel's module is imported, so these tests need another process. All of them share
one, because Triton is slow to import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    str(path)
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path != Path(__file__) and "from interpreted import" in path.read_text()
]


@pytest.mark.not_interpreted
@pytest.mark.timeout(1800)  # several times the duration on an overloaded machine
def test_kernels_pass_their_tests_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    """The child process runs the slow tests as well, unless this pytest process excludes them."""
    assert len(FILES) >= 10
    marks = "not gpu and not slow" if "not slow" in pytestconfig.getoption("markexpr") else "not gpu"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command = [sys.executable, "-m", "pytest", *options, "-m", marks, *FILES]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
