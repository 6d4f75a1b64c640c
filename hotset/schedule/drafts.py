"""Speculative decoding: which tokens are drafted for a request, and how many of them a plan verifies."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from hotset.base.errors import InternalError
from hotset.schedule.draft_costs import DraftChoice
from hotset.schedule.plan import DRAFTED, Plan, PlanBuilder
from hotset.schedule.request import Phase, Request
from hotset.schedule.statistics import RankStats
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence

NGRAM = 2  # tokens that must be equal before a match counts
MAX_COMPARED = 16  # a match is not followed further back than this many tokens
MAX_MATCHES = 8  # earlier occurrences that are compared, the newest first
MAX_VERIFIED = 256  # tokens of decoding requests with drafts in a plan; larger steps are bound by arithmetic
MAX_INDEXED = 4096  # tokens that are indexed in one call, so that a long prompt does not delay a plan


def max_verified(seats: int, max_num_batched_tokens: int, max_drafts: int) -> int:
    """Returns how many tokens, drafts included, decoding requests can have in a plan if fewer than so many decode: all
    drafts of all seats, up to MAX_VERIFIED tokens."""
    return max(seats, min(seats * (1 + max_drafts), MAX_VERIFIED, max_num_batched_tokens))


class Drafter(Protocol):
    """Guesses the next tokens of requests. Guesses may be wrong: they change the speed, but no token."""

    in_worker: bool  # whether workers draft, and keep the drafts for the next step of the same seat

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns at most `count` tokens that may follow `tokens`, the prompt and the answer so far. Between two calls
        for one request, its tokens only grow."""

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Takes what a step drafted for the tokens after `tokens`, the prompt and the answer so far."""

    def forget(self, request_id: str) -> None:
        """Drops all state of a request. Unknown ids are ignored."""


class MtpDrafter:
    """Drafts what the MTP layer computed at the end of the step that sampled the newest token."""

    in_worker = True

    def __init__(self) -> None:
        self._received: dict[str, tuple[int, Sequence[int]]] = {}  # number of tokens, drafts of the next ones

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        length, drafts = self._received.get(request_id, (0, ()))
        return drafts[:count] if length == len(tokens) else ()

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        self._received[request_id] = (len(tokens), drafts)

    def forget(self, request_id: str) -> None:
        self._received.pop(request_id, None)


class LookupDrafter:
    """Prompt look-up: drafts the tokens that followed the newest tokens where they occurred before.

    Of the last `MAX_MATCHES` occurrences of the newest `NGRAM` tokens, it takes the one where most tokens before them
    are equal too, and among several the newest.
    """

    in_worker = False

    def __init__(self) -> None:
        self._indexes: dict[str, _NgramIndex] = {}

    def draft(self, request_id: str, tokens: Sequence[int], count: int) -> Sequence[int]:
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _NgramIndex()
        index.extend(tokens)
        end = max(index.matches(tokens), key=lambda match: _common_suffix(tokens, match), default=None)
        return () if end is None else _continued(tokens, end, count)

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Does nothing: steps draft nothing."""

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class _NgramIndex:
    """Where each n-gram of one context ends: at the position of the token after it."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> its newest end among those indexed
        self._previous: list[int] = []  # the end of the same n-gram before the one that ends at NGRAM + i, or 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the next n-grams that are followed by a token, at most MAX_INDEXED."""
        first = NGRAM + len(self._previous)
        for end in range(first, min(len(tokens), first + MAX_INDEXED)):
            ngram = tuple(tokens[end - NGRAM : end])
            self._previous.append(self._newest.get(ngram, 0))
            self._newest[ngram] = end

    def matches(self, tokens: Sequence[int]) -> list[int]:
        """Returns ends of the n-gram at the end of `tokens`, the newest first."""
        found: list[int] = []
        end = self._newest.get(tuple(tokens[-NGRAM:]), 0)
        while end and len(found) < MAX_MATCHES:
            found.append(end)
            end = self._previous[end - NGRAM]
        return found


def _continued(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Returns `count` tokens from position `end` on. If there are fewer, the text is continued as if it repeated."""
    drafts: list[int] = []
    for position in range(end, end + count):
        drafts.append(tokens[position] if position < len(tokens) else drafts[position - len(tokens)])
    return drafts


def _common_suffix(tokens: Sequence[int], end: int) -> int:
    """Returns how many tokens before position `end` equal those at the end of `tokens`, at most MAX_COMPARED."""
    most = min(end, MAX_COMPARED)
    return next((n for n in range(most) if tokens[end - 1 - n] != tokens[-1 - n]), most)


class Speculation:
    """Decides how many drafts of each decoding request a plan verifies.

    Drafts use only what is left over: pages that are free, and tokens of a step that no other request needs. So no
    request is preempted for drafts, and with more requests there are fewer drafts. Where the time of steps was
    measured, `choice` drafts no more than pays.

    If the worker keeps its drafts, a request can be in several plans in flight. Its `num_scheduled` then counts all
    drafts as accepted, until a commit takes the rejected ones back.
    """

    def __init__(
        self,
        drafter: Drafter,
        ledger: Ledger,
        next_plan: PlanBuilder,
        max_drafts: int,
        max_verified: int,
        *,
        in_worker: bool,
    ) -> None:
        """A request has at most `max_drafts` drafts in a plan. Decoding requests and drafts together have at most
        `max_verified` tokens in a plan, unless more requests decode. If `in_worker`, the worker that drafts also
        computes the first layer, so that a plan need not contain the drafts."""
        if max_drafts > ledger.geometry.max_drafts:
            raise InternalError(f"{max_drafts} drafts are more than the {ledger.geometry.max_drafts} of the KV memory")
        self._drafter, self._ledger, self._next_plan = drafter, ledger, next_plan
        self._max_verified, self._in_worker = max_verified, in_worker
        self.choice = DraftChoice(max_drafts)
        self._room = 0
        self.num_drafts = 0  # of each request in the next plan, at most

    def begin_plan(self, running: int) -> None:
        """Prepares for a plan in which at most `running` requests decode, and chooses `num_drafts`."""
        self._room = self._max_verified - running
        self.num_drafts = self.choice.choose(running) if self._room > 0 else 0

    def needs_newest(self, request: Request) -> bool:
        """Returns whether the newest token of a request must be known before it is planned: to draft tokens after it,
        or because its position is not known. Masks of structures depend on drafts, so the host must know those."""
        if self._in_worker and request.prompt.params.structure is None:
            return False
        return self.num_drafts > 0 or request.drafts_in_flight > 0

    def draft(self, request: Request) -> Sequence[int]:
        """Returns drafts of the tokens after the newest one of a decoding request, and grants the pages of their rows.
        It has a page for the row of its newest token, which is known if `needs_newest`."""
        known, holding = request.num_scheduled + 1, request.holding
        count = min(self.num_drafts, self._room, request.max_length - 1 - known)
        drafts: Sequence[int] = ()
        if self._in_worker and request.prompt.params.structure is None:
            drafts = (DRAFTED,) * min(count, request.num_drafted)
        elif request.phase is Phase.DECODE and count > 0:
            drafts = self._drafter.draft(request.request_id, request.tokens, count)
        if known + len(drafts) > holding.capacity:
            commands = self._ledger.grow(holding, known + len(drafts))
            if commands is None:
                drafts = drafts[: holding.capacity - known]
            else:
                self._next_plan.commands += commands
        self._room -= len(drafts)
        return drafts

    def draft_limit(self, request: Request, *, samples: bool) -> int:
        """Returns the first position for which the MTP layer must write no row: 0 if it should draft nothing. The
        request was added to the plan, which samples a token of it if `samples`."""
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
        """Takes what a step drafted for the tokens after the newest one of a request."""
        self._drafter.receive(request.request_id, request.tokens, drafts)

    def reject(
        self,
        plan: Plan,
        requests: Sequence[Request],
        kept: Sequence[int],
        late: Collection[int],
        counters: RankStats,
    ) -> None:
        """Takes back the rows of a plan's rejected drafts. `requests` are those of its segments, and `kept` are the
        indices of the sampled tokens that are kept. Nothing was sampled of the segments that are `late`."""
        num_kept = Counter(plan.sampled[index] for index in kept) if plan.drafts else {}
        for segment, drafts in plan.drafts.items():
            if segment in late:
                continue  # the scheduler takes them back with the token before them
            accepted, request = num_kept[segment] - 1, requests[segment]
            request.drafts_in_flight -= len(drafts)
            request.num_scheduled -= len(drafts) - accepted
            request.settled_unsampled -= len(drafts) - accepted
            self.choice.record(len(drafts), accepted)
            counters.drafts_verified.update(range(1, 1 + len(drafts)))
            counters.drafts_accepted.update(range(1, 1 + accepted))

    def forget(self, request: Request) -> None:
        """Drops what is known about a request that is being released."""
        self._drafter.forget(request.request_id)
