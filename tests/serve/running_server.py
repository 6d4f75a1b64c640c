"""Runs `hotset serve` or `hotset router` in its own process, and queries it for tests."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import plain_http
from idle_connections import with_few_descriptors
from processes import children_of, is_spawned
from prometheus_client.parser import text_string_to_metric_families
from waiting import WAIT_SECONDS, wait_until

STOP_SECONDS = 60
API_KEY = "open-sesame"
ORIGIN = "http://page.example"


@dataclass(frozen=True)
class RunningServer:
    """A `hotset serve` or `hotset router` process that has printed its ready line."""

    url: str
    process: subprocess.Popen[str]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, pattern: str) -> None:
        """Waits for text in the log: a request is logged after its response was sent."""
        found = wait_until(lambda: re.search(pattern, self.log()))
        assert found, f"{pattern!r} was not logged within {WAIT_SECONDS:g} s: {self.log()}"

    def gauge(self, name: str) -> float:
        """Returns the current value of a metric without labels."""
        text = plain_http.get(f"{self.url}/metrics", timeout=30).text
        sample = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert sample is not None, f"{name} is not among the metrics"
        return float(sample[1])

    def wait_for_gauge(self, name: str, value: float, seconds: float = WAIT_SECONDS) -> None:
        """Waits until the metric has this value."""
        reached = wait_until(lambda: self.gauge(name) == value, seconds)
        assert reached, f"{self.url}: {name} is {self.gauge(name):g} after {seconds:g} s, not {value:g}"

    def is_healthy(self) -> bool:
        return plain_http.get(f"{self.url}/health", timeout=30).status_code == 200

    def engine_pid(self) -> int:
        engines = [pid for pid in children_of(self.process.pid) if is_spawned(pid)]
        assert len(engines) == 1, f"found {len(engines)} engines among the children of the server"
        return engines[0]


@contextmanager
def serving(
    folder: Path, *arguments: str, command: str = "serve", few_descriptors: bool = False
) -> Iterator[RunningServer]:
    """Runs `hotset COMMAND` on a free port, with its log in `folder`. Yields the server when it is ready, and stops it
    at the end of the block."""
    log_path = folder / "stderr.txt"
    command_line = [sys.executable, "-m", "hotset", command, *arguments, "--port", "0"]
    if few_descriptors:
        command_line = with_few_descriptors(command_line)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log_path.open("w") as log,
        subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            url = re.search(r"http://\S+:\d+", ready)
            assert url is not None, f"expected a ready line, got {ready!r}; stderr: {log_path.read_text()}"
            yield RunningServer(url[0], process, log_path)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()


def metrics_of(url: str) -> dict[str, float]:
    """Returns all samples of one scrape. Each name ends with its label values, like `hotset_handoffs_total/landed`."""
    families = text_string_to_metric_families(plain_http.get(f"{url}/metrics", timeout=30).text)
    samples = [sample for family in families for sample in family.samples]
    return {
        "/".join((sample.name, *(value for _, value in sorted(sample.labels.items())))): sample.value
        for sample in samples
    }


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Checks the status and the format of an error response, and returns the error object."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in answer.text
    error: dict[str, Any] = body["error"]
    return error
