"""The slice kernel compiles for sm_90 and moves as many bytes at a time as it is aligned to; no GPU is needed.

Run as a program, this file compiles every case and prints the PTX, as test_small_ops_compile.py does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_small_ops_compile import Case, compile_for_sm90

ROOT = Path(__file__).resolve().parents[2]
UNITS = {16: "v4.b32", 4: "b32", 1: "b8"}  # of a load, by what everything is aligned to
CASES = [(16, False), (16, True), (4, False), (1, True)]


def case(width: int, unpack: bool) -> Case:
    """Slices of 512 bytes, in pages of 64 rows."""
    word = min(4, width)
    kind = {4: "*i32", 2: "*i16", 1: "*u8"}[word]
    shape = {"block_rows": 32, "block_words": 512 // word, "page_rows": 64, "vector": width // word, "unpack": unpack}
    return Case("slice_pack", "_copy_kernel", {"*i64": "table pages", kind: "packed"}, shape, warps=4)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed: dict[str, str] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize(("width", "unpack"), CASES)
def test_slices_move_in_the_widest_unit_that_alignment_allows(
    compiled: dict[str, str], width: int, unpack: bool
) -> None:
    ptx = compiled[f"{width} {unpack}"]
    assert ".target sm_90" in ptx
    for way in ("ld", "st"):
        assert ptx.count(f"{way}.global.{UNITS[width]} ") == 32 * 512 // 128 // width, "of a thread, all at once"


if __name__ == "__main__":
    cases = {f"{width} {unpack}": case(width, unpack) for width, unpack in CASES}
    print(json.dumps({name: str(compile_for_sm90(each)["ptx"]) for name, each in cases.items()}))
