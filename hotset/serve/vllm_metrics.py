"""The metrics of vLLM that tools scrape, derived from Hotset's own at each scrape.

Names, types, labels and buckets are those of vLLM 0.11 and later. docs/api.md lists the tools.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM ends this list at the model's context length.
TOKEN_BUCKETS = tuple(float(digit * 10**exponent) for exponent in range(7) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """One metric of vLLM: the sum of one or more of ours, with the same type."""

    name: str
    help: str
    sources: tuple[str, ...]
    buckets: tuple[float, ...] = ()  # of a histogram; ours has these and perhaps more


VLLM_METRICS = (
    VllmMetric("num_requests_running", "Requests that are being prefilled or decoded.", ("hotset_requests_running",)),
    VllmMetric("num_requests_waiting", "Requests in the queue.", ("hotset_requests_waiting", "hotset_requests_parked")),
    VllmMetric("kv_cache_usage_perc", "Share of the KV memory in use; 1 is all of it.", ("hotset_kv_usage",)),
    VllmMetric("num_preemptions", "Preemptions.", ("hotset_parks", "hotset_recomputes")),
    VllmMetric(
        "prompt_tokens",
        "Tokens prefilled or reused.",
        ("hotset_tokens_prefilled", "hotset_prefix_cache_tokens_reused"),
    ),
    VllmMetric("prompt_tokens_cached", "Tokens reused.", ("hotset_prefix_cache_tokens_reused",)),
    VllmMetric(
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        ("hotset_prefix_cache_tokens_queried",),
    ),
    VllmMetric("prefix_cache_hits", "Tokens found in the prefix cache.", ("hotset_prefix_cache_tokens_reused",)),
    VllmMetric("generation_tokens", "Tokens sampled.", ("hotset_tokens_generated",)),
    VllmMetric("request_success", "Finished requests by finish reason.", ("hotset_requests_finished",)),
    VllmMetric(
        "time_to_first_token_seconds",
        "Time from a request's submission to its first token.",
        ("hotset_time_to_first_token_seconds",),
        FIRST_TOKEN_BUCKETS,
    ),
    VllmMetric(
        "inter_token_latency_seconds", "Time between tokens.", ("hotset_inter_token_seconds",), INTER_TOKEN_BUCKETS
    ),
    VllmMetric(
        "e2e_request_latency_seconds",
        "Time from a request's submission to its last token.",
        ("hotset_request_seconds",),
        REQUEST_BUCKETS,
    ),
    VllmMetric(
        "request_prompt_tokens", "Prompt tokens of a request.", ("hotset_request_prompt_tokens",), TOKEN_BUCKETS
    ),
    VllmMetric(
        "request_generation_tokens",
        "Generated tokens of a request.",
        ("hotset_request_generation_tokens",),
        TOKEN_BUCKETS,
    ),
)
# Finish reasons that have another name in vLLM
FINISHED_REASONS = {"lost": "error", "no_room": "error", "structure": "error"}


def vllm_metrics(families: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yields the metrics of the table whose sources are among `families`."""
    by_name = {family.name: family for family in families}
    for metric in VLLM_METRICS:
        sources = [by_name[name] for name in metric.sources if name in by_name]
        if len(sources) == len(metric.sources):
            yield _derived(metric, sources, model_name)


def _derived(metric: VllmMetric, sources: list[Metric], model_name: str) -> Metric:
    name = f"vllm:{metric.name}"
    bounds = {*map(floatToGoString, metric.buckets), "+Inf"}
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for source in sources:
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            labels = {"model_name": model_name, "engine": "0", **sample.labels}
            if suffix == "_created" or labels.get("le", "+Inf") not in bounds:
                continue
            if "reason" in labels:
                reason = labels.pop("reason")
                labels["finished_reason"] = FINISHED_REASONS.get(reason, reason)
            sums[name + suffix, tuple(labels.items())] += sample.value
    derived = Metric(name, metric.help, sources[0].type)
    for (sample_name, label_items), value in sums.items():
        derived.add_sample(sample_name, dict(label_items), value)
    return derived
