"""Prometheus metrics of a router: counts of its own work, and the state of its workers at the time of a scrape."""

from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.fleet.router.fleet import ROLES, ChosenWorker, Fleet
from hotset.serve.access_log import HttpMetrics

OUTCOMES = ("completed", "rejected", "failed", "no_workers", "interrupted", "disconnected")
RETRY_REASONS = ("prefill_lost", "decode_lost")


class RouterMetrics(HttpMetrics):
    """The metrics of one router."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__("hotset_router")
        registry = self._registry
        self.requests = Counter(
            "hotset_router_requests",
            "Completion requests by outcome. interrupted: the stream ended with an error after its first byte. "
            "disconnected: the client closed the connection.",
            ("outcome",),
            registry=registry,
        )
        self.retries = Counter(
            "hotset_router_retries", "Attempts that failed and were retried, by reason.", ("reason",), registry=registry
        )
        self.choices = Counter(
            "hotset_router_choices",
            "Workers chosen for completion requests. prefix: the worker had the beginning of the prompt in its cache, "
            "as far as the router knew. load: it had not.",
            ("role", "by"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "hotset_router_prompt_tokens", "Estimated prompt tokens of attempts.", ("role",), registry=registry
        )
        self.cached_tokens = Counter(
            "hotset_router_cached_tokens",
            "Those of the prompt tokens that the chosen worker was expected to have in its cache.",
            ("role",),
            registry=registry,
        )
        self.first_byte_seconds = self._histogram(
            "hotset_router_upstream_first_byte_seconds",
            "Time from the start of an attempt to the first byte of its response.",
        )
        self.upstream_seconds = self._histogram(
            "hotset_router_upstream_seconds", "Time from the start of an attempt to the last byte of its response."
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in RETRY_REASONS:
            self.retries.labels(reason)
        for role in ROLES:
            for by in ("prefix", "load"):
                self.choices.labels(role, by)
            self.prompt_tokens.labels(role)
            self.cached_tokens.labels(role)
        registry.register(_WorkerCollector(fleet))

    def count_choice(self, choice: ChosenWorker, tokens: int) -> None:
        """Counts the choice of a worker for a prompt of `tokens` tokens."""
        role = choice.worker.role
        self.choices.labels(role, "prefix" if choice.cached_tokens else "load").inc()
        self.prompt_tokens.labels(role).inc(tokens)
        self.cached_tokens.labels(role).inc(min(tokens, choice.cached_tokens))

    def render(self) -> bytes:
        """Returns the text of one scrape."""
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        workers = self._fleet.workers
        by_state = GaugeMetricFamily("hotset_router_workers", "Workers by role and state.", labels=("role", "state"))
        for role in ROLES:
            up = len(self._fleet.up(role))
            by_state.add_metric((role, "up"), up)
            by_state.add_metric((role, "down"), sum(worker.role == role for worker in workers) - up)
        yield by_state
        labels = ("role", "worker")
        requests = GaugeMetricFamily("hotset_router_requests_in_flight", "Requests in flight.", labels=labels)
        tokens = GaugeMetricFamily(
            "hotset_router_tokens_in_flight", "Estimated prompt tokens of the requests in flight.", labels=labels
        )
        for worker in workers:
            requests.add_metric((worker.role, worker.url), worker.requests)
            tokens.add_metric((worker.role, worker.url), worker.tokens)
        yield requests
        yield tokens
