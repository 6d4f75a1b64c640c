"""A real `hotset serve` in a process of its own, and what tests ask of it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

STOP_SECONDS = 60
API_KEY = "open-sesame"
ORIGIN = "http://page.example"


@dataclass(frozen=True)
class RunningServer:
    """A `hotset serve` that has printed its ready line."""

    url: str
    process: subprocess.Popen[str]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()

    def gauge(self, name: str) -> float:
        """The present value of a metric without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not among the metrics"
        return float(found[1])

    def gauge_becomes(self, name: str, wanted: Callable[[float], bool], seconds: float = 60.0) -> float:
        """Waits until the metric is as wanted; returns its last value either way."""
        deadline = time.monotonic() + seconds
        while not wanted(value := self.gauge(name)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return value

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 1, f"children {children} hold {len(engines)} engines"
        return int(engines[0])


@contextmanager
def serving(folder: Path, *arguments: str, kind: str = "serve") -> Iterator[RunningServer]:
    """Runs a server or a router on a free port; its log goes into `folder`. In the end it is stopped, if it runs."""
    log_path = folder / "stderr.txt"
    command = [sys.executable, "-m", "hotset", kind, *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            url = re.search(r"http://\S+:\d+", ready)
            assert url is not None, f"no ready line but {ready!r}; stderr: {log_path.read_text()}"
            yield RunningServer(url[0], process, log_path)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()
