"""Every test of a Triton kernel once more where Triton interprets its kernels.

In one process: Triton is slow to import, and reads the variable once.
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
def test_kernels_pass_their_tests_under_the_interpreter() -> None:
    assert len(FILES) >= 10
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *FILES]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
