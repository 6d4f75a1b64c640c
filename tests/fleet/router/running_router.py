"""Runs real routers and stub workers in their own processes, and queries them for tests."""

import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import plain_http
from idle_connections import with_few_descriptors
from prometheus_client.parser import text_string_to_metric_families
from waiting import WAIT_SECONDS, wait_until

HERE = Path(__file__).parent
STUB = HERE / "stub_worker.py"


@dataclass
class Stub:
    """A running stub worker."""

    url: str
    name: str
    process: "subprocess.Popen[str]"

    def seen(self) -> dict[str, Any]:
        """Returns the requests that the worker received, and the numbers of open and of disconnected completions."""
        return plain_http.get(f"{self.url}/seen", timeout=10).json()

    def bodies(self) -> list[str]:
        return [request["body"] for request in self.seen()["requests"] if "body" in request]

    def behave(self, **attributes: Any) -> None:
        """Clears the record of requests, and changes the behaviour or other attributes."""
        plain_http.post(f"{self.url}/behave", json=attributes, timeout=10).raise_for_status()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def behave(stubs: list[Stub], behaviour: str) -> None:
    for stub in stubs:
        stub.behave(behaviour=behaviour)


@dataclass
class Router:
    """A running `hotset router`."""

    url: str
    process: "subprocess.Popen[str]"
    log_path: Path

    def post(self, path: str = "/v1/completions", headers: Any = None, **body: Any) -> httpx.Response:
        return plain_http.post(f"{self.url}{path}", json={"prompt": "x", **body}, headers=headers, timeout=30)

    def stream(
        self, path: str = "/v1/completions", headers: Any = None, **body: Any
    ) -> "AbstractContextManager[httpx.Response]":
        return plain_http.stream(
            "POST", f"{self.url}{path}", json={"stream": True, **body}, headers=headers, timeout=30
        )

    def workers(self, **headers: str) -> dict[str, dict[str, Any]]:
        answer = plain_http.get(f"{self.url}/workers", headers=headers, timeout=10).json()
        return {worker["url"]: worker for worker in answer["workers"]}

    def up(self, *stubs: Stub, **headers: str) -> bool:
        """Returns whether exactly these workers are up."""
        workers = self.workers(**headers).items()
        return {url for url, worker in workers if worker["up"]} == {stub.url for stub in stubs}

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of a metric that have these labels."""
        text = plain_http.get(f"{self.url}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        values = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        assert values, f"{name} {labels} is not among the metrics"
        return sum(values)

    def log(self) -> str:
        return self.log_path.read_text()


class Cluster:
    """Starts stub workers and routers. `close` stops those that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cleanup = ExitStack()
        self._routers = 0

    def stub(self, role: str, name: str, **options: Any) -> Stub:
        return self.stubs(**{name: role}, **options)[0]

    def stubs(self, *, port: int = 0, model: str = "stub", behaviour: str = "well", **roles: str) -> list[Stub]:
        """Starts stub workers in parallel. `roles` maps the name of each worker to its role."""
        flags = ["--port", str(port), "--model", model, "--behaviour", behaviour]
        started = [self._start([sys.executable, str(STUB), role, name, *flags]) for name, role in roles.items()]
        return [Stub(self._first_line(process), name, process) for name, process in zip(roles, started, strict=True)]

    def router(
        self, prefill: list[Stub], decode: list[Stub], *flags: str, ready: bool = True, few_descriptors: bool = False
    ) -> Router:
        """Starts a router. If `ready`, waits until it has checked every worker and has a live one of each role."""
        command = [sys.executable, "-m", "hotset", "router", "--port", "0", "--poll-seconds", "0.1", *flags]
        for flag, stubs in (("--prefill", prefill), ("--decode", decode)):
            command += [flag, *(stub.url for stub in stubs)] if stubs else []
        if few_descriptors:
            command = with_few_descriptors(command)
        self._routers += 1
        log_path = self._folder / f"router{self._routers}.txt"
        with log_path.open("w") as log:
            process = self._start(command, log)
        line = self._first_line(process)
        url = re.search(r"http://\S+:\d+", line)
        assert url is not None, f"{line!r}: {log_path.read_text()}"
        router = Router(url[0], process, log_path)
        if ready:
            assert wait_until(lambda: plain_http.get(f"{router.url}/health", timeout=10).status_code == 200), (
                router.log()
            )
            checked = [re.compile(rf"worker {re.escape(stub.url)} is (up|down)") for stub in (*prefill, *decode)]
            assert wait_until(lambda: all(line.search(router.log()) for line in checked)), router.log()
        return router

    def close(self) -> None:
        self._cleanup.close()

    def _start(self, command: list[str], log: Any = None) -> "subprocess.Popen[str]":
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._cleanup.callback(self._end, process)
        return process

    @staticmethod
    def _first_line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        """Sends SIGTERM twice, because the second one ends the drain of a router that still has requests after a failed
        test. Kills the process if it does not exit in time."""
        for number in (signal.SIGTERM, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(0.02)
        try:
            process.wait(WAIT_SECONDS)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
