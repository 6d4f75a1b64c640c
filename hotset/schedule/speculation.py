"""The interface between the scheduler and speculative decoding. `hotset/engine/drafts` implements it."""

from collections.abc import Collection, Sequence
from typing import Protocol

from hotset.schedule.plan import Plan, PlanBuilder
from hotset.schedule.request import Request
from hotset.schedule.statistics import RankStats


class Speculation(Protocol):
    """Decides which drafts of decoding requests plans verify."""

    num_drafts: int  # the next plan drafts at most this many tokens of each request

    def begin_plan(self, running: int) -> None:
        """Prepares for a plan in which at most `running` requests decode, and chooses `num_drafts`."""

    def needs_newest(self, request: Request) -> bool:
        """Returns whether the newest token of a request must be known before the request is scheduled again."""

    def draft(self, request: Request, next_plan: PlanBuilder) -> Sequence[int]:
        """Returns drafts of the tokens after the newest one of a decoding request, and grants the pages of their rows.
        The request has a page for the row of its newest token. If `needs_newest`, this token is known."""

    def draft_limit(self, request: Request, *, samples: bool) -> int:
        """Returns the first position whose row the MTP layer must not write, or 0 if the layer should draft nothing.
        The request is part of the plan. `samples` says whether the plan samples a token of it."""

    def reject(
        self,
        plan: Plan,
        requests: Sequence[Request],
        kept: Sequence[int],
        unsampled: Collection[int],
        counters: RankStats,
    ) -> None:
        """Takes back the rows of a plan's rejected drafts. `requests` are those of its segments, and `kept` are the
        indices of the sampled tokens that are kept. No token was sampled for the segments `unsampled`."""

    def receive(self, request: Request, drafts: Sequence[int]) -> None:
        """Stores the drafts that a step made of the tokens after the newest one of a request."""

    def forget(self, request: Request) -> None:
        """Drops what is known about a request that is being released."""
