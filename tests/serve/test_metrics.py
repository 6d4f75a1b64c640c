"""Metrics of vLLM are derived from ours. They have the names, types, labels and buckets of vLLM, and our values. The
queries of the Grafana dashboard name metrics that exist.
"""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.engine.ports import HandoffStats
from hotset.fleet.router.metrics import RouterMetrics
from hotset.serve.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "hotset.json").read_text())
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
Scrape = dict[str, Metric]
STATS = EngineStats(
    running=3,
    waiting=5,
    parked=2,
    device_pages_held=40,
    device_pages_total=50,
    host_pages_held=25,
    host_pages_cached=60,
    host_pages_quarantined=5,
    host_pages_total=100,
    tokens_prefilled=1000,
    tokens_generated=200,
    tokens_queried=3000,
    tokens_reused=2500,
    pages_evicted=8,
    parks=4,
    recomputes=1,
    requests_finished={"stop": 7, "length": 2, "lost": 1, "no_room": 3},
)
VALUES = {  # type and value of each metric that is one number
    "vllm:num_requests_running": ("gauge", 3),
    "vllm:num_requests_waiting": ("gauge", 7),
    "vllm:kv_cache_usage_perc": ("gauge", 0.25),
    "vllm:num_preemptions": ("counter", 5),
    "vllm:prompt_tokens": ("counter", 3500),
    "vllm:prompt_tokens_cached": ("counter", 2500),
    "vllm:prefix_cache_queries": ("counter", 3000),
    "vllm:prefix_cache_hits": ("counter", 2500),
    "vllm:generation_tokens": ("counter", 200),
}
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
WHOLE = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
TOKENS = " ".join(f"{digit * 10**exponent}.0" for exponent in range(6) for digit in (1, 2, 5))
HISTOGRAMS = {  # vLLM's buckets (vllm/v1/metrics/loggers.py, August 2026), the attribute of Metrics, and our name
    "vllm:time_to_first_token_seconds": (FIRST, "first_token_seconds", "hotset_time_to_first_token_seconds"),
    "vllm:inter_token_latency_seconds": (BETWEEN, "inter_token_seconds", "hotset_inter_token_seconds"),
    "vllm:e2e_request_latency_seconds": (WHOLE, "choice_seconds", "hotset_request_seconds"),
    "vllm:request_prompt_tokens": (TOKENS, "prompt_tokens", "hotset_request_prompt_tokens"),
    "vllm:request_generation_tokens": (TOKENS, "generation_tokens", "hotset_request_generation_tokens"),
}


def scraped(metrics: Metrics, stats: EngineStats | None = STATS) -> Scrape:
    received = None if stats is None else ReceivedStats(stats, time.monotonic())
    families = list(text_string_to_metric_families(metrics.render(received, 0.0, 'a "model"').decode()))
    assert len({family.name for family in families}) == len(families), "no metric may occur twice"
    return {family.name: family for family in families}


def value(family: Metric, suffix: str = "", **labels: Any) -> float:
    (found,) = [
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    ]
    return found


def test_each_gauge_and_counter_of_vllm_has_its_type_and_our_value() -> None:
    families = scraped(Metrics())
    for name, (kind, expected) in VALUES.items():
        assert families[name].type == kind
        assert value(families[name], "_total" if kind == "counter" else "") == expected
    finished = families["vllm:request_success"]
    assert finished.type == "counter"
    counts = {sample.labels["finished_reason"]: sample.value for sample in finished.samples}
    assert counts == {"stop": 7, "length": 2, "abort": 0, "error": 4}


def test_the_prefix_cache_has_counters_and_every_host_page_is_in_one_state() -> None:
    families = scraped(Metrics())
    counted = {"tokens_queried": 3000, "tokens_reused": 2500, "pages_evicted": 8}
    assert {name: value(families[f"hotset_prefix_cache_{name}"], "_total") for name in counted} == counted
    states = {sample.labels["state"]: sample.value for sample in families["hotset_host_pages_by_state"].samples}
    assert states == {"free": 15, "cached": 60, "used": 20, "quarantined": 5}
    assert sum(states.values()) == value(families["hotset_host_pages_total"])


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_each_histogram_of_vllm_has_its_buckets_and_our_counts(name: str) -> None:
    buckets, attribute, source_name = HISTOGRAMS[name]
    metrics = Metrics()
    for observed in (0.0004, 0.003, 0.3, 0.3, 3.0, 33.0, 1e9):
        getattr(metrics, attribute).observe(observed)
    families = scraped(metrics)
    family, source = families[name], families[source_name]
    assert family.type == source.type == "histogram"
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    # vLLM ends the buckets of tokens at the model's context length; ours go on to 5 million.
    assert bounds[: len(buckets.split())] == buckets.split() and bounds[-1] == "+Inf"
    assert len(bounds) == len(buckets.split()) + (4 if buckets == TOKENS else 1)
    for bound in bounds:
        expected = sum(observed <= float(bound) for observed in (0.0004, 0.003, 0.3, 0.3, 3.0, 33.0, 1e9))
        assert value(family, "_bucket", le=bound) == value(source, "_bucket", le=bound) == expected
    assert value(family, "_count") == 7 and value(family, "_sum") == value(source, "_sum")


def test_every_sample_names_the_model_and_the_engine() -> None:
    families = scraped(Metrics())
    samples = [sample for name, family in families.items() if name.startswith("vllm:") for sample in family.samples]
    assert len(samples) > 50
    assert all({"model_name": 'a "model"', "engine": "0"}.items() <= sample.labels.items() for sample in samples)


def test_with_tiers_off_the_usage_is_that_of_the_device_pool() -> None:
    stats = EngineStats(device_pages_held=40, device_pages_total=50)
    assert value(scraped(Metrics(), stats)["vllm:kv_cache_usage_perc"]) == 0.8


def test_without_statistics_only_what_the_server_measures_is_shown() -> None:
    names = {name for name in scraped(Metrics(), None) if name.startswith("vllm:")}
    assert names == set(HISTOGRAMS)


def sample_names() -> set[str]:
    handoff = HandoffStats(
        outcomes={"done": 1}, num_open=0, num_peers=0, nbytes=0, throughput=None, phase_seconds={}, num_retransmits=0,
        dropped={},
    )  # fmt: skip
    stats = EngineStats(slot_lookups={0: 1}, slot_misses={0: 1}, handoff=handoff)
    fleet: Any = SimpleNamespace(workers=[], up=lambda role: [])
    texts = (Metrics().render(ReceivedStats(stats, time.monotonic()), 0.0, "m"), RouterMetrics(fleet).render())
    families = [family for text in texts for family in text_string_to_metric_families(text.decode())]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_every_query_names_metrics_that_exist() -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    used = {name for query in queries for name in re.findall(r"\bhotset_\w+", query)}
    assert len(queries) > 30 and len(used) > 25
    assert used <= sample_names(), f"there are no metrics {used - sample_names()}"
    assert all(query.count("(") == query.count(")") and query.count("{") == query.count("}") for query in queries)


def test_panels_do_not_overlap_and_have_different_ids() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
