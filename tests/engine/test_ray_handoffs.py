"""Handoffs over NIXL between engines whose workers are on different simulated nodes of a Ray cluster."""

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from engine.ray_nodes import SETTINGS, simulated_nodes, sparse_model
from processes import descendants_of, wait_until_ended
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from hotset import LLM, SamplingParams
from hotset.base.config import EngineConfig
from hotset.engine.client import EngineClient
from hotset.engine.process import EngineProcess

pytest.importorskip("nixl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 3, 4, 5, 16, 25, 30, 33)
LANDINGS = ("host", "device", "auto")


@contextmanager
def occupied_cpu(address: str) -> Iterator[None]:
    """Takes a CPU of the head, so that the ranks of an engine that starts meanwhile do not fit on it."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        assert placement_group([{"CPU": 1, "node:__internal_head__": 0.001}]).wait(120)
        yield
    finally:
        ray.shutdown()


def stores_of(cluster: Cluster) -> list[set[str]]:
    """Returns the inodes of the host stores that processes of each node have mapped."""
    found = []
    for node in cluster.list_all_nodes():
        pids = descendants_of(node.all_processes["raylet"][0].process.pid)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        found.append({inode for text in maps for inode in re.findall(r"(\d+) +/memfd:hotset-kv", text)})
    return found


def start(model: str, address: str, role: str, **split: int) -> EngineClient:
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    config = EngineConfig(model=model, role=role, executor="ray", ray_address=address, **settings, **split)
    return EngineClient.start(config, EngineProcess(config))


async def answer(decode: EngineClient, prefill: EngineClient, number: int, prompt: list[int]) -> list[int]:
    deltas = decode.generate(
        f"request {number}", prompt, params_of(number), prefill_at=prefill.control, landing=LANDINGS[number % 3]
    )
    return [token async for delta in deltas for token in delta.token_ids]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number, max_tokens=12, ignore_eos=True)


def test_contexts_of_tp2_land_in_dp2_on_other_nodes_with_the_tokens_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # no shared memory between processes
    model, seed = sparse_model(tmp_path), random.randrange(1 << 32)
    rng = random.Random(seed)
    prompts = [[rng.randrange(60) for _ in range(length)] for length in LENGTHS]
    params = [params_of(number) for number in range(len(prompts))]
    with LLM(model, **SETTINGS) as single:
        outputs = single.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        expected = [output.outputs[0].token_ids for output in outputs]

    async def scenario(cluster: Cluster) -> list[int]:
        clients, address = list[EngineClient](), cluster.address
        try:
            with occupied_cpu(address):
                clients.append(await asyncio.to_thread(start, model, address, "prefill", tensor_parallel_size=2))
            clients.append(await asyncio.to_thread(start, model, address, "decode", data_parallel_size=2))
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
