"""Handoffs over NIXL between engines whose workers are on different simulated nodes of a Ray cluster. Workers are
killed and stopped while contexts land."""

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from engine.ray_nodes import SETTINGS, simulated_nodes, sparse_model
from engine.test_handoff_processes import wait_until
from harness import tiny_directory
from processes import command_line, descendants_of, wait_until_ended
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from hotset import LLM, SamplingParams
from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, HandoffLost
from hotset.base.request_options import RequestOptions
from hotset.engine.client import EngineClient
from hotset.engine.outputs import EngineStats
from hotset.engine.process import AUDIT_AFTER_IDLE_S, EngineProcess

pytest.importorskip("nixl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 3, 4, 5, 16, 25, 30, 33)
LANDINGS = ("host", "device", "auto")
DENSE_MODEL = {"vocab_size": 60, "num_key_value_heads": 2}
# The long prompt has so many chunks that a worker is lost before the last one has landed.
LONG_PROMPT = [position % 60 for position in range(1500)]
LONG = SETTINGS | {
    "max_model_len": 2048,
    "device_kv_tokens": 2100,
    "host_kv_tokens": 4096,
    "max_num_batched_tokens": 8,
    "prefix_cache": False,
}


@contextmanager
def occupied_cpu(address: str) -> Iterator[None]:
    """Takes a CPU of the head, so that the ranks of an engine that starts meanwhile do not fit on it."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        assert placement_group([{"CPU": 1, "node:__internal_head__": 0.001}]).wait(120)
        yield
    finally:
        ray.shutdown()


def raylet_of(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def stores_of(cluster: Cluster) -> list[set[str]]:
    """Returns the inodes of the host stores that processes of each node have mapped."""
    found = []
    for node in cluster.list_all_nodes():
        pids = descendants_of(raylet_of(node))
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        found.append({inode for text in maps for inode in re.findall(r"(\d+) +/memfd:hotset-kv", text)})
    return found


async def start(model: str, address: str, role: str, settings: dict[str, Any]) -> EngineClient:
    """Starts an engine. Prefill engines have two tensor parallel ranks, decode engines two data parallel ones."""
    split = {"tensor_parallel_size": 2} if role == "prefill" else {"data_parallel_size": 2}
    settings = {name: value for name, value in settings.items() if name != "progress"}
    config = EngineConfig(model=model, role=role, executor="ray", ray_address=address, **settings, **split)
    client = await asyncio.to_thread(EngineClient.start, config, EngineProcess(config))
    client.listen()
    return client


async def answer(decode: EngineClient, prefill: EngineClient, number: int, prompt: list[int]) -> list[int]:
    options = RequestOptions(landing=LANDINGS[number % 3], prefill_at=prefill.control)
    deltas = decode.generate(f"request {number}", prompt, params_of(number), options)
    return [token async for delta in deltas for token in delta.token_ids]


def answers_of_one_process(model: str, prompts: list[list[int]], settings: dict[str, Any]) -> list[list[int]]:
    with LLM(model, **settings) as single:
        params = [params_of(number) for number in range(len(prompts))]
        outputs = single.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("family", ["sparse", "dense"])
def test_contexts_of_tp2_land_in_dp2_on_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The ranks of a dense prefill engine have one of two KV heads each, and those of a decode engine have both."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # no shared memory between processes
    model = sparse_model(tmp_path) if family == "sparse" else tiny_directory(tmp_path, **DENSE_MODEL)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    prompts = [[rng.randrange(60) for _ in range(length)] for length in LENGTHS]
    expected = answers_of_one_process(model, prompts, SETTINGS)

    async def scenario(cluster: Cluster) -> list[int]:
        clients, address = list[EngineClient](), cluster.address
        try:
            with occupied_cpu(address):
                clients.append(await start(model, address, "prefill", SETTINGS))
            clients.append(await start(model, address, "decode", SETTINGS))
            prefill, decode = clients
            stores = stores_of(cluster)
            assert sorted(map(len, stores)) == [1, 1, 2], "each engine has a store on the head and one on another node"
            assert len(set().union(*stores)) == 4, "nodes share memory"
            requests = [answer(decode, prefill, number, prompt) for number, prompt in enumerate(prompts)]
            assert await asyncio.gather(*requests) == expected, f"seed {seed}"
            stats: Any = await decode.stats()
            assert (stats.landed, stats.lost, stats.quarantined_pages) == (len(prompts), 0, 0)
            return [pid for client in clients if (pid := client._process.pid) is not None]
        finally:
            await asyncio.gather(*(client.close(0.0) for client in clients))

    with simulated_nodes([2, 1, 1]) as cluster:
        wait_until_ended(asyncio.run(scenario(cluster)))


def workers_on(cluster: Cluster) -> set[int]:
    """Returns the processes of all workers."""
    pids = [pid for node in cluster.list_all_nodes() for pid in descendants_of(raylet_of(node))]
    return {pid for pid in pids if b"WorkerStub" in command_line(pid)}


def holds_nothing(stats: EngineStats) -> bool:
    assert stats.handoff is not None
    held = stats.device_pages_held + stats.host_pages_held + stats.quarantined_pages
    return held == stats.running == stats.waiting == stats.handoff.num_open == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost_role", ["prefill", "decode"])
def test_a_worker_is_lost_while_a_context_lands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_role: str, how: signal.Signals
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    model = sparse_model(tmp_path)
    prompts = [LONG_PROMPT, LONG_PROMPT[:30]]
    expected = answers_of_one_process(model, prompts, LONG)

    async def scenario(cluster: Cluster) -> None:
        clients, address, of_role = dict[str, EngineClient](), cluster.address, dict[str, set[int]]()
        try:
            with occupied_cpu(address):
                clients["prefill"] = await start(model, address, "prefill", LONG)
            of_role["prefill"] = workers_on(cluster)
            clients["decode"] = await start(model, address, "decode", LONG)
            of_role["decode"] = workers_on(cluster) - of_role["prefill"]
            prefill, decode = clients["prefill"], clients["decode"]
            assert await answer(decode, prefill, 1, prompts[1]) == expected[1]
            landed = await prefill.stats()
            interrupted = asyncio.create_task(answer(decode, prefill, 0, prompts[0]))
            await wait_until(prefill, lambda stats: stats.handoff.nbytes > landed.handoff.nbytes)
            os.kill(random.choice(sorted(of_role[lost_role])), how)
            lost_at = time.monotonic()
            lost, other = (prefill, decode) if lost_role == "prefill" else (decode, prefill)
            while lost.failure is None:
                assert time.monotonic() - lost_at < 60
                await asyncio.sleep(0.01)
            noticed = time.monotonic() - lost_at
            with pytest.raises(HandoffLost if lost_role == "prefill" else EngineStopped):
                await interrupted
            assert (await wait_until(other, holds_nothing)).handed_off <= 1
            await asyncio.sleep(AUDIT_AFTER_IDLE_S + 0.3)
            other.check()  # it has audited itself, and found no flaw
            await lost.close(0.0)
            clients[lost_role] = await start(model, address, lost_role, LONG)
            again = [answer(clients["decode"], clients["prefill"], number, prompts[number]) for number in (0, 1)]
            assert await asyncio.gather(*again) == expected
            served = time.monotonic() - lost_at
            print(f"noticed after {noticed:.1f} s, served again after {served:.1f} s", file=sys.stderr)
            assert noticed < 10 and served < 90
        finally:
            await asyncio.gather(*(client.close(0.0) for client in clients.values()))

    with simulated_nodes([2, 1, 1]) as cluster:
        asyncio.run(scenario(cluster))
