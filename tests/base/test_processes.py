"""A worker observes the end of a peer's process on the same machine, and finds stopped descendants of a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_files import write_files
from processes import is_running, pause, state_of, wait_until_ended
from waiting import wait_until

from hotset.base import processes
from hotset.base.processes import (
    ENDING_NAME,
    PF_EXITING,
    ProcessIdentity,
    descendants,
    ending_processes,
    find_stopped,
    has_ended,
    is_observable,
    session_members,
    this_process,
)

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


def test_the_descendants_of_a_process_are_known_after_its_death() -> None:
    command = [sys.executable, "-c", GRANDPARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        child, last = descendants(parent.pid)
        assert last.pid == grandchild
        parent.kill()
        assert wait_until(lambda: descendants(parent.pid) == []), "they have another parent now"
        assert not has_ended(child) and not has_ended(last)
        assert {member.pid for member in session_members(parent.pid)} == {child.pid, grandchild}
        for pid in (child.pid, grandchild):
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: has_ended(child) and has_ended(last))
        assert session_members(parent.pid) == []


def entry(pid: int, state: str = "S", flags: int = 0, pending: int = 0, name: str = "python") -> dict[str, object]:
    """Returns the files of a process or thread in /proc. Its name in `stat` has spaces and parentheses."""
    stat = f"{pid} (a) b (c) {state} 1 1 1 0 -1 {flags} " + " ".join(["0"] * 20)
    return {
        "stat": stat,
        "comm": f"{name}\n",
        "status": f"Name:\t{name}\nSigPnd:\t0000000000000000\nShdPnd:\t{pending:016x}\nSigBlk:\t{1 << 8:016x}\n",
    }


def files_of(pid: int, *threads: dict[str, object]) -> dict[str, object]:
    files = {f"{pid}/{name}": content for name, content in threads[0].items()}
    for number, thread in enumerate(threads):
        files |= {f"{pid}/task/{pid + number}/{name}": content for name, content in thread.items()}
    return files


EXITING = PF_EXITING | 0x400000
PROCESSES: dict[str, tuple[bool, tuple[dict[str, object], ...]]] = {
    "running": (False, (entry(10), entry(11, "R", 0x400000))),
    "frees its memory": (True, (entry(10, "D", EXITING),)),
    "its first thread has ended, another frees memory": (True, (entry(10, "Z", EXITING), entry(11, "D", EXITING))),
    "its first thread has ended, another runs": (False, (entry(10, "Z", EXITING), entry(11, "S"))),
    "a thread ends": (False, (entry(10), entry(11, "R", EXITING))),
    "killed while it waits for a device": (True, (entry(10, "D", pending=1 << 8),)),
    "another signal is pending": (False, (entry(10, "T", pending=1 << 14),)),
    "ended": (False, (entry(10, "Z", EXITING), entry(11, "X", EXITING))),
    "its parent has died": (True, (entry(10, name=ENDING_NAME), entry(11))),
    "its parent had died, and it has ended": (False, (entry(10, "Z", EXITING, name=ENDING_NAME),)),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_a_process_is_ending_from_the_kill_until_its_memory_is_free(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, threads = PROCESSES[case]
    root = write_files(tmp_path, files_of(10, *threads) | {"meminfo": "", "self/comm": ENDING_NAME})
    assert ending_processes(root) == ([10] if ending else [])
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert ending_processes(root) == [], "it belongs to another user"


NAMES_ITSELF = """
import sys, threading
from hotset.base.processes import name_as_ending
thread = threading.Thread(target=name_as_ending)  # any thread names the process
thread.start()
thread.join()
print("named", flush=True)
sys.stdin.read()
"""


def test_a_process_that_names_itself_is_ending_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMES_ITSELF], stdin=-1, stdout=-1) as named:
        assert named.stdout is not None
        named.stdout.readline()
        assert named.pid in ending_processes()
        named.kill()
        wait_until_ended([named.pid])
        assert not is_running(named.pid) and named.pid not in ending_processes(), "only its exit code is left"


def test_this_process_is_never_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_is_ending", lambda _folder: True)
    assert os.getpid() not in ending_processes()
