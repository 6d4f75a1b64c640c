"""Figures of speculative decoding during a load, from the counters in Hotset's /metrics."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

VERIFIED, ACCEPTED = "hotset_drafts_verified_total", "hotset_drafts_accepted_total"
MISSES, GENERATED = "hotset_slot_misses_total", "hotset_tokens_generated_total"
SAMPLE = re.compile(r'(\w+)(?:\{\w+="(\d+)"\})? ([\d.e+]+)')

Counters = Mapping[tuple[str, str], float]  # (name, value of its label, which may be empty) -> count


def read_counters(scrape: str) -> Counters:
    """Returns the counters of drafts and swap-in in the text of /metrics. Other servers than Hotset have none."""
    samples = (SAMPLE.fullmatch(line) for line in scrape.splitlines())
    found = [sample.groups("") for sample in samples if sample is not None]
    wanted = (VERIFIED, ACCEPTED, MISSES, GENERATED)
    return {(name, label): float(count) for name, label, count in found if name in wanted}


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Drafts that were verified and accepted during a load."""

    verified: tuple[int, ...]  # one count for each position among the drafts of a step
    accepted: tuple[int, ...]  # the same
    rows_fetched_per_token: float  # rows copied from the host for each token of an answer; each index group counts

    @classmethod
    def between(cls, before: Counters, after: Counters) -> "DraftFigures | None":
        """Returns the figures of the time between two scrapes, or None if nothing was drafted."""

        def added(name: str) -> dict[str, int]:
            return {label: int(count - before.get((n, label), 0)) for (n, label), count in after.items() if n == name}

        verified, accepted = added(VERIFIED), added(ACCEPTED)
        places = [str(place) for place in range(1, len(verified) + 1)]
        if not sum(verified.values()):
            return None
        return cls(
            verified=tuple(verified.get(place, 0) for place in places),
            accepted=tuple(accepted.get(place, 0) for place in places),
            rows_fetched_per_token=sum(added(MISSES).values()) / max(1, sum(added(GENERATED).values())),
        )

    @property
    def accepted_length(self) -> float:
        """The mean number of tokens that a step with drafts adds to an answer."""
        return 1 + sum(self.accepted) / max(1, self.verified[0])

    def __str__(self) -> str:
        shares = (f"{a / v:.0%}" for a, v in zip(self.accepted, self.verified, strict=True) if v)
        return (
            f"drafts: {sum(self.accepted)} of {sum(self.verified)} accepted (by place: {', '.join(shares)}), "
            f"{self.accepted_length:.2f} tokens per step with drafts, "
            f"{self.rows_fetched_per_token:.1f} rows fetched from the host per token"
        )
