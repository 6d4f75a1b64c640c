"""Measures what a step costs beyond its computation: workers as actors of a Ray cluster against worker processes.

    python benchmarks/ray_step_overhead.py --json ray_step_overhead.json

Two engines with two tensor parallel workers each execute plans without tokens, so that a step consists of sending plans
and receiving reports. The engines take turns. The nodes of the Ray cluster are simulated on this machine, so the
network costs only what loopback does. Bar (required result): the median step is at most 0.3 ms longer with Ray.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from ray.cluster_utils import Cluster
from report import make_parser, report

from hotset import LLM
from hotset.engine.workers.executor import Executor
from hotset.schedule.plan import Plan

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SETTINGS = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 128, "tensor_parallel_size": 2}
OBJECT_STORE_BYTES = 80 << 20
WARM_UP_STEPS = 50


def step_seconds(executor: Executor, number: int) -> float:
    start = time.perf_counter()
    executor.submit([Plan(number, (), (), (), (), ())]).results()
    return time.perf_counter() - start


def measure(steps: int) -> dict[str, list[float]]:
    """Returns the seconds of each step, by the executor."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    head = {**node, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}  # like other processes
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            with (
                LLM(folder, **SETTINGS, progress=False) as processes,
                LLM(folder, **SETTINGS, progress=False, executor="ray", ray_address=cluster.address) as actors,
            ):
                engines = {"processes": processes._engine.executor, "ray": actors._engine.executor}
                seconds: dict[str, list[float]] = {name: [] for name in engines}
                for number in range(WARM_UP_STEPS + steps):
                    for name, executor in engines.items():
                        seconds[name].append(step_seconds(executor, number))
                return {name: times[WARM_UP_STEPS:] for name, times in seconds.items()}
    finally:
        cluster.shutdown()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each engine")
    options = parser.parse_args()
    seconds = measure(options.steps)
    rows = [
        {
            "executor": name,
            "median ms": statistics.median(times) * 1e3,
            "p90 ms": sorted(times)[int(len(times) * 0.9)] * 1e3,
        }
        for name, times in seconds.items()
    ]
    difference = rows[1]["median ms"] - rows[0]["median ms"]
    notes = f"a step takes {difference:.2f} ms longer with Ray (bar: 0.3 ms)"
    report("Steps without tokens, two tensor parallel workers", rows, options.json, notes)


if __name__ == "__main__":
    main()
