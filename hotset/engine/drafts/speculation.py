"""Decides how many drafts of each decoding request a plan verifies, and takes rejected drafts back."""

from collections import Counter
from collections.abc import Collection, Sequence

from hotset.base.errors import InternalError
from hotset.engine.drafts.costs import DraftChoice, StepCosts
from hotset.engine.drafts.drafters import Drafter, LookupDrafter, MtpDrafter
from hotset.engine.drafts.settings import DraftSettings
from hotset.schedule.plan import DRAFTED, Plan, PlanBuilder
from hotset.schedule.request import Phase, Request
from hotset.schedule.statistics import RankStats
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence


class Speculation:
    """Implements `schedule.speculation.Speculation`: decides how many drafts of each decoding request a plan verifies.

    Drafts use only free pages, and the tokens of a step that no request needs. No request is therefore preempted for
    drafts, and more requests get fewer drafts. If the time of steps was measured, `choice` drafts no more than pays.

    If the worker keeps its drafts, a request can be in several plans in flight. Its `num_scheduled` then counts all
    drafts as accepted, until a commit takes the rejected ones back.
    """

    def __init__(
        self,
        settings: DraftSettings,
        ledger: Ledger,
        costs: StepCosts | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`costs` are the measured costs, or None. `drafter` replaces the drafter that the settings name."""
        if settings.max_drafts > ledger.geometry.max_drafts:
            raise InternalError(
                f"{settings.max_drafts} drafts are more than the {ledger.geometry.max_drafts} of the KV memory"
            )
        self._settings, self._ledger = settings, ledger
        self._drafter = drafter or (MtpDrafter() if settings.by_mtp else LookupDrafter())
        self.choice = DraftChoice(settings.max_drafts, costs)
        self._room = 0
        self.num_drafts = 0  # of each request in the next plan, at most

    def begin_plan(self, running: int) -> None:
        self._room = self._settings.max_verified - running
        self.num_drafts = self.choice.choose(running) if self._room > 0 else 0

    def needs_newest(self, request: Request) -> bool:
        # The host drafts after the newest token, or does not know its position while drafts are in flight.
        if self._is_kept_in_worker(request):
            return False
        return self.num_drafts > 0 or request.drafts_in_flight > 0

    def _is_kept_in_worker(self, request: Request) -> bool:
        """Returns whether only the worker needs to know the drafts of a request. Masks of structures depend on drafts,
        so the host must know those."""
        return self._settings.kept_in_worker and request.prompt.params.structure is None

    def draft(self, request: Request, next_plan: PlanBuilder) -> Sequence[int]:
        known, holding = request.num_scheduled + 1, request.holding
        count = min(self.num_drafts, self._room, request.max_length - 1 - known)
        drafts: Sequence[int] = ()
        if self._is_kept_in_worker(request):
            drafts = (DRAFTED,) * min(count, request.num_drafted)
        elif request.phase is Phase.DECODE and count > 0:
            drafts = self._drafter.draft(request.request_id, request.tokens, count)
        if known + len(drafts) > holding.capacity:
            commands = self._ledger.grow(holding, known + len(drafts))
            if commands is None:
                drafts = drafts[: holding.capacity - known]
            else:
                next_plan.commands += commands
        self._room -= len(drafts)
        return drafts

    def draft_limit(self, request: Request, *, samples: bool) -> int:
        request.num_drafted = 0
        if self.num_drafts == 0 or request.for_peer:
            return 0
        if request.holding.residence is Residence.STREAMED:
            return 0  # its rows are about to move to a hot buffer
        limit = min(request.holding.capacity, request.max_length)
        if samples:
            newest = request.num_scheduled - request.drafts_in_flight - 1  # if all drafts are rejected
            request.num_drafted = max(0, min(self.num_drafts, limit - newest))
        return limit

    def receive(self, request: Request, drafts: Sequence[int]) -> None:
        self._drafter.receive(request.request_id, request.tokens, drafts)

    def reject(
        self,
        plan: Plan,
        requests: Sequence[Request],
        kept: Sequence[int],
        unsampled: Collection[int],
        counters: RankStats,
    ) -> None:
        num_kept = Counter(plan.sampled[index] for index in kept) if plan.drafts else {}
        for segment, drafts in plan.drafts.items():
            if segment in unsampled:
                continue  # the scheduler takes them back with the token before them
            accepted, request = num_kept[segment] - 1, requests[segment]
            request.drafts_in_flight -= len(drafts)
            request.num_scheduled -= len(drafts) - accepted
            request.settled_unsampled -= len(drafts) - accepted
            self.choice.record(len(drafts), accepted)
            counters.drafts_verified.update(range(1, 1 + len(drafts)))
            counters.drafts_accepted.update(range(1, 1 + accepted))

    def forget(self, request: Request) -> None:
        self._drafter.forget(request.request_id)
