"""Prometheus metrics of a router: what it did, and what its workers look like at the moment of a scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.serve.router.fleet import ROLES, Fleet

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OUTCOMES = ("answered", "refused", "failed", "no_workers", "cut", "left")
RETRIES = ("prefill_lost", "decode_lost")


class RouterMetrics:
    """In a registry of their own: two routers in one process do not mix."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = registry = CollectorRegistry()
        self.http_requests = Counter(
            "hotset_router_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "hotset_router_http_request_seconds",
            "From a request's arrival to the last byte of its answer.",
            ("endpoint",),
            buckets=SECONDS,
            registry=registry,
        )
        self.requests = Counter(
            "hotset_router_requests",
            "Generating requests by how they ended; cut: after the first byte, left: by the client.",
            ("outcome",),
            registry=registry,
        )
        self.retries = Counter(
            "hotset_router_retries",
            "Attempts that another one followed, by what failed.",
            ("reason",),
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "hotset_router_upstream_first_byte_seconds",
            "From an attempt's start to the first byte of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self.upstream_seconds = Histogram(
            "hotset_router_upstream_seconds",
            "From an attempt's start to the last byte of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in RETRIES:
            self.retries.labels(reason)
        registry.register(_WorkerCollector(fleet))

    def render(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        workers = self._fleet.workers
        alive = GaugeMetricFamily(
            "hotset_router_workers", "Workers by role and whether they live.", labels=("role", "state")
        )
        for role in ROLES:
            up = len(self._fleet.up(role))
            alive.add_metric((role, "up"), up)
            alive.add_metric((role, "out"), sum(worker.role == role for worker in workers) - up)
        yield alive
        requests = GaugeMetricFamily(
            "hotset_router_requests_in_flight", "Requests under way.", labels=("role", "worker")
        )
        tokens = GaugeMetricFamily(
            "hotset_router_tokens_in_flight", "Prompt tokens of those, as estimated.", labels=("role", "worker")
        )
        for worker in workers:
            requests.add_metric((worker.role, worker.url), worker.requests)
            tokens.add_metric((worker.role, worker.url), worker.tokens)
        yield requests
        yield tokens
