"""Chooses the number of drafts from the measured times of steps and the measured acceptance of drafts.

A step that verifies n drafts of each request takes longer than one without, and adds 1 to n + 1 tokens. The number of
drafts with the most tokens per second is chosen. Larger batches get fewer drafts, or none: they already use the
arithmetic units that small batches leave idle.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

# Before anything is measured: the share of steps in which the first n drafts are right is LIKELY ** n. With three
# drafts, a step adds 2.7 tokens; published MTP layers have 2.6 and more.
LIKELY = 0.75
PRIOR_STEPS = 32  # the weight of this assumption, in steps of one request
REMEMBERED_STEPS = 2048  # steps of one request, after which older ones count half
MIN_GAIN = 1.03  # drafts must promise at least this many times the tokens per second without them
MAX_LOSS = 0.98  # where nothing is drafted, computing the MTP layer's rows may lower tokens per second to this share
# After every PROBE_EVERY plans, drafts are chosen as if LIKELY were their acceptance, until some are verified or
# PROBE_PLANS plans have passed. Usually two plans suffice: one drafts, and one verifies.
PROBE_EVERY, PROBE_PLANS = 512, 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The measured seconds of decode steps. Each sequence has one entry per number of decoding requests."""

    requests: Sequence[int]  # ascending
    plain: Sequence[float]  # steps without drafts, which compute nothing for later drafts
    # [numbers of requests][drafts]: steps that verify this many drafts of each request, and draft as many for the next
    # step. Entry 0 verifies none, but writes the rows of the MTP layer. A row ends where a step has no room for more.
    drafting: Sequence[Sequence[float]]

    def seconds(self, requests: int, drafts: int) -> float:
        """Returns how long a step takes. Between measured numbers of requests it interpolates, and above the largest it
        grows in proportion. Returns infinity if a neighbouring measured step has no room for so many drafts."""
        column = [times[drafts] if drafts < len(times) else inf for times in self.drafting]
        after = bisect_right(self.requests, requests)
        if after == 0:
            return column[0]
        if after == len(self.requests):
            return column[-1] * requests / self.requests[-1]
        first, last = self.requests[after - 1], self.requests[after]
        if requests == first or column[after] == inf:
            return column[after - 1] if requests == first else inf
        return column[after - 1] + (column[after] - column[after - 1]) * (requests - first) / (last - first)

    def best_drafts(self, requests: int, shares: Sequence[float]) -> int:
        """Returns the number of drafts with the most tokens per second. `shares[n]` is the share of steps in which the
        first n + 1 drafts are right."""
        best, best_rate = 0, MIN_GAIN / self.seconds(requests, 0)
        for drafts, tokens in enumerate(accumulate(shares, initial=1.0)):
            rate = tokens / self.seconds(requests, drafts)
            if drafts and rate > best_rate:
                best, best_rate = drafts, rate
        return best

    def pays(self, max_drafts: int) -> bool:
        """Returns whether drafts are worth their cost if LIKELY is their acceptance: some number of requests gains, and
        no number of requests loses more than 2% because the MTP layer's rows are computed."""
        shares, gains = likely_shares(max_drafts), []
        for requests, plain in zip(self.requests, self.plain, strict=True):
            drafts = self.best_drafts(requests, shares)
            gains.append(plain * (1 + sum(shares[:drafts])) / self.seconds(requests, drafts))
        return min(gains) >= MAX_LOSS and max(gains) >= MIN_GAIN


def likely_shares(max_drafts: int) -> list[float]:
    """Returns the assumed share of steps in which the first draft, the first two and so on are right."""
    return [LIKELY**drafts for drafts in range(1, max_drafts + 1)]


class DraftChoice:
    """Chooses the number of drafts of each plan, and learns from those that were verified."""

    def __init__(self, max_drafts: int, costs: StepCosts | None = None) -> None:
        """Without `costs`, nothing was measured, and all drafts are used."""
        self.costs = costs
        self._likely = likely_shares(max_drafts)
        self._verified = [float(PRIOR_STEPS)] * max_drafts  # by place of the draft
        self._accepted = [PRIOR_STEPS * share for share in self._likely]
        self._plans = self._probes = 0

    def choose(self, requests: int) -> int:
        """Returns how many drafts of each request the next plan verifies, if at most `requests` requests decode."""
        if self.costs is None:
            return len(self._likely)
        self._plans += 1
        if self._plans % PROBE_EVERY == 0:
            self._probes = PROBE_PLANS
        if self._probes:
            self._probes -= 1
            return self.costs.best_drafts(requests, self._likely)
        shares = [right / steps for right, steps in zip(self._accepted, self._verified, strict=True)]
        return self.costs.best_drafts(requests, shares)

    def record(self, verified: int, accepted: int) -> None:
        """Records that a step verified `verified` drafts of one request, at least one, and accepted the first
        `accepted` of them."""
        self._probes = 0
        for place in range(verified):
            self._verified[place] += 1
            self._accepted[place] += place < accepted
            if self._verified[place] >= REMEMBERED_STEPS:
                self._verified[place] /= 2
                self._accepted[place] /= 2
