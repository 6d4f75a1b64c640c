"""Prometheus metrics: what the HTTP side measures itself, and what the engine reports at the moment of a scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.engine.outputs import EngineStats
from hotset.handoff.agent import HandoffStats

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

GAUGES = {
    "running": ("hotset_requests_running", "Requests that take part in steps now."),
    "waiting": ("hotset_requests_waiting", "Requests that wait for a place."),
    "resident": ("hotset_requests_resident", "Running requests all of whose rows are on the device."),
    "tiered": ("hotset_requests_tiered", "Running requests whose rows are on the host, hot ones on the device."),
    "parked": ("hotset_requests_parked", "Requests that wait with their rows on the host."),
    "device_pages_held": ("hotset_device_pages_held", "Pages of the device pool that requests hold."),
    "device_pages_total": ("hotset_device_pages_total", "Pages of the device pool in all."),
    "host_pages_held": ("hotset_host_pages_held", "Pages of the host store that requests hold."),
    "host_pages_total": ("hotset_host_pages_total", "Pages of the host store in all."),
    "quarantined_pages": ("hotset_pages_quarantined", "Pages that a lost prefill worker might still write to."),
}
COUNTERS = {
    "tokens_generated": ("hotset_tokens_generated", "Tokens sampled."),
    "tokens_prefilled": ("hotset_tokens_prefilled", "Prompt tokens computed, recomputed ones included."),
    "demotions": ("hotset_demotions", "Resident requests that became tiered."),
    "promotions": ("hotset_promotions", "Tiered requests that became resident."),
    "parks": ("hotset_parks", "Requests that gave up their device pages and kept their rows on the host."),
    "resumes": ("hotset_resumes", "Parked requests that came back."),
    "recomputes": ("hotset_recomputes", "Requests that gave up all their rows and were computed again."),
    "rows_flushed": ("hotset_rows_flushed", "Rows copied to the host, each counted once for all layers."),
    "bytes_swapped": ("hotset_bytes_swapped", "Bytes copied from the host into slots."),
    "steps": ("hotset_steps", "Steps computed."),
    "asked_again": ("hotset_handoff_retries", "Prompts asked of a prefill worker again, after they were lost."),
    "handed_over": ("hotset_prompts_handed_over", "Prompts computed for decode workers."),
}
HANDOFF_GAUGES = {
    "open": ("hotset_handoffs_open", "Handoffs whose end is not known to both sides."),
    "peers": ("hotset_handoff_peers", "Workers on which a handoff depends now."),
    "ring_quarantined": ("hotset_staging_bytes_quarantined", "Bytes of the ring that a lost writer may still write."),
}
HANDOFF_COUNTERS = {
    "nbytes": ("hotset_handoff_bytes", "Bytes of KV that landed here, or were written to decode workers."),
    "resent": ("hotset_handoff_messages_resent", "Control messages that had to be said again."),
    "pieces": ("hotset_staging_pieces", "Pieces of contexts that were packed or unpacked here."),
}
HANDOFF_LABELLED = {
    "outcomes": ("hotset_handoffs", "Handoffs ended, by outcome.", "outcome"),
    "seconds": ("hotset_handoff_phase_seconds", "Time that handoffs have spent in each phase.", "phase"),
    "dropped": ("hotset_handoff_messages_dropped", "Control messages dropped, by cause.", "cause"),
}
LAYER_COUNTERS = {
    "slot_lookups": ("hotset_slot_lookups", "Positions looked up in hot slots, by the layer whose indexer chose them."),
    "slot_misses": ("hotset_slot_misses", "Those that were not there and came from the host."),
}


class Metrics:
    """The server's own measurements, in a registry of their own: two servers in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "hotset_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.request_seconds = Histogram(
            "hotset_http_request_seconds",
            "From a request's arrival to the last byte of its answer.",
            ("endpoint",),
            buckets=REQUEST_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "hotset_time_to_first_token_seconds",
            "From a request's admission to its first token.",
            buckets=REQUEST_SECONDS,
            registry=self._registry,
        )
        self.inter_token_seconds = Histogram(
            "hotset_inter_token_seconds",
            "Between consecutive tokens of one choice.",
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )

    def render(self, stats: EngineStats | None) -> bytes:
        """The text of one scrape. `stats` is None when the engine is gone: its part is absent and `up` is 0."""
        scrape = CollectorRegistry()
        scrape.register(_EngineCollector(stats))
        return generate_latest(self._registry) + generate_latest(scrape)


class _EngineCollector(Collector):
    def __init__(self, stats: EngineStats | None) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hotset_engine_up", "1 while the engine answers.", value=int(self._stats is not None))
        if self._stats is None:
            return
        for field, (name, meaning) in GAUGES.items():
            yield GaugeMetricFamily(name, meaning, value=getattr(self._stats, field))
        for field, (name, meaning) in COUNTERS.items():
            yield CounterMetricFamily(name, meaning, value=getattr(self._stats, field))
        for field, (name, meaning) in LAYER_COUNTERS.items():
            by_layer = CounterMetricFamily(name, meaning, labels=("layer",))
            for layer, count in getattr(self._stats, field).items():
                by_layer.add_metric((str(layer),), count)
            yield by_layer
        finished = CounterMetricFamily("hotset_requests_finished", "Requests ended, by reason.", labels=("reason",))
        for reason, count in self._stats.requests_finished.items():
            finished.add_metric((reason,), count)
        yield finished
        if self._stats.handoff is not None:
            yield from _handoff_metrics(self._stats.handoff)


def _handoff_metrics(stats: HandoffStats) -> Iterator[Metric]:
    """Of prefill and decode workers alone."""
    for field, (name, meaning) in HANDOFF_GAUGES.items():
        yield GaugeMetricFamily(name, meaning, value=getattr(stats, field))
    for field, (name, meaning) in HANDOFF_COUNTERS.items():
        yield CounterMetricFamily(name, meaning, value=getattr(stats, field))
    for field, (name, meaning, label) in HANDOFF_LABELLED.items():
        family = CounterMetricFamily(name, meaning, labels=(label,))
        for key, value in getattr(stats, field).items():
            family.add_metric((key,), value)
        yield family
    if stats.throughput is not None:
        speed = stats.throughput.gb_per_s
        meaning = "GB/s written to decode workers since the start, over the time in which any write was under way."
        yield GaugeMetricFamily("hotset_transfer_gb_per_second", meaning, value=speed)
