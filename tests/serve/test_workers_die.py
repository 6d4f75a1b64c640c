"""Two prefill and two decode workers behind a router: one of them dies, or the router, or a client leaves, while rows
land. Of each role one test kills one, so they may come in any order."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, serving

TEXT = "/v1/completions"
# Pools that hold the prompt twice: where rows of a dead worker were to land, nothing else may for a while.
SIZES = ["--device", "cpu", "--device-kv-tokens", "16384", "--host-kv-tokens", "32768"]
FLAGS = ["--load-format", "dummy", "--max-num-batched-tokens", "16", *SIZES]
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3] * 1000,
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
SHORT = {**LONG, "prompt": [1, 2, 3] * 10}
SECONDS = 60.0  # for what happens much sooner on a machine that is not overloaded
PAGES = ("hotset_device_pages_held", "hotset_host_pages_held", "hotset_pages_quarantined")


def pages_in_use(worker: RunningServer) -> float:
    """Held, and not in quarantine."""
    text = httpx.get(f"{worker.url}/metrics", timeout=30).text
    device, host, quarantined = (float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) for name in PAGES)
    return device + host - quarantined


def kill(worker: RunningServer) -> None:
    """As kill -9 does, the engine as well."""
    os.kill(worker.engine_pid(), signal.SIGKILL)
    worker.process.kill()
    worker.process.wait(SECONDS)


@dataclass(frozen=True)
class Crew:
    folder: Path
    workers: dict[str, list[RunningServer]]  # by role, the dead ones as well
    router: RunningServer
    clients: ThreadPoolExecutor

    def alive(self, *roles: str) -> list[RunningServer]:
        return [worker for role in roles for worker in self.workers[role] if worker.process.poll() is None]

    def busy(self, role: str) -> RunningServer:
        """The worker of this role that holds pages for a prompt, once one does."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for worker in self.alive(role):
                if pages_in_use(worker) > 0:
                    return worker
        raise AssertionError(f"no {role} worker has anything to do")

    def tokens_prefilled(self) -> float:
        return sum(worker.gauge("hotset_tokens_prefilled_total") for worker in self.alive("prefill"))

    def ask(self, body: dict[str, Any]) -> "Future[httpx.Response]":
        return self.clients.submit(httpx.post, self.router.url + TEXT, json=body, timeout=120)

    def settle(self) -> None:
        """Whoever lives comes to hold nothing but what is in quarantine, is well, and answers."""
        deadline = time.monotonic() + SECONDS
        for worker in self.alive("prefill", "decode"):
            while (pages := pages_in_use(worker)) > 0:
                assert time.monotonic() < deadline, f"{worker.url} still holds {pages:g} pages"
                time.sleep(0.05)
            assert httpx.get(f"{worker.url}/health", timeout=30).status_code == 200
        assert self.ask(SHORT).result().status_code == 200


@contextmanager
def routing(folder: Path, workers: dict[str, list[RunningServer]]) -> Iterator[RunningServer]:
    folder.mkdir()
    urls = {role: [worker.url for worker in each if worker.process.poll() is None] for role, each in workers.items()}
    with serving(folder, "--prefill", *urls["prefill"], "--decode", *urls["decode"], kind="router") as router:
        deadline = time.monotonic() + SECONDS
        while httpx.get(f"{router.url}/health", timeout=30).status_code != 200:
            assert time.monotonic() < deadline, "the router finds no workers"
            time.sleep(0.05)
        yield router


@pytest.fixture(scope="module")
def crew(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    with ExitStack() as running, ThreadPoolExecutor(4) as pool:

        def start(role: str, number: int) -> RunningServer:
            own = folder / f"{role}{number}"
            own.mkdir()
            return running.enter_context(serving(own, tiny_model, "--role", role, *FLAGS))

        coming = {role: [pool.submit(start, role, number) for number in (1, 2)] for role in ("prefill", "decode")}
        workers = {role: [each.result() for each in started] for role, started in coming.items()}
        router = running.enter_context(routing(folder / "router", workers))
        yield Crew(folder, workers, router, pool)


def test_a_client_that_leaves_while_rows_land_leaves_no_pages_behind(crew: Crew) -> None:
    before = crew.tokens_prefilled()
    client = http.client.HTTPConnection(crew.router.url.removeprefix("http://"))
    client.request("POST", TEXT, json.dumps(LONG), {"Content-Type": "application/json"})
    crew.busy("prefill")
    client.close()
    crew.settle()
    assert crew.tokens_prefilled() - before < len(LONG["prompt"]), "what nobody wants was computed to its end"


def test_a_router_killed_while_rows_land_leaves_workers_that_another_router_uses(crew: Crew) -> None:
    with routing(crew.folder / "doomed", crew.workers) as doomed:
        pending = crew.clients.submit(httpx.post, doomed.url + TEXT, json=LONG, timeout=120)
        crew.busy("prefill")
        doomed.process.kill()
        with pytest.raises(httpx.TransportError):
            pending.result(SECONDS)
    crew.settle()


def test_a_prefill_worker_that_dies_over_a_prompt_is_replaced_by_another(crew: Crew) -> None:
    pending = crew.ask(LONG)
    busy = crew.busy("prefill")
    kill(busy)
    answer = pending.result()
    assert answer.status_code == 200, answer.text
    alone = httpx.post(crew.alive("decode")[0].url + TEXT, json=LONG, timeout=120)
    assert answer.json()["choices"] == alone.json()["choices"]
    metrics = httpx.get(f"{crew.router.url}/metrics", timeout=30).text
    assert 'hotset_router_retries_total{reason="prefill_lost"} 1.0' in metrics
    assert sum(worker.gauge("hotset_pages_quarantined") for worker in crew.alive("decode")) > 0
    crew.settle()


def test_a_decode_worker_that_dies_over_a_prompt_is_replaced_by_another(crew: Crew) -> None:
    pending = crew.ask(LONG)
    busy = crew.busy("decode")
    kill(busy)
    answer = pending.result()
    assert answer.status_code == 200, answer.text
    (other,) = crew.alive("decode")
    assert answer.json()["choices"] == httpx.post(other.url + TEXT, json=LONG, timeout=120).json()["choices"]
    assert not any(worker.gauge("hotset_pages_quarantined") for worker in crew.alive("prefill"))
    crew.settle()
