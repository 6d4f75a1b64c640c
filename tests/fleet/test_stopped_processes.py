"""Processes that are stopped are found among the descendants of another one."""

import os
import signal
import subprocess
import sys

from processes import pause

from hotset.fleet.processes import find_stopped

# A thread starts a process, which starts another one and prints its id.
CODE = """
import subprocess, sys, threading
grandchild = "import os; print(os.getpid(), flush=True); input()"
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
thread = threading.Thread(target=lambda: subprocess.run([sys.executable, "-c", child]))
thread.start()
thread.join()
"""


def test_a_stopped_descendant_is_found_until_it_continues_or_ends() -> None:
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        try:
            assert find_stopped(parent.pid) is None
            pause(grandchild)
            assert find_stopped(parent.pid) == grandchild
            os.kill(grandchild, signal.SIGCONT)
            assert find_stopped(parent.pid) is None
            pause(parent.pid)
            assert find_stopped(parent.pid) == parent.pid
            os.kill(parent.pid, signal.SIGCONT)
        finally:
            for pid in (grandchild, parent.pid):
                os.kill(pid, signal.SIGKILL)
    assert find_stopped(parent.pid) is None
