"""The status line: a bar that is redrawn and erased on a terminal, and lines in the log elsewhere."""

import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from pseudo_terminal import run_on_terminal, screen
from waiting import wait_until

from hotset import LLM
from hotset.base import status_line
from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.base.listeners import bound_socket
from hotset.base.serve_config import ServeConfig
from hotset.base.status_line import LOG_SECONDS, ShowProgress, StatusLine, TaskProgress, TaskTimer, show_counts
from hotset.serve.server import run as run_server

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
# Fails, or is interrupted or killed, while a bar is drawn. Each prints a message like the command line does.
FAILING = """
import os, signal, sys, time
from hotset.base.status_line import StatusLine, TaskProgress
try:
    with StatusLine("Loading") as status:
        status.show(TaskProgress("Loading", 3, 12))
        while not os.path.exists(sys.argv[2]):  # the test has seen the bar
            time.sleep(0.01)
        if sys.argv[1] == "error":
            raise OSError("it fails")
        os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "kill" else signal.SIGINT)
        time.sleep(60)
except (OSError, KeyboardInterrupt):
    print("error: the message", file=sys.stderr)
"""


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with StatusLine("Starting", terminal) as status:
        show = show_counts(status.show, "Loading m", in_bytes=True)
        show(GIB // 2, 2 * GIB)
        assert wait_until(lambda: "512.0 MiB" in terminal.getvalue())
        [line] = screen(terminal.getvalue())
        assert re.fullmatch(r"Loading m ━━━━━─{15} 512\.0 MiB of 2\.0 GiB, \d+ s", line)
        status.print("a line above")
        show(GIB, 2 * GIB)
        assert wait_until(lambda: "1.0 GiB" in terminal.getvalue())
        assert screen(terminal.getvalue())[0] == "a line above"
    assert screen(terminal.getvalue()) == ["a line above", ""]


def test_the_bar_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with StatusLine("x" * 200, terminal):
        assert wait_until(terminal.getvalue)
        assert screen(terminal.getvalue()) == ["x" * 79]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "dumb terminal"])
def test_without_a_terminal_progress_is_logged_in_lines(
    stream: TextIO, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    caplog.set_level(logging.INFO, logger="hotset")

    def logged(pattern: str) -> bool:
        return any(re.fullmatch(pattern, message) for message in caplog.messages)

    with StatusLine("Starting", stream, log_seconds=0.02) as status:
        assert wait_until(lambda: logged(r"Starting, \d+ s"))
        status.show(TaskProgress("Loading m", GIB // 2, 2 * GIB, in_bytes=True))
        assert wait_until(lambda: logged(r"Loading m: 512\.0 MiB of 2\.0 GiB, \d+ s"))
        status.show(TaskProgress("Capturing", 3, 12))
        assert wait_until(lambda: logged(r"Capturing: 3 of 12, \d+ s"))
        status.print("a line")
    assert isinstance(stream, io.StringIO) and stream.getvalue() == "a line\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "hotset-status"]


def test_a_task_in_bytes_shows_its_rate_and_the_seconds_that_remain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done before the task was shown does not count: another thread may have done it meanwhile."""
    monkeypatch.setattr(status_line, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(status_line, "time", SimpleNamespace(monotonic=iter([0.0, 10.0, *[14.0] * 10_000]).__next__))
    caplog.set_level(logging.INFO, logger="hotset")
    line = StatusLine("Starting", io.StringIO())
    line.show(TaskProgress("Loading m", 2 * 10**9, 14 * 10**9, in_bytes=True))
    line.show(TaskProgress("Loading m", 8 * 10**9, 14 * 10**9, in_bytes=True))
    assert line._line().endswith("7.5 GiB of 13.0 GiB, 1.5 GB/s, 4 s left, 4 s")


def test_a_timer_names_every_task_with_its_seconds() -> None:
    now, shown = [100.0], []
    timer = TaskTimer(shown.append, clock=lambda: now[0])
    for title, seconds in (("Loading m", 0.5), ("Capturing", 9.0), ("Loading m", 3.0), ("Capturing", 1.0)):
        now[0] += seconds
        timer.show(TaskProgress(title))
    now[0] += 2.5
    assert timer.summary() == "16.0 s: preparing 0.5, Loading m 10.0, Capturing 5.5"
    assert [progress.title for progress in shown] == ["Loading m", "Capturing", "Loading m", "Capturing"]


def test_a_task_shorter_than_the_interval_of_ten_seconds_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert LOG_SECONDS == 10.0
    caplog.set_level(logging.INFO, logger="hotset")
    with StatusLine("Starting", io.StringIO(), log_seconds=1000 * LOG_SECONDS) as status:
        status.show(TaskProgress("Loading", 1, 2))
    assert not caplog.messages


@pytest.mark.parametrize("end", ["error", "interrupt", "kill"])
def test_the_terminal_is_left_clean_after_an_error_ctrl_c_and_a_kill(end: str, tmp_path: Path) -> None:
    def on_output(output: str) -> None:
        if "3 of 12" in output:
            (tmp_path / "seen").touch()

    command = [sys.executable, "-c", FAILING, end, str(tmp_path / "seen")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    _, output = run_on_terminal(command, ROOT, environment, on_output)
    assert "━" in output, "no bar was drawn, so this test checks nothing"
    # `screen` refuses the control sequence that hides the cursor, so nothing has to show it again.
    if end == "kill":
        assert screen(output)[-1].startswith("Loading") and output.endswith("\r"), "the next text overwrites the bar"
    else:
        assert screen(output) == ["error: the message", ""]


def start_server() -> None:
    process: Any = SimpleNamespace(end=lambda seconds: None)
    with pytest.raises(StartupError, match="as planned"):
        run_server(EngineConfig(), ServeConfig(port=0), process, bound_socket("127.0.0.1", 0))


def start_llm() -> None:
    with pytest.raises(StartupError, match="as planned"):
        LLM()


@pytest.mark.parametrize("start", [start_server, start_llm])
def test_a_start_without_a_terminal_logs_its_progress(
    start: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(config: EngineConfig, *rest: object, show: ShowProgress) -> None:
        show(TaskProgress("Loading m", GIB, 4 * GIB, in_bytes=True))
        assert wait_until(
            lambda: any(message.startswith("Loading m: 1.0 GiB of 4.0 GiB, ") for message in caplog.messages)
        )
        raise StartupError("it fails, as planned")

    monkeypatch.setattr(status_line, "LOG_SECONDS", 0.02)
    monkeypatch.setattr("hotset.engine.llm.build_engine", load)
    monkeypatch.setattr(
        "hotset.serve.server.EngineClient.start", lambda config, process, show: load(config, process, show=show)
    )
    caplog.set_level(logging.INFO, logger="hotset")
    start()
    assert "\x1b" not in capsys.readouterr().err
