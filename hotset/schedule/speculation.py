"""The interface through which the scheduler meets drafts. `hotset/engine/drafts` implements it."""

from collections.abc import Collection, Sequence
from typing import Protocol

from hotset.schedule.plan import Plan, PlanBuilder
from hotset.schedule.request import Request
from hotset.schedule.statistics import RankStats


class Speculation(Protocol):
    """Decides which drafts of decoding requests plans verify."""

    num_drafts: int  # of each request in the next plan, at most

    def begin_plan(self, running: int) -> None:
        """Prepares for a plan in which at most `running` requests decode, and chooses `num_drafts`."""

    def needs_newest(self, request: Request) -> bool:
        """Returns whether the newest token of a request must be known before it is planned."""

    def draft(self, request: Request, next_plan: PlanBuilder) -> Sequence[int]:
        """Returns drafts of the tokens after the newest one of a decoding request, and grants the pages of their rows.
        It has a page for the row of its newest token, which is known if `needs_newest`."""

    def draft_limit(self, request: Request, *, samples: bool) -> int:
        """Returns the first position for which the MTP layer must write no row: 0 if it should draft nothing. The
        request was added to the plan, which samples a token of it if `samples`."""

    def reject(
        self,
        plan: Plan,
        requests: Sequence[Request],
        kept: Sequence[int],
        unsampled: Collection[int],
        counters: RankStats,
    ) -> None:
        """Takes back the rows of a plan's rejected drafts. `requests` are those of its segments, and `kept` are the
        indices of the sampled tokens that are kept. Nothing was sampled of the segments `unsampled`."""

    def receive(self, request: Request, drafts: Sequence[int]) -> None:
        """Takes what a step drafted for the tokens after the newest one of a request."""

    def forget(self, request: Request) -> None:
        """Drops what is known about a request that is being released."""
