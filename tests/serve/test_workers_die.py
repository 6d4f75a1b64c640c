"""A prefill worker dies while it computes a prompt, and the router retries the request with another prefill worker.

Other files kill all kinds of processes: tests/fleet/cluster/test_cluster_deaths.py in a whole application,
tests/fleet/router/test_deaths.py and tests/engine/test_handoff_processes.py in each part alone.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import plain_http
import pytest
from running_server import RunningServer, metrics_of, serving
from waiting import wait_until

TEXT = "/v1/completions"
SIZES = ["--device", "cpu", "--device-kv-tokens", "16384", "--host-kv-tokens", "32768"]
# The worker dies while it computes the prompt, which must therefore take long. Metrics can be half a second old.
FLAGS = ["--load-format", "dummy", "--max-num-batched-tokens", "16", "--no-prefix-cache", *SIZES]
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3] * 2000,
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}


def pages_in_use(worker: RunningServer) -> float:
    """Returns the number of pages held, without those in quarantine."""
    held = worker.gauge("hotset_device_pages_held") + worker.gauge("hotset_host_pages_held")
    return held - worker.gauge("hotset_pages_quarantined")


@pytest.mark.slow
def test_a_prefill_worker_that_dies_during_a_prefill_is_replaced_by_another(tiny_model: str, tmp_path: Path) -> None:
    with ExitStack() as running, ThreadPoolExecutor(3) as pool:

        def start(name: str) -> RunningServer:
            (tmp_path / name).mkdir()
            role = name.rstrip("12")
            return running.enter_context(serving(tmp_path / name, tiny_model, "--role", role, *FLAGS))

        *prefills, decode = pool.map(start, ("prefill1", "prefill2", "decode"))
        flags = ["--prefill", *(worker.url for worker in prefills), "--decode", decode.url]
        router = running.enter_context(serving(tmp_path, *flags, command="router"))
        assert wait_until(router.is_healthy)
        pending = pool.submit(plain_http.post, router.url + TEXT, json=LONG, timeout=120)
        assert wait_until(lambda: any(pages_in_use(worker) for worker in prefills))
        busy, other = sorted(prefills, key=pages_in_use, reverse=True)
        os.kill(busy.engine_pid(), signal.SIGKILL)
        busy.process.kill()
        answer = pending.result()
        assert answer.status_code == 200, answer.text
        direct = plain_http.post(decode.url + TEXT, json=LONG, timeout=120)
        assert answer.json()["choices"] == direct.json()["choices"]
        retries = {
            reason: metrics_of(router.url)[f"hotset_router_retries_total/{reason}"]
            for reason in ("prefill_lost", "decode_lost")
        }
        assert retries == {"prefill_lost": 1.0, "decode_lost": 0.0}
        decode.wait_for_gauge("hotset_pages_quarantined", 0)
        for worker in (decode, other):
            assert wait_until(lambda worker=worker: pages_in_use(worker) == 0), f"{worker.url} still holds pages"
            assert worker.is_healthy()
