"""Ray clusters whose nodes are processes of this machine, and a small sparse model to divide over them."""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import SPARSE_FIELDS, executor_of, tiny_directory
from ray.cluster_utils import Cluster

from hotset import LLM, SamplingParams

SPARSE_MODEL = SPARSE_FIELDS | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
# The pools are small, so requests are demoted and parked.
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float64",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "page_rows": 4,
    "device_kv_tokens": 96,
    "host_kv_tokens": 600,
    "progress": False,
}


def sparse_model(folder: Path) -> str:
    return tiny_directory(folder, **SPARSE_MODEL)


def answers(llm: LLM, seed: int) -> list[list[int]]:
    """Returns the answers to prompts that `seed` determines."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(60) for _ in range(rng.choice([1, 7, 16, 25, 30]))] for _ in range(7)]
    params = [
        SamplingParams(temperature=0.8 if n % 2 else 0.0, seed=n, max_tokens=20, ignore_eos=True) for n in range(7)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def simulated_nodes(cpus: Sequence[int], environments: Sequence[dict[str, str]] = ()) -> Iterator[Cluster]:
    """Starts a node with each of these numbers of CPUs. `environments` are additional variables of the last nodes."""
    options: dict[str, Any] = {
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
        "_system_config": {"worker_niceness": 0},  # Ray's default is 15, with which workers starve on a busy machine
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **options})
        try:
            extra = [{}] * (len(cpus) - 1 - len(environments)) + [*environments]
            for count, variables in zip(cpus[1:], extra, strict=True):
                cluster.add_node(num_cpus=count, object_store_memory=80 << 20, env_vars=variables)
            yield cluster
        finally:
            cluster.shutdown()


def stores_by_node(llm: LLM) -> dict[str, set[str]]:
    """Returns the inodes of the host stores that the workers of each node have mapped, as the kernel shows them."""
    stores: dict[str, set[str]] = {}
    for worker in executor_of(llm).workers:
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
        found = set(re.findall(r"(\d+) +/memfd:hotset-kv", maps))
        assert found, f"{worker.rank.name} has no host store"
        stores.setdefault(worker.rank.node, set()).update(found)
    return stores
