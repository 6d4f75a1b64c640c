"""Prometheus metrics: measurements of the HTTP server, and the engine's statistics at the time of a scrape."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.engine.ports import HandoffStats
from hotset.schedule.request import FinishReason
from hotset.serve.access_log import SECONDS_BUCKETS
from hotset.serve.vllm_metrics import (
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    vllm_metrics,
)

# Each histogram that vLLM has too has vLLM's buckets, so that vLLM's can be derived from it.
MAX_NEWEST = 1024  # newest latencies of one kind that are kept
TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, *INTER_TOKEN_BUCKETS)

# Each table maps fields of EngineStats or HandoffStats to a metric: name, help text and, in HANDOFF_LABELLED, label.
GAUGES = {
    "running": ("hotset_requests_running", "Requests that are being prefilled or decoded."),
    "waiting": ("hotset_requests_waiting", "Requests in the queue that are not parked."),
    "tokens_to_prefill": (
        "hotset_tokens_waiting",
        "Tokens of waiting, parked and prefilling requests that this engine has yet to compute.",
    ),
    "resident": ("hotset_requests_resident", "Running requests with all KV rows on the device."),
    "tiered": ("hotset_requests_tiered", "Running requests with KV rows on the host and the hot ones on the device."),
    "parked": ("hotset_requests_parked", "Preempted requests with all KV rows on the host."),
    "device_pages_held": ("hotset_device_pages_held", "Pages of the device pool in use."),
    "device_pages_total": ("hotset_device_pages_total", "Total pages of the device pool."),
    "host_pages_held": ("hotset_host_pages_held", "Pages of the host store in use."),
    "host_pages_total": ("hotset_host_pages_total", "Total pages of the host store."),
    "kv_usage": (
        "hotset_kv_usage",
        "Share of the KV memory in use, from 0 to 1: of the host store, or with --tiers off of the device pool.",
    ),
    "tier_pressure": (
        "hotset_tier_pressure",
        "Share of the admitted requests that are tiered or parked, from 0 to 1.",
    ),
    "quarantined_pages": ("hotset_pages_quarantined", "Pages that a lost prefill worker may still write to."),
}
COUNTERS = {
    "tokens_generated": ("hotset_tokens_generated", "Tokens sampled."),
    "tokens_prefilled": ("hotset_tokens_prefilled", "Tokens prefilled, including those that are recomputed."),
    "tokens_queried": (
        "hotset_prefix_cache_tokens_queried",
        "Tokens of admitted requests that were looked up in the prefix cache.",
    ),
    "tokens_reused": (
        "hotset_prefix_cache_tokens_reused",
        "Tokens that were found in the prefix cache, and therefore not computed.",
    ),
    "pages_evicted": (
        "hotset_prefix_cache_pages_evicted",
        "Pages that left the prefix cache because their memory was needed.",
    ),
    "demotions": ("hotset_demotions", "Resident requests that became tiered."),
    "promotions": ("hotset_promotions", "Tiered requests that became resident."),
    "parks": ("hotset_parks", "Preemptions that kept the KV rows on the host."),
    "resumes": ("hotset_resumes", "Parked requests that were resumed."),
    "recomputes": ("hotset_recomputes", "Preemptions that dropped the KV rows, to be recomputed."),
    "rows_mirrored": (
        "hotset_rows_mirrored",
        "KV rows copied from the device to the host; the rows of a token in all layers count as one.",
    ),
    "bytes_swapped": ("hotset_bytes_swapped", "Bytes copied from the host into hot buffers."),
    "steps": ("hotset_steps", "Steps computed."),
    "retries": ("hotset_handoff_retries", "Handoffs that were lost and retried."),
    "handed_off": ("hotset_prompts_handed_off", "Prompts computed for decode workers."),
    "extended": (
        "hotset_prompts_extended",
        "Prompts that a decode worker computed itself, because it had all but a short rest in its prefix cache.",
    ),
}
HANDOFF_GAUGES = {
    "num_open": ("hotset_handoffs_open", "Handoffs in progress."),
    "num_peers": ("hotset_handoff_peers", "Peers on which a handoff depends."),
    "ring_quarantined_bytes": (
        "hotset_staging_bytes_quarantined",
        "Bytes of the staging ring that a lost peer may still write.",
    ),
}
HANDOFF_COUNTERS = {
    "nbytes": ("hotset_handoff_bytes", "Bytes of KV received from prefill workers or sent to decode workers."),
    "num_retransmits": ("hotset_handoff_messages_retransmitted", "Control messages that were retransmitted."),
    "num_pieces": ("hotset_staging_pieces", "Pieces of KV packed into or unpacked from the staging ring."),
}
HANDOFF_LABELLED = {
    "outcomes": ("hotset_handoffs", "Finished handoffs by outcome.", "outcome"),
    "phase_seconds": ("hotset_handoff_phase_seconds", "Total time that handoffs have spent in each phase.", "phase"),
    "dropped": ("hotset_handoff_messages_dropped", "Dropped control messages by cause.", "cause"),
}
PLACE_COUNTERS = {
    "drafts_verified": (
        "hotset_drafts_verified",
        "Drafted tokens that were verified, by their place: 1 is the first draft of a step.",
    ),
    "drafts_accepted": ("hotset_drafts_accepted", "Drafted tokens that were accepted, by their place."),
}
LAYER_COUNTERS = {
    "slot_lookups": (
        "hotset_slot_lookups",
        "Positions looked up in hot buffers, by the layer whose indexer selected them.",
    ),
    "slot_misses": (
        "hotset_slot_misses",
        "Positions looked up that were missing and were copied from the host, by layer.",
    ),
}


class Metrics:
    """The metrics of one server, in its own registry, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # For the live page, which empties them.
        self.newest_first_token_seconds: deque[float] = deque(maxlen=MAX_NEWEST)
        self.newest_inter_token_seconds: deque[float] = deque(maxlen=MAX_NEWEST)
        self.http_requests = Counter(
            "hotset_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.request_seconds = Histogram(
            "hotset_http_request_seconds",
            "Time from a request's arrival to the last byte of its response.",
            ("endpoint",),
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "hotset_time_to_first_token_seconds",
            "Time from a request's submission to its first token.",
            buckets=sorted({*SECONDS_BUCKETS, *FIRST_TOKEN_BUCKETS}),
            registry=self._registry,
        )
        self.inter_token_seconds = Histogram(
            "hotset_inter_token_seconds",
            "Time between tokens of one choice. If several tokens arrive together, the time since the previous ones is "
            "divided by their number and counted once.",
            buckets=TOKEN_SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.choice_seconds = Histogram(
            "hotset_request_seconds",
            "Time from a request's submission to the end of each of its choices.",
            buckets=REQUEST_BUCKETS,
            registry=self._registry,
        )
        self.prompt_tokens = Histogram(
            "hotset_request_prompt_tokens",
            "Prompt tokens of each choice that has ended.",
            buckets=TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.generation_tokens = Histogram(
            "hotset_request_generation_tokens",
            "Generated tokens of each choice that has ended.",
            buckets=TOKEN_BUCKETS,
            registry=self._registry,
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

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine_metrics(received: ReceivedStats | None, seconds_without_progress: float | None) -> Iterator[Metric]:
    is_up = seconds_without_progress is not None
    yield GaugeMetricFamily("hotset_engine_up", "1 if the engine process runs and advances, else 0.", value=int(is_up))
    if seconds_without_progress is None:
        return
    help = "Time without a sign of life of the engine, or without progress of its step."
    yield GaugeMetricFamily("hotset_engine_seconds_without_progress", help, value=seconds_without_progress)
    if received is not None:
        yield from _stats_metrics(received)


def _stats_metrics(received: ReceivedStats) -> Iterator[Metric]:
    stats = received.stats
    help = "Age of the engine's statistics, which it sends between steps."
    yield GaugeMetricFamily("hotset_engine_stats_age_seconds", help, value=received.age_seconds)
    for field, (name, help) in GAUGES.items():
        yield GaugeMetricFamily(name, help, value=getattr(stats, field))
    yield _host_pages(stats)
    for field, (name, help) in COUNTERS.items():
        yield CounterMetricFamily(name, help, value=getattr(stats, field))
    for label, table in (("layer", LAYER_COUNTERS), ("place", PLACE_COUNTERS)):
        for field, (name, help) in table.items():
            labelled = CounterMetricFamily(name, help, labels=(label,))
            for key, count in getattr(stats, field).items():
                labelled.add_metric((str(key),), count)
            yield labelled
    finished = CounterMetricFamily(
        "hotset_requests_finished", "Finished requests by finish reason.", labels=("reason",)
    )
    for reason in get_args(FinishReason):
        finished.add_metric((reason,), stats.requests_finished.get(reason, 0))
    yield finished
    if stats.handoff is not None:
        yield from _handoff_metrics(stats.handoff)


def _host_pages(stats: EngineStats) -> Metric:
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


def _handoff_metrics(stats: HandoffStats) -> Iterator[Metric]:
    """Yields the metrics that only prefill and decode workers have."""
    for field, (name, help) in HANDOFF_GAUGES.items():
        yield GaugeMetricFamily(name, help, value=getattr(stats, field))
    for field, (name, help) in HANDOFF_COUNTERS.items():
        yield CounterMetricFamily(name, help, value=getattr(stats, field))
    for field, (name, help, label) in HANDOFF_LABELLED.items():
        family = CounterMetricFamily(name, help, labels=(label,))
        for key, value in getattr(stats, field).items():
            family.add_metric((key,), value)
        yield family
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
