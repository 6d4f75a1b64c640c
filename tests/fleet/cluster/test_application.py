"""An application on a real Ray cluster of one node reports its load."""

import re
from pathlib import Path

import plain_http
import pytest
import ray
from engine.ray_nodes import sparse_model
from simulated import RAY_WARNINGS, simulated_cluster, spec_of, wait_for
from traffic import LONG_PROMPTS, Traffic, expected_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]
MEASURES = ("requests_running", "requests_waiting", "tokens_waiting", "kv_usage", "tier_pressure")
LOADED = {  # flags of engines that a few clients load: many steps for a prompt, and room for one of them on the device
    "load-format": "dummy",
    "max-num-batched-tokens": 16,
    "max-num-seqs": 6,
    "host-kv-tokens": 16384,
    "prefix-cache": False,
}


def exported_by_ray(measure: str, label: str) -> dict[str, float]:
    """Returns the newest values of a metric that the node exports to Prometheus, by a label."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    pattern = rf'^ray_hotset_cluster_{measure}{{.*\b{label}="([^"]+)".*}} (\S+)$'
    text = plain_http.get(url, timeout=30).text
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


def exported_by(engine: str) -> dict[str, float]:
    text = plain_http.get(f"{engine}/metrics", timeout=30).text
    return {measure: float(re.findall(rf"^hotset_{measure} (\S+)$", text, re.MULTILINE)[0]) for measure in MEASURES}


def test_ray_and_the_engines_export_the_load(tmp_path: Path) -> None:
    spec = spec_of(sparse_model(tmp_path), flags=LOADED)
    with simulated_cluster(cpus=1) as cluster:
        cluster.up(spec)
        cluster.wait_until_complete()
        (prefill,), (decode,) = cluster.members("prefill"), cluster.members("decode")
        traffic = Traffic(expected_tokens(decode["url"], LONG_PROMPTS), LONG_PROMPTS)
        busy = {"tokens_waiting": prefill, "requests_waiting": prefill, "kv_usage": decode, "tier_pressure": decode}
        with traffic.running(lambda: cluster.url, clients=12):
            for measure, engine in busy.items():
                wait_for(lambda m=measure, e=engine: exported_by(e["url"])[m] > 0, f"{measure} of an engine")
                wait_for(lambda m=measure, e=engine: exported_by_ray(m, "engine").get(e["name"], 0) > 0, measure)
        assert traffic.failures == {}, traffic.details
        idle = {prefill["name"]: 0.0, decode["name"]: 0.0}
        for measure in MEASURES:
            wait_for(lambda m=measure: exported_by_ray(m, "engine") == idle, f"{measure} of idle engines")
        assert exported_by_ray("processes", "role").keys() == {"prefill", "decode", "router"}
        cluster.down()
