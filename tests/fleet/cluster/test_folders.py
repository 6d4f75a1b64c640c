"""Temporary folders of processes that were killed are removed by the next process that makes one."""

import os
import subprocess
import sys
from pathlib import Path

from hotset.fleet.cluster.folders import PREFIX

OWNER = "from hotset.fleet.cluster.folders import make_folder; print(make_folder(), flush=True); input()"


def test_folders_of_processes_that_were_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    def make() -> "tuple[subprocess.Popen[str], Path]":
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert owner.stdout is not None
        return owner, Path(owner.stdout.readline().rstrip("\n"))

    (killed, left), (running, used) = make(), make()
    for folder in (left, used):
        (folder / "workers.json").touch()
    (tmp_path / f"{PREFIX}file").touch()
    killed.kill()
    killed.communicate()
    last, new = make()
    assert sorted(tmp_path.iterdir()) == sorted([used, new, tmp_path / f"{PREFIX}file"])
    assert (used / "workers.json").exists()
    for owner in (running, last):
        owner.communicate("\n", timeout=60)
