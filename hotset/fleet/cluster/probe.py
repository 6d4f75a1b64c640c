"""The check that `hotset cluster` runs on every node before it starts anything.

Ray sends this function by value, so that it also runs on a node without Hotset. The module must not import Hotset.
"""

import platform
import subprocess
import sys

PROBE_SECONDS = 30.0


def probe_node() -> dict[str, str | None]:
    """Returns the versions of Python and Hotset on this node. The version of Hotset is None if it is not installed.

    A new process finds the version of Hotset, because a Ray worker also imports packages of the program that uses Ray.
    """
    command = [sys.executable, "-m", "hotset", "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        answer = done.stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    return {"python": platform.python_version(), "hotset": answer[1] if answer[:1] == ["hotset"] else None}
