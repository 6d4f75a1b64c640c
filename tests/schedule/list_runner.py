"""A worker without tensors: it executes plans and commands on dictionaries, and checks every row that is read.

The content of a row and of an index key is the tuple of all tokens up to and including its own. Device pages are
poisoned when they are granted, except pages with landed KV and shared pages of index keys. The slots, maps and
workspace of a request are poisoned again in each step of the request, so a page with two owners fails a check.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from hotset.memory.geometry import Geometry
from hotset.schedule.handoffs import Reservation
from hotset.schedule.plan import AssignSeat, LogprobColumns, Plan, PromptRange, StepResult
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.commands import Command, Demote, Flush, Grant, Load, MirrorLanded, Promote
from hotset.tiers.ledger import LAND_ANYWHERE, LandingPolicy
from hotset.tiers.residence import PageUse, Residence

Row = tuple[int, int]  # page, row within the page
Key = tuple[int, int, int]  # page, block within the page, key within the block
POISON = ("poison",)


def next_token(context: tuple[int, ...]) -> int:
    """Returns the token that follows a context. It depends on the whole context."""
    return hash(context) % 23


def answer_alone(prompt: Sequence[int], limit: int, stop: int | None = None) -> list[int]:
    """Returns the answer to a prompt that runs alone: up to `stop`, or to a context of `limit` tokens."""
    context = list(prompt)
    while len(context) < limit:
        context.append(next_token(tuple(context)))
        if context[-1] == stop:
            break
    return context[len(prompt) :]


class Seat:
    """The tokens and pages of the request on one seat."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.pages: dict[PageUse, list[int]] = {use: [] for use in PageUse}
        self.tiered = False
        self.shared_keys = 0  # the first key pages, which the request only reads


class ListRunner:
    """Executes plans as a runner does."""

    def __init__(self, geometry: Geometry, landing: LandingPolicy = LAND_ANYWHERE) -> None:
        self.geometry = geometry
        self.landing = landing
        self.seats: dict[int, Seat] = {}
        self.device: dict[Row, tuple[object, ...]] = {}
        self.host: dict[Row, tuple[object, ...]] = {}
        self.keys: dict[Key, tuple[object, ...]] = {}  # index keys on the device
        self.host_keys: dict[Row, tuple[object, ...]] = {}
        self.number = -1
        self.landed: set[int] = set()  # device pages that a peer has written, until they are granted to a seat

    def land(self, reservation: Reservation) -> None:
        """Writes the rows of a prompt from `first` on into the reserved pages, as a prefill worker does."""
        page_rows, first, tokens = self.geometry.page_rows, reservation.first, reservation.prompt.token_ids
        assert first % page_rows == 0 and first < len(tokens), f"{first} of {len(tokens)} rows are in the cache"
        for position in range(first, len(tokens)):
            row = reservation.row_pages[(position - first) // page_rows], position % page_rows
            (self.device if reservation.on_device else self.host)[row] = tokens[: position + 1]
            if self.keys_on_host(reservation):
                assert reservation.key_pages == reservation.row_pages
                self.host_keys[row] = tokens[: position + 1]
                continue
            skipped = self.geometry.key_pages_before(first)
            for key in self._keys_at((*reservation.key_pages[:1] * skipped, *reservation.key_pages), position):
                self.keys[key] = tokens[: position + 1]
        self.landed |= self.device_pages(reservation)

    def device_pages(self, reservation: Reservation) -> set[int]:
        """Returns the device pages of a reservation.

        A model without an indexer stores no index keys on the device; `key_pages` then repeats the host pages.
        """
        on_device = self.geometry.keys_per_block and not self.keys_on_host(reservation)
        return {
            *(reservation.key_pages if on_device else ()),
            *(reservation.row_pages if reservation.on_device else ()),
        }

    def keys_on_host(self, reservation: Reservation) -> bool:
        """Returns True if index keys land on the host, in the pages of their rows."""
        return self.geometry.keys_per_block > 0 and self.landing.keys_on_host and not reservation.on_device

    def write_late(self, reservation: Reservation) -> None:
        """Poisons the reserved pages, as a prefill worker can if it still writes after the landing has failed."""
        if not reservation.on_device:
            for page in reservation.row_pages:
                for row in range(self.geometry.page_rows):
                    self.host[page, row] = POISON
                    if self.keys_on_host(reservation):
                        self.host_keys[page, row] = POISON
        self._poison(self.device_pages(reservation))

    def host_row(self, pages: tuple[int, ...], position: int) -> tuple[object, ...]:
        return self.host[pages[position // self.geometry.page_rows], position % self.geometry.page_rows]

    def device_row(self, pages: tuple[int, ...], position: int) -> tuple[object, ...]:
        return self.device[pages[position // self.geometry.page_rows], position % self.geometry.page_rows]

    def submit(self, plan: Plan) -> StepResult:
        assert plan.number == self.number + 1, "plans were not submitted in the order of their numbers"
        self.number = plan.number
        for command in plan.commands:
            if isinstance(command, AssignSeat):
                self.seats[command.seat] = Seat([*command.prompt.token_ids, *command.answer])
            else:
                self.execute(command)
        assert len(plan.seats) == len(set(plan.seats)), "a plan has the same seat twice"
        results = []
        for segment, (seat, start, count) in enumerate(zip(plan.seats, plan.starts, plan.counts, strict=True)):
            drafts = plan.drafts.get(segment, ())
            first_draft = start + count - len(drafts)
            if drafts:
                self.seats[seat].tokens[first_draft:] = drafts
            context = self._compute(self.seats[seat], start, count)
            if segment in plan.sampled:
                assert plan.sampled.count(segment) == 1 + len(drafts)
                sampled = [next_token(context[:end]) for end in range(first_draft, start + count + 1)]
                accepted = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
                self.seats[seat].tokens[first_draft + accepted :] = [sampled[accepted]]
                results += sampled
        scored = [self._score(plan, prompt_range) for prompt_range in plan.prompt_ranges]
        return StepResult(plan.number, results, prompt_logprobs=scored)

    @staticmethod
    def _score(plan: Plan, scored: PromptRange) -> LogprobColumns:
        """Returns the positions of the prompt tokens as their ranks. Their logits must be computed in the same plan."""
        first = plan.starts[scored.segment]
        assert first <= scored.first - 1 and scored.last - 1 <= first + plan.counts[scored.segment]
        positions = array("i", range(scored.first, scored.last))
        return LogprobColumns(array("d", [0.0] * len(scored)), positions, array("i"), array("d"))

    def execute(self, command: Command) -> None:
        seat = self.seats[command.seat]
        match command:
            case Grant(_, use, first, pages):
                held = len(seat.pages[use])
                assert first == held, f"pages of {use} were granted from index {first} on, but {held} are held"
                seat.pages[use] += pages
                if command.shared:
                    assert use is PageUse.KEYS and seat.shared_keys == first, "shared pages come first"
                    seat.shared_keys += len(pages)
                elif use is not PageUse.HOST:
                    self._poison([page for page in pages if page not in self.landed])
                    self.landed.difference_update(pages)
            case Flush(_, length):
                newest = length // self.geometry.page_rows * self.geometry.page_rows
                self._mirror(seat, newest, length, rows=not seat.pages[PageUse.WORK])
                self.seats[command.seat] = Seat([])
            case MirrorLanded(_, length, rows, first):
                self._mirror(seat, first, length - length % self.geometry.page_rows, rows=rows)
            case Load(_, length, to, keys):
                if keys:
                    self._load_keys(seat, length)
                self._load(seat, length, to)
            case Demote(_, length, _, slots, tail, maps):
                newest = length // self.geometry.page_rows
                kept = seat.pages[PageUse.ROWS][newest - 1 : newest - 1 + len(tail)]
                assert [tail[(newest - 1 + n) % len(tail)] for n in range(len(kept))] == kept, "tail pages moved"
                seat.pages[PageUse.ROWS] = []
                seat.pages |= {PageUse.SLOTS: [*slots], PageUse.TAIL: [*tail], PageUse.MAPS: [*maps]}
                seat.tiered = True
            case Promote(_, length, rows):
                newest = length // self.geometry.page_rows
                seat.pages |= {PageUse.ROWS: [*rows], PageUse.SLOTS: [], PageUse.TAIL: [], PageUse.MAPS: []}
                seat.tiered = False
                for position in range(max(0, newest - 1) * self.geometry.page_rows):
                    row = self._row(seat, PageUse.ROWS, position)
                    self.device[row] = self.host[self._row(seat, PageUse.HOST, position)]

    def _load(self, seat: Seat, length: int, to: Residence) -> None:
        first = 0
        if to is Residence.TIERED:
            seat.tiered, seat.pages[PageUse.WORK] = True, []
            first = self.geometry.tail_first(length)
        if to is not Residence.STREAMED:
            for position in range(first, length):
                self.device[self._device_row(seat, position)] = self.host[self._row(seat, PageUse.HOST, position)]

    def _compute(self, seat: Seat, start: int, count: int) -> tuple[int, ...]:
        """Writes rows [start, start + count), and checks every row that attention could read. Returns the context."""
        streamed, page_rows, end = bool(seat.pages[PageUse.WORK]), self.geometry.page_rows, start + count
        for position in range(start, end):
            row = self._row(seat, PageUse.HOST, position) if streamed else self._device_row(seat, position)
            (self.host if streamed else self.device)[row] = tuple(seat.tokens[: position + 1])
            for key in self._keys_at(seat.pages[PageUse.KEYS], position):
                assert key[0] not in seat.pages[PageUse.KEYS][: seat.shared_keys], "a shared key page was written"
                self.keys[key] = tuple(seat.tokens[: position + 1])
        self._poison([*seat.pages[PageUse.SLOTS], *seat.pages[PageUse.MAPS], *seat.pages[PageUse.WORK]])
        only_on_host = end if streamed else self.geometry.tail_first(start) if seat.tiered else 0
        for position in range(end):
            expected = tuple(seat.tokens[: position + 1])
            for key in self._keys_at(seat.pages[PageUse.KEYS], position):
                assert self.keys[key] == expected, "an index key on the device is wrong"
            if position < only_on_host:
                assert self.host[self._row(seat, PageUse.HOST, position)] == expected, "a row on the host is wrong"
            else:
                assert self.device[self._device_row(seat, position)] == expected, "a row on the device is wrong"
        if seat.pages[PageUse.HOST]:
            self._mirror(seat, start // page_rows * page_rows, end // page_rows * page_rows, rows=not streamed)
        return tuple(seat.tokens[:end])

    def _mirror(self, seat: Seat, first: int, last: int, *, rows: bool) -> None:
        for position in range(first, last):
            row = self._row(seat, PageUse.HOST, position)
            if rows:
                self.host[row] = self.device[self._device_row(seat, position)]
            for key in self._keys_at(seat.pages[PageUse.KEYS], position):
                self.host_keys[row] = self.keys[key]

    def _load_keys(self, seat: Seat, length: int) -> None:
        shared = seat.pages[PageUse.KEYS][: seat.shared_keys]
        for position in range(length):
            for key in self._keys_at(seat.pages[PageUse.KEYS], position):
                if key[0] not in shared:
                    self.keys[key] = self.host_keys[self._row(seat, PageUse.HOST, position)]

    def _keys_at(self, pages: Sequence[int], position: int) -> Iterator[Key]:
        """Yields where the index keys of a position are on the device, one for each group."""
        geometry = self.geometry
        for group in range(geometry.key_groups if geometry.keys_per_block else 0):
            block, key = divmod(position, geometry.keys_per_block)
            page, block_in_page = divmod(block * geometry.key_groups + group, geometry.blocks_per_page)
            yield pages[page], block_in_page, key

    def _device_row(self, seat: Seat, position: int) -> Row:
        if not seat.tiered:
            return self._row(seat, PageUse.ROWS, position)
        page_rows = self.geometry.page_rows
        tail = seat.pages[PageUse.TAIL]
        return tail[position // page_rows % len(tail)], position % page_rows

    def _row(self, seat: Seat, use: PageUse, position: int) -> Row:
        return seat.pages[use][position // self.geometry.page_rows], position % self.geometry.page_rows

    def _poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            for row in range(self.geometry.page_rows):
                self.device[page, row] = POISON
            for block in range(self.geometry.blocks_per_page):
                for key in range(self.geometry.keys_per_block):
                    self.keys[page, block, key] = POISON


def execute_next(scheduler: Scheduler, runner: ListRunner) -> Plan:
    """Executes and commits the next plan, which must exist, and returns it."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(runner.submit(plan))
    return plan
