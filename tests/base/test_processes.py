"""A worker observes the end of a peer's process on the same machine, and finds stopped descendants of a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from processes import pause, state_of
from waiting import wait_until

from hotset.base.processes import ProcessIdentity, find_stopped, has_ended, is_observable, this_process

THIS_PROCESS = this_process()

# Prints its identity. Its first thread ends when a line is read; another thread runs on until the input is closed.
TWO_THREADS = """
import ctypes, os, sys, threading
from hotset.base.processes import this_process
me = this_process()
print(me.boot_id, me.pid_namespace, me.pid, me.start_time, flush=True)
sys.stdin.readline()
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def process() -> Iterator[tuple["subprocess.Popen[str]", ProcessIdentity]]:
    started = subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdin is not None and started.stdout is not None
    boot_id, namespace, pid, start_time = started.stdout.readline().split()
    try:
        yield started, ProcessIdentity(boot_id, namespace, int(pid), int(start_time))
    finally:
        started.kill()
        started.wait()
        started.stdin.close()
        started.stdout.close()


def test_defect_23_a_process_has_ended_when_it_was_killed_even_if_its_parent_has_not_waited_for_it() -> None:
    with process() as (started, identity):
        assert is_observable(identity, THIS_PROCESS) and not has_ended(identity)
        pause(identity.pid)
        assert not has_ended(identity), "a process that is stopped can continue"
        os.kill(identity.pid, signal.SIGKILL)
        assert wait_until(lambda: has_ended(identity))
        assert state_of(identity.pid) == "Z"
        started.wait()
        assert has_ended(identity)


def test_defect_23_a_process_whose_first_thread_has_ended_has_not_ended_while_another_runs() -> None:
    with process() as (started, identity):
        assert started.stdin is not None
        started.stdin.write("\n")
        started.stdin.flush()
        assert wait_until(lambda: state_of(identity.pid) == "Z"), "the first thread has not ended"
        assert not has_ended(identity)
        started.stdin.close()
        assert wait_until(lambda: has_ended(identity))


def test_a_process_with_the_pid_of_an_earlier_one_is_another_process() -> None:
    assert THIS_PROCESS is not None and not has_ended(THIS_PROCESS)
    assert has_ended(replace(THIS_PROCESS, start_time=THIS_PROCESS.start_time - 1))


def test_processes_of_other_machines_and_namespaces_cannot_be_observed() -> None:
    assert THIS_PROCESS is not None
    for other in (replace(THIS_PROCESS, boot_id="another"), replace(THIS_PROCESS, pid_namespace="pid:[1]"), None):
        assert not is_observable(other, THIS_PROCESS) and not is_observable(THIS_PROCESS, other)


# A thread starts a process, which starts another one and prints its id.
GRANDPARENT = """
import subprocess, sys, threading
grandchild = "import os; print(os.getpid(), flush=True); input()"
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
thread = threading.Thread(target=lambda: subprocess.run([sys.executable, "-c", child]))
thread.start()
thread.join()
"""


def test_a_stopped_descendant_is_found_until_it_continues_or_ends() -> None:
    command = [sys.executable, "-c", GRANDPARENT]
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
