"""A worker or the router dies, or a client disconnects, during a landing.

The router has two prefill and two decode workers. In total, the tests kill one worker of each role, so they can run in
any order. For `make test`, tests/fleet/router/test_deaths.py and tests/engine/test_handoff_processes.py have the same
faults of each part alone.
"""

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
from processes import wait_until_ended
from running_server import RunningServer, serving
from waiting import WAIT_SECONDS, wait_until

TEXT = "/v1/completions"
# The pools hold the prompt several times, because pages that a dead worker may write to stay in quarantine.
SIZES = ["--device", "cpu", "--device-kv-tokens", "16384", "--host-kv-tokens", "32768"]
# Workers die while they compute a prompt, which must therefore take long, also the second time.
FLAGS = ["--load-format", "dummy", "--max-num-batched-tokens", "16", "--no-prefix-cache", *SIZES]
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3] * 1000,
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
SHORT = {**LONG, "prompt": [1, 2, 3] * 10}
MOST_PAGES_OF_SHORT = 4  # on the device and on the host; the long prompt has 47 on each
PAGES = ("hotset_device_pages_held", "hotset_host_pages_held", "hotset_pages_quarantined")

pytestmark = pytest.mark.slow


def pages_in_use(worker: RunningServer) -> float:
    """Returns the number of pages held, without those in quarantine."""
    text = plain_http.get(f"{worker.url}/metrics", timeout=30).text
    device, host, quarantined = (float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) for name in PAGES)
    return device + host - quarantined


@dataclass(frozen=True)
class Cluster:
    """Workers, their router, and threads that act as clients."""

    folder: Path
    workers: dict[str, list[RunningServer]]  # by role, including dead workers
    router: RunningServer
    clients: ThreadPoolExecutor

    def alive(self, *roles: str) -> list[RunningServer]:
        return [worker for role in roles for worker in self.workers[role] if worker.process.poll() is None]

    def wait_for_busy(self, role: str) -> RunningServer:
        """Waits until a worker of this role holds pages for the long prompt, and returns it.

        The metrics of a worker can be half a second old, and then still count the pages of a short prompt.
        """
        busy: list[RunningServer] = []

        def any_is_busy() -> bool:
            busy[:] = [worker for worker in self.alive(role) if pages_in_use(worker) > MOST_PAGES_OF_SHORT]
            return bool(busy)

        assert wait_until(any_is_busy), f"no {role} worker held pages within {WAIT_SECONDS:g} s"
        return busy[0]

    def tokens_prefilled(self) -> float:
        return sum(worker.gauge("hotset_tokens_prefilled_total") for worker in self.alive("prefill"))

    def post(self, body: dict[str, Any]) -> "Future[httpx.Response]":
        return self.clients.submit(plain_http.post, self.router.url + TEXT, json=body, timeout=120)

    def assert_pages_are_freed(self) -> None:
        """Waits until the living workers hold no pages except those in quarantine, and checks that they answer."""
        for worker in self.alive("prefill", "decode"):
            assert wait_until(lambda worker=worker: pages_in_use(worker) == 0), f"{worker.url} still holds pages"
            assert worker.is_healthy()
        assert self.post(SHORT).result().status_code == 200


@contextmanager
def routing(folder: Path, workers: dict[str, list[RunningServer]]) -> Iterator[RunningServer]:
    folder.mkdir()
    urls = {role: [worker.url for worker in group if worker.process.poll() is None] for role, group in workers.items()}
    with serving(folder, "--prefill", *urls["prefill"], "--decode", *urls["decode"], command="router") as router:
        assert wait_until(router.is_healthy)
        yield router


@pytest.fixture(scope="module")
def cluster(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as running, ThreadPoolExecutor(4) as pool:

        def start(role: str, number: int) -> RunningServer:
            worker_folder = folder / f"{role}{number}"
            worker_folder.mkdir()
            return running.enter_context(serving(worker_folder, tiny_model, "--role", role, *FLAGS))

        starting = {role: [pool.submit(start, role, number) for number in (1, 2)] for role in ("prefill", "decode")}
        workers = {role: [future.result() for future in futures] for role, futures in starting.items()}
        router = running.enter_context(routing(folder / "router", workers))
        yield Cluster(folder, workers, router, pool)


def test_a_client_that_disconnects_during_a_landing_leaves_no_pages_held(cluster: Cluster) -> None:
    before = cluster.tokens_prefilled()
    client = http.client.HTTPConnection(cluster.router.url.removeprefix("http://"))
    client.request("POST", TEXT, json.dumps(LONG), {"Content-Type": "application/json"})
    cluster.wait_for_busy("prefill")
    client.close()
    cluster.assert_pages_are_freed()
    assert cluster.tokens_prefilled() - before < len(LONG["prompt"]), (
        "an aborted prompt must not be computed to its end"
    )


def test_after_the_death_of_a_router_during_a_landing_its_workers_serve_another(cluster: Cluster) -> None:
    with routing(cluster.folder / "doomed", cluster.workers) as doomed:
        pending = cluster.clients.submit(plain_http.post, doomed.url + TEXT, json=LONG, timeout=120)
        cluster.wait_for_busy("prefill")
        doomed.process.kill()
        with pytest.raises(httpx.TransportError):
            pending.result(WAIT_SECONDS)
    cluster.assert_pages_are_freed()


def test_a_prefill_worker_that_dies_during_a_prefill_is_replaced_by_another(cluster: Cluster) -> None:
    # Metrics can be half a second old, so the prompt must take much longer than that.
    prompt = {**LONG, "prompt": 2 * LONG["prompt"]}
    pending = cluster.post(prompt)
    busy = cluster.wait_for_busy("prefill")
    os.kill(busy.engine_pid(), signal.SIGKILL)
    busy.process.kill()
    answer = pending.result()
    assert answer.status_code == 200, answer.text
    direct = plain_http.post(cluster.alive("decode")[0].url + TEXT, json=prompt, timeout=120)
    assert answer.json()["choices"] == direct.json()["choices"]
    metrics = plain_http.get(f"{cluster.router.url}/metrics", timeout=30).text
    retries = dict(re.findall(r'^hotset_router_retries_total{reason="(\w+)"} (\S+)$', metrics, re.MULTILINE))
    assert retries == {"prefill_lost": "1.0", "decode_lost": "0.0"}
    for worker in cluster.alive("decode"):
        worker.wait_for_gauge("hotset_pages_quarantined", 0)
    cluster.assert_pages_are_freed()


def test_a_decode_worker_that_dies_during_a_landing_is_replaced_by_another(cluster: Cluster) -> None:
    pending = cluster.post(LONG)
    busy = cluster.wait_for_busy("decode")
    engine = busy.engine_pid()
    busy.process.kill()
    answer = pending.result()
    assert answer.status_code == 200, answer.text
    wait_until_ended([engine])  # it ends with its parent
    (other,) = cluster.alive("decode")
    assert answer.json()["choices"] == plain_http.post(other.url + TEXT, json=LONG, timeout=120).json()["choices"]
    assert not any(worker.gauge("hotset_pages_quarantined") for worker in cluster.alive("prefill"))
    cluster.assert_pages_are_freed()
