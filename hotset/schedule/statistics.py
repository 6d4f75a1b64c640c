"""The statistics of an engine. `/metrics`, sums over ranks and the table of ranks follow from their declarations."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_args

from hotset.base.metric import Metric, counter, gauge, labelled_counter
from hotset.schedule.request import FinishReason


@dataclass(slots=True)
class RankStats:
    """The state of one data parallel rank, and totals since its start.

    The parts of a scheduler count events in one object of this class. `Scheduler.stats` adds what only the queues and
    the ledger know. `Engine.stats` adds the copies, which workers count for all ranks together.
    """

    running: int = gauge("hotset_requests_running", "Requests that are being prefilled or decoded.", of_ranks=True)
    waiting: int = gauge("hotset_requests_waiting", "Requests in the queue that are not parked.", of_ranks=True)
    # A waiting request whose prompt a prefill worker computes does not count.
    tokens_to_prefill: int = gauge(
        "hotset_tokens_waiting",
        "Tokens of waiting, parked and prefilling requests that this engine has yet to compute.",
    )
    resident: int = gauge("hotset_requests_resident", "Running requests with all KV rows on the device.", of_ranks=True)
    tiered: int = gauge(
        "hotset_requests_tiered",
        "Running requests with KV rows on the host and the hot ones on the device.",
        of_ranks=True,
    )
    parked: int = gauge("hotset_requests_parked", "Preempted requests with all KV rows on the host.", of_ranks=True)
    device_pages_held: int = gauge("hotset_device_pages_held", "Pages of the device pool in use.", of_ranks=True)
    device_pages_total: int = gauge("hotset_device_pages_total", "Total pages of the device pool.", of_ranks=True)
    device_pages_quarantined: int = 0
    # Pages that requests use, and pages in quarantine
    host_pages_held: int = gauge("hotset_host_pages_held", "Pages of the host store in use.", of_ranks=True)
    host_pages_cached: int = 0  # pages of the prefix cache that no request uses
    host_pages_quarantined: int = 0
    host_pages_total: int = gauge("hotset_host_pages_total", "Total pages of the host store.", of_ranks=True)
    tokens_generated: int = counter("hotset_tokens_generated", "Tokens sampled.")
    tokens_prefilled: int = counter("hotset_tokens_prefilled", "Tokens prefilled, including those that are recomputed.")
    tokens_queried: int = counter(
        "hotset_prefix_cache_tokens_queried",
        "Tokens of admitted requests that were looked up in the prefix cache.",
    )
    tokens_reused: int = counter(
        "hotset_prefix_cache_tokens_reused",
        "Tokens that were found in the prefix cache, and therefore not computed.",
    )
    pages_evicted: int = counter(
        "hotset_prefix_cache_pages_evicted",
        "Pages that left the prefix cache because their memory was needed.",
    )
    demotions: int = counter("hotset_demotions", "Resident requests that became tiered.")
    promotions: int = counter("hotset_promotions", "Tiered requests that became resident.")
    parks: int = counter("hotset_parks", "Preemptions that kept the KV rows on the host.")
    resumes: int = counter("hotset_resumes", "Parked requests that were resumed.")
    recomputes: int = counter("hotset_recomputes", "Preemptions that dropped the KV rows, to be recomputed.")
    rows_mirrored: int = counter(
        "hotset_rows_mirrored",
        "KV rows copied from the device to the host; the rows of a token in all layers count as one.",
    )
    bytes_swapped: int = counter("hotset_bytes_swapped", "Bytes copied from the host into hot buffers.")
    steps: int = counter("hotset_steps", "Steps computed.")
    landed: int = 0  # prompts whose KV arrived from a prefill worker
    lost: int = 0  # landings that failed, including those that were retried, but not those that were cancelled
    retries: int = counter("hotset_handoff_retries", "Handoffs that were lost and retried.")
    handed_off: int = counter("hotset_prompts_handed_off", "Prompts computed for decode workers.")
    extended: int = counter(
        "hotset_prompts_extended",
        "Prompts that a decode worker computed itself, because it had all but a short rest in its prefix cache.",
    )
    slot_lookups: Counter[int] = field(
        default_factory=Counter,
        metadata=labelled_counter(
            "hotset_slot_lookups",
            "Positions looked up in hot buffers, by the layer whose indexer selected them.",
            "layer",
        ),
    )
    slot_misses: Counter[int] = field(
        default_factory=Counter,
        metadata=labelled_counter(
            "hotset_slot_misses",
            "Positions looked up that were missing and were copied from the host, by layer.",
            "layer",
        ),
    )
    drafts_verified: Counter[int] = field(
        default_factory=Counter,
        metadata=labelled_counter(
            "hotset_drafts_verified",
            "Drafted tokens that were verified, by their place: 1 is the first draft of a step.",
            "place",
        ),
    )
    drafts_accepted: Counter[int] = field(
        default_factory=Counter,
        metadata=labelled_counter(
            "hotset_drafts_accepted", "Drafted tokens that were accepted, by their place.", "place"
        ),
    )
    requests_finished: Counter[str] = field(
        default_factory=Counter,
        metadata=labelled_counter(
            "hotset_requests_finished", "Finished requests by finish reason.", "reason", get_args(FinishReason)
        ),
    )

    @property
    def kv_usage(self) -> float:
        """The share of the KV memory that requests use, or that is in quarantine."""
        # The host store has a page for every row; the device pool is its cache, and being full does not limit it.
        if self.host_pages_total:
            return self.host_pages_held / self.host_pages_total
        return self.device_pages_held / max(1, self.device_pages_total)

    @property
    def tier_pressure(self) -> float:
        """The share of the admitted requests that are tiered or parked, because the device has no room for them."""
        return (self.tiered + self.parked) / max(1, self.running + self.parked)

    @property
    def quarantined_pages(self) -> int:
        return self.device_pages_quarantined + self.host_pages_quarantined

    @classmethod
    def total(cls, parts: "Iterable[RankStats]") -> Self:
        """Returns the sums of all statistics. Labels whose count is 0 are kept."""
        total = cls()
        for part in parts:
            for name in STATISTICS:
                value, summed = getattr(part, name), getattr(total, name)
                if isinstance(value, Mapping):
                    for key, count in value.items():
                        summed[key] += count
                else:
                    setattr(total, name, summed + value)
        return total

    @property
    def of_rank(self) -> dict[str, int]:
        """The numbers that the live page shows for each data parallel rank."""
        return {name: getattr(self, name) for name, declared in STATISTICS.items() if declared.get("of_ranks")}


STATISTICS: Mapping[str, Mapping[str, Any]] = {declared.name: declared.metadata for declared in fields(RankStats)}
# Gauges that are computed from other statistics. Their keys are properties of RankStats.
DERIVED_GAUGES = {
    "kv_usage": Metric(
        "gauge",
        "hotset_kv_usage",
        "Share of the KV memory in use, from 0 to 1: of the host store, or with --tiers off of the device pool.",
    ),
    "tier_pressure": Metric(
        "gauge", "hotset_tier_pressure", "Share of the admitted requests that are tiered or parked, from 0 to 1."
    ),
    "quarantined_pages": Metric(
        "gauge", "hotset_pages_quarantined", "Pages that a lost prefill worker may still write to."
    ),
}
