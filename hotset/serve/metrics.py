"""Prometheus metrics: measurements of the HTTP server, and the engine's statistics at the time of a scrape."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hotset.base.metric import Metric, metrics_of
from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.engine.ports import HandoffStats
from hotset.schedule.statistics import DERIVED_GAUGES
from hotset.serve.access_log import SECONDS_BUCKETS, HttpMetrics
from hotset.serve.vllm_metrics import (
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    vllm_metrics,
)

MAX_NEWEST = 1024  # newest latencies of one kind that are kept
# Histograms that vLLM also has include vLLM's buckets, so that vLLM's histograms can be derived from them.
TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, *INTER_TOKEN_BUCKETS)


class Metrics(HttpMetrics):
    """The metrics of one server."""

    def __init__(self) -> None:
        super().__init__("hotset")
        # The newest latencies. The live page reads and empties these queues.
        self.newest_first_token_seconds: deque[float] = deque(maxlen=MAX_NEWEST)
        self.newest_inter_token_seconds: deque[float] = deque(maxlen=MAX_NEWEST)
        self.first_token_seconds = self._histogram(
            "hotset_time_to_first_token_seconds",
            "Time from a request's submission to its first token.",
            sorted({*SECONDS_BUCKETS, *FIRST_TOKEN_BUCKETS}),
        )
        self.inter_token_seconds = self._histogram(
            "hotset_inter_token_seconds",
            "Time between tokens of one choice. If several tokens arrive together, the time since the previous ones is "
            "divided by their number and counted once.",
            TOKEN_SECONDS_BUCKETS,
        )
        self.choice_seconds = self._histogram(
            "hotset_request_seconds",
            "Time from a request's submission to the end of each of its choices.",
            REQUEST_BUCKETS,
        )
        self.prompt_tokens = self._histogram(
            "hotset_request_prompt_tokens", "Prompt tokens of each choice that has ended.", TOKEN_BUCKETS
        )
        self.generation_tokens = self._histogram(
            "hotset_request_generation_tokens", "Generated tokens of each choice that has ended.", TOKEN_BUCKETS
        )

    def observe_first_token(self, seconds: float) -> None:
        self.first_token_seconds.observe(seconds)
        self.newest_first_token_seconds.append(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        self.inter_token_seconds.observe(seconds)
        self.newest_inter_token_seconds.append(seconds)

    def render(self, received: ReceivedStats | None, seconds_without_progress: float | None, model_name: str) -> bytes:
        """Returns the text of one scrape.

        `received` are the newest statistics, if any have arrived. `seconds_without_progress` is None if the engine has
        ended or hangs; then `hotset_engine_up` is 0.
        """
        families = [*self._registry.collect(), *_engine_metrics(received, seconds_without_progress)]
        return generate_latest(_Scrape([*families, *vllm_metrics(families, model_name)]))


class _Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _engine_metrics(received: ReceivedStats | None, seconds_without_progress: float | None) -> Iterator[Family]:
    is_up = seconds_without_progress is not None
    yield GaugeMetricFamily("hotset_engine_up", "1 if the engine process runs and advances, else 0.", value=int(is_up))
    if seconds_without_progress is None:
        return
    help = "Time without a sign of life of the engine, or without progress of its step."
    yield GaugeMetricFamily("hotset_engine_seconds_without_progress", help, value=seconds_without_progress)
    if received is not None:
        yield from _stats_metrics(received)


def _stats_metrics(received: ReceivedStats) -> Iterator[Family]:
    stats = received.stats
    help = "Age of the engine's statistics, which it sends between steps."
    yield GaugeMetricFamily("hotset_engine_stats_age_seconds", help, value=received.age_seconds)
    for name, metric in (*metrics_of(stats, "gauge"), *DERIVED_GAUGES.items()):
        yield _family(metric, getattr(stats, name))
    yield _host_pages(stats)
    for name, metric in metrics_of(stats, "counter"):
        yield _family(metric, getattr(stats, name))
    if stats.handoff is not None:
        yield from _handoff_metrics(stats.handoff)


def _family(metric: Metric, value: Any) -> Family:
    if metric.kind == "gauge":
        return GaugeMetricFamily(metric.name, metric.help, value=value)
    if metric.label is None:
        return CounterMetricFamily(metric.name, metric.help, value=value)
    family = CounterMetricFamily(metric.name, metric.help, labels=(metric.label,))
    for label, count in (dict.fromkeys(metric.label_values, 0) | value).items():
        family.add_metric((str(label),), count)
    return family


def _host_pages(stats: EngineStats) -> Family:
    """Returns the pages of the host store by state. The states exclude each other, so the sum is the total."""
    family = GaugeMetricFamily(
        "hotset_host_pages_by_state",
        "Pages of the host store by state: free, cached (in the prefix cache, and no request uses them), used, "
        "quarantined.",
        labels=("state",),
    )
    free = stats.host_pages_total - stats.host_pages_held - stats.host_pages_cached
    family.add_metric(("free",), free)
    family.add_metric(("cached",), stats.host_pages_cached)
    family.add_metric(("used",), stats.host_pages_held - stats.host_pages_quarantined)
    family.add_metric(("quarantined",), stats.host_pages_quarantined)
    return family


def _handoff_metrics(stats: HandoffStats) -> Iterator[Family]:
    """Yields the metrics that only prefill and decode workers have."""
    for name, metric in (*metrics_of(stats, "gauge"), *metrics_of(stats, "counter")):
        yield _family(metric, getattr(stats, name))
    if stats.throughput is not None:
        speed = stats.throughput.gb_per_s
        help = "Mean speed of writes to decode workers since start-up, over the time in which a write was in flight."
        yield GaugeMetricFamily("hotset_transfer_gb_per_second", help, value=speed)
    help = "Speed of a large write between two kinds of memory, measured when the peer was connected."
    routes = GaugeMetricFamily("hotset_transfer_route_gb_per_second", help, labels=("peer", "source", "target"))
    for peer, measured in stats.routes.items():
        for route in measured:
            routes.add_metric((peer, route.source, route.target), route.gb_per_s)
    yield routes
