"""The process in which checks run: results and errors come back, and what hangs is ended with all that it started."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import wait_until_ended

from hotset.base.errors import ConfigError
from hotset.lab.doctor.child import CallFailed, ChildProcess

SECONDS = 60.0


def double(number: int) -> int:
    return 2 * number


def refuse() -> None:
    raise ConfigError("no such GPU")


def divide_by_zero() -> None:
    print(1 // 0)


def start_sleeper() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def hang() -> None:
    time.sleep(1000)


def crash() -> None:
    print("a library complains\n", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


def test_results_and_errors_come_back_and_the_process_goes_on() -> None:
    with ChildProcess() as child:
        assert child.call(double, 21, seconds=SECONDS) == 42
        with pytest.raises(ConfigError, match="no such GPU"):
            child.call(refuse, seconds=SECONDS)
        with pytest.raises(CallFailed, match=r"^ZeroDivisionError: integer division"):
            child.call(divide_by_zero, seconds=SECONDS)
        assert child.call(double, 4, seconds=SECONDS) == 8
        pid = child.call(os.getpid, seconds=SECONDS)
    wait_until_ended([pid])


def test_a_call_that_hangs_is_ended_with_the_processes_that_it_has_started() -> None:
    with ChildProcess() as child:
        pids = [child.call(os.getpid, seconds=SECONDS), child.call(start_sleeper, seconds=SECONDS)]
        with pytest.raises(CallFailed, match=r"^did not finish within 0.05 s$"):
            child.call(hang, seconds=0.05)
        wait_until_ended(pids)
        assert not child.alive


def test_an_interrupted_call_does_not_delay_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), ChildProcess() as child:
        pid = child.call(os.getpid, seconds=SECONDS)
        child._connection.send((hang, ()))
        raise KeyboardInterrupt
    wait_until_ended([pid])


def test_a_crash_is_reported_with_its_signal_and_the_last_line_of_its_output() -> None:
    with ChildProcess() as child, pytest.raises(CallFailed, match=r"killed by signal 11: a library complains$"):
        child.call(crash, seconds=SECONDS)
    with ChildProcess() as child, pytest.raises(CallFailed, match=r"ended unexpectedly$"):
        child.call(leave, seconds=SECONDS)


def test_the_process_ends_with_its_parent_also_in_a_call() -> None:
    script = (
        "import os, signal, time\nfrom hotset.lab.doctor.child import ChildProcess\nchild = ChildProcess()\n"
        "print(child.call(os.getpid, seconds=60), flush=True)\nchild._connection.send((time.sleep, (1000,)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS)
    wait_until_ended([int(done.stdout)])
