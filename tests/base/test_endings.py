"""Waits for processes that have been killed but still hold memory.

A process that has closed its pipes but runs stands for one whose memory the system frees: that takes minutes with much
memory, and is too short for a test with little.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from fake_files import write_files
from waiting import WAIT_SECONDS, wait_until

from hotset.base import endings
from hotset.base.endings import ending_seconds, exit_code, wait_for_ending, wait_until_ended
from hotset.base.processes import identify
from hotset.base.status_line import TaskProgress
from hotset.base.units import GIB


def close_pipes_and_wait(descriptor: int) -> None:
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1024)
    os.read(descriptor, 1)
    os._exit(5)


@contextmanager
def ending_process() -> Iterator[int]:
    """Yields a process that names itself as ending."""
    code = "from hotset.base.processes import name_as_ending as name; name(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_the_exit_code_of_a_child_is_known_when_it_has_ended_not_when_its_pipes_are_closed() -> None:
    readable, writable = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=close_pipes_and_wait, args=(readable,))
    child.start()
    assert wait([child.sentinel], WAIT_SECONDS), "its pipes are not closed"
    assert exit_code(child, 0.1) is None
    os.write(writable, b"x")
    assert exit_code(child, WAIT_SECONDS) == 5
    for descriptor in (readable, writable):
        os.close(descriptor)


def test_processes_are_waited_for_until_all_have_ended() -> None:
    with ending_process() as one, ending_process() as other:
        waited_for: list[Sequence[int]] = []

        def end_next(pids: Sequence[int]) -> None:
            waited_for.append(pids)
            os.kill(pids[0], signal.SIGKILL)

        found = [identity for pid in (one, other) if (identity := identify(pid)) is not None]
        assert wait_until_ended(found, WAIT_SECONDS, end_next) == []
        assert waited_for[0] == [one, other] and waited_for[-1] == [other]


def test_a_process_that_does_not_end_is_returned_at_the_deadline() -> None:
    identity = identify(os.getpid())
    assert identity is not None
    assert wait_until_ended([identity], 0.1, lambda _: None) == [os.getpid()]


def test_the_time_to_end_follows_from_the_memory_in_use(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemTotal: {2048 * GIB // 1024} kB\nMemAvailable: {512 * GIB // 1024} kB\n"}
    assert ending_seconds(write_files(tmp_path, files)) == pytest.approx(10 + 1536 * GIB / 1e9)


def test_a_start_waits_for_processes_that_are_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(endings, "ending_seconds", lambda: WAIT_SECONDS)
    with ending_process() as pid:
        shown: list[TaskProgress] = []
        waiting = threading.Thread(target=wait_for_ending, args=(shown.append,))
        waiting.start()
        assert wait_until(lambda: any(str(pid) in progress.details for progress in shown))
        assert waiting.is_alive()
        os.kill(pid, signal.SIGKILL)
        waiting.join(WAIT_SECONDS)
        assert not waiting.is_alive()


def test_a_start_does_not_wait_for_ever_and_names_what_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endings, "ending_seconds", lambda: 0.1)
    monkeypatch.setattr(endings, "SAY_SECONDS", 0.0)
    with ending_process() as pid, caplog.at_level(logging.INFO, "hotset.processes"):
        wait_for_ending()
    said = [(record.levelno, record.getMessage()) for record in caplog.records if str(pid) in record.getMessage()]
    assert "waiting until the memory of processes that are ending is free" in said[0][1]
    assert said[-1][0] == logging.WARNING and "still ending" in said[-1][1]
