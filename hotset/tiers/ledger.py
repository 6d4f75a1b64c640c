"""The books: which request holds which pages of which pool, and in which residence. No tensors, no queues.

Every change is all or nothing: it returns the commands that carry it out, or None if a pool lacks room, and then
nothing has changed. Pages that a change frees may be granted again at once, because workers keep the order of commands.
"""

from dataclasses import dataclass, field

from hotset.base.errors import IllegalTransition
from hotset.memory.geometry import TAIL_PAGES, Geometry
from hotset.memory.pages import PageAllocator
from hotset.tiers.commands import Command, Demote, Flush, Grant, Keep, Kind, Load, Promote
from hotset.tiers.residence import NEXT, Residence

NO_LIMIT = 1 << 62


@dataclass(slots=True)
class Holding:
    """What one request holds. Only the ledger changes it."""

    seat: int = -1  # of no meaning while absent or parked
    residence: Residence = Residence.ABSENT
    pages: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    # Rows for which it holds device pages, host pages, and both; measured after every change, since steps ask for them.
    device_room: int = 0
    host_room: int = 0
    room: int = 0

    def move(self, to: Residence) -> None:
        if to not in NEXT[self.residence]:
            raise IllegalTransition(self.residence, to)
        self.residence = to

    @property
    def device_pages(self) -> int:
        return sum(len(pages) for kind, pages in self.pages.items() if kind is not Kind.HOST)


@dataclass(frozen=True, slots=True)
class Need:
    """Pages that a change would take, of each pool."""

    device: int
    host: int


NOTHING = Need(0, 0)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages that somebody may still write to, though nobody wants it any more."""

    device: list[int]
    host: list[int]


@dataclass(frozen=True, slots=True)
class LandingPolicy:
    """Where KV from prefill workers may arrive. It is decided once, when the engine is built."""

    on_device: bool = True  # peers can write to device pages
    keys_on_host: bool = False  # rows that land on the host have their index keys beside them, not on the device

    def __post_init__(self) -> None:
        assert self.on_device or self.keys_on_host, "index keys cannot land on a device that peers cannot write to"


LAND_ANYWHERE = LandingPolicy()


class Ledger:
    """Owns the page allocators of both pools. Without a host store (`host` None) requests are resident or absent."""

    def __init__(
        self,
        geometry: Geometry,
        device: PageAllocator,
        host: PageAllocator | None,
        landing: LandingPolicy = LAND_ANYWHERE,
    ) -> None:
        self.geometry = geometry
        self.landing = landing
        self.device = device
        self.host = host
        self._quarantined: dict[str, Quarantined] = {}

    @property
    def tiers(self) -> bool:
        """Requests can be tiered: there is a host store, and the model selects."""
        return self.host is not None and self.geometry.slots > 0

    def need(self, holding: Holding, to: Residence, tokens: int) -> Need:
        """What a context of `tokens` rows takes in residence `to` beyond what is held already."""
        wanted = self._wanted(holding, to, tokens)
        missing = {kind: max(0, count - len(holding.pages[kind])) for kind, count in wanted.items()}
        host = missing.pop(Kind.HOST)
        return Need(sum(missing.values()), host)

    def fits(self, need: Need, spare: Need = NOTHING) -> bool:
        """There is room for `need`, with `spare` left over."""
        if need.device + spare.device > self.device.free:
            return False
        return self.host is None or need.host + spare.host <= self.host.free

    def admit(self, holding: Holding, seat: int, to: Residence, tokens: int) -> list[Command] | None:
        """An absent request takes a seat with pages for `tokens` rows, resident or streamed."""
        if not self.fits(self.need(holding, to, tokens)):
            return None
        holding.move(to)
        holding.seat = seat
        return self._grant(holding, self._wanted(holding, to, tokens))

    def grow(self, holding: Holding, tokens: int) -> list[Command] | None:
        """Pages for rows [0, tokens), in the residence that the request is in."""
        if not self.fits(self.need(holding, holding.residence, tokens)):
            return None
        return self._grant(holding, self._wanted(holding, holding.residence, tokens))

    def ready(self, holding: Holding, length: int) -> list[Command]:
        """A streamed request's prefill is done: out of its workspace it gets slots, tail and maps. There is room."""
        holding.move(Residence.TIERED)
        commands = self._recast(holding, [Kind.WORK], length)
        return [*commands, Load(holding.seat, length, Residence.TIERED, keys=False)]

    def gain(self, holding: Holding, length: int) -> int:
        """Device pages that demoting would free; 0 or less: it cannot, or need not, be demoted."""
        if not self.tiers or holding.residence is not Residence.RESIDENT:
            return 0
        geometry = self.geometry
        surplus = length // geometry.page_rows - 1 - geometry.slot_pages  # pages before those kept as slots
        started = len(holding.pages[Kind.ROWS]) - length // geometry.page_rows  # the newest page: 1, or 0 if not begun
        return surplus - geometry.map_pages(length) - (TAIL_PAGES - 1 - started)

    def demote(self, holding: Holding, length: int) -> list[Command]:
        """A resident request becomes tiered on its own pages; the others go back. `gain` must be positive.

        Kept in place: the pages just before the tail as slots, the tail itself. From the oldest pages, whose last
        selected rows are copied into slots first, come the maps, and the tail's newest page where it is not begun.
        """
        assert self.gain(holding, length) > 0, "a demotion that frees nothing"
        geometry, rows = self.geometry, holding.pages[Kind.ROWS]
        newest = length // geometry.page_rows
        first = newest - 1 - geometry.slot_pages
        surplus = rows[:first]
        maps = [surplus.pop() for _ in range(geometry.map_pages(length))]
        tail = rows[newest - 1 :] if len(rows) > newest else [rows[newest - 1], surplus.pop()]
        holding.move(Residence.TIERED)
        holding.pages[Kind.ROWS] = []
        holding.pages[Kind.SLOTS] = rows[first : newest - 1]
        holding.pages[Kind.MAPS] = maps
        holding.pages[Kind.TAIL] = tail if (newest - 1) % TAIL_PAGES == 0 else tail[::-1]
        self.device.release(surplus)
        self._measure(holding)
        kept = (tuple(holding.pages[kind]) for kind in (Kind.SLOTS, Kind.TAIL, Kind.MAPS))
        return [Demote(holding.seat, length, first, *kept)]

    def promotion(self, holding: Holding, length: int) -> Need:
        """What promoting takes before it gives anything back: the tail's pages stay."""
        return Need(max(0, length // self.geometry.page_rows - 1), 0)

    def promote(self, holding: Holding, length: int) -> list[Command] | None:
        """A tiered request becomes resident; its slots and maps go back."""
        newest = length // self.geometry.page_rows
        if not self.fits(self.promotion(holding, length)):
            return None
        pages = self.device.allocate(max(0, newest - 1))
        assert pages is not None, "the allocator said that there was room"
        holding.move(Residence.RESIDENT)
        tail = holding.pages[Kind.TAIL]
        in_order = [tail[number % TAIL_PAGES] for number in range(max(0, newest - 1), newest + 1)]
        unused = [page for page in tail if page not in in_order]
        holding.pages[Kind.ROWS], holding.pages[Kind.TAIL] = pages + in_order, []
        self.device.release(unused + self._take(holding, Kind.SLOTS) + self._take(holding, Kind.MAPS))
        self._measure(holding)
        return [Promote(holding.seat, length, tuple(holding.pages[Kind.ROWS]))]

    def park(self, holding: Holding, length: int) -> list[Command]:
        """All device pages go back, after the last page has been flushed. Every row has had its host page all along."""
        assert self.host is not None, "there is no host store to park in"
        holding.move(Residence.PARKED)
        self._give_back_device(holding)
        spare = holding.pages[Kind.HOST][self.geometry.row_pages(length) :]  # granted ahead for a longer prompt
        if spare:
            self.host.release(spare)
            del holding.pages[Kind.HOST][-len(spare) :]
        self._measure(holding)
        return [Flush(holding.seat, length)]

    def resume(self, holding: Holding, seat: int, to: Residence, length: int, tokens: int) -> list[Command] | None:
        """A parked context of `length` rows comes back with pages for `tokens` rows."""
        if not self.fits(self.need(holding, to, tokens)):
            return None
        holding.move(to)
        holding.seat = seat
        known = Grant(seat, Kind.HOST, 0, tuple(holding.pages[Kind.HOST]))
        grants = self._grant(holding, self._wanted(holding, to, tokens))
        return [known, *grants, Load(seat, length, to, keys=True)]

    def reserve(self, holding: Holding, on_device: bool, tokens: int) -> bool:
        """An absent request takes pages for `tokens` rows that another process will write: of the host store, or
        `on_device`. It needs no seat. False: there is no room."""
        wanted = self._landing(on_device, tokens)
        on_host = wanted[Kind.HOST]
        if not self.fits(Need(sum(wanted.values()) - on_host, on_host)):
            return False
        holding.move(Residence.LANDING)
        self._grant(holding, wanted)
        return True

    def land(self, holding: Holding, seat: int, to: Residence, length: int, tokens: int) -> list[Command] | None:
        """A context of `length` rows has landed whole: it takes a seat, with pages for `tokens` rows."""
        if not self.fits(self.need(holding, to, tokens)):
            return None
        holding.move(to)
        holding.seat = seat
        commands: list[Command] = [Grant(seat, kind, 0, tuple(held)) for kind, held in holding.pages.items() if held]
        in_place = bool(holding.pages[Kind.ROWS])
        on_host = not in_place and self.landing.keys_on_host
        commands += self._grant(holding, self._wanted(holding, to, tokens))
        if self.host is not None and not on_host:
            commands.append(Keep(seat, length, rows=in_place))
        if not in_place:
            commands.append(Load(seat, length, to, keys=on_host))
        return commands

    def quarantine(self, holding: Holding, name: str) -> None:
        """A landing ended, and its writer may not have stopped: its pages stay held, by nobody, under `name`."""
        assert holding.residence is Residence.LANDING, f"a {holding.residence.value} request has no writer but us"
        holding.move(Residence.ABSENT)
        host = self._take(holding, Kind.HOST)
        device = [page for kind in Kind for page in self._take(holding, kind)]
        self._quarantined[name] = Quarantined(device, host)
        self._measure(holding)

    def end_quarantine(self, name: str) -> None:
        """The writer is known to have stopped. Unknown names: nothing happens."""
        pages = self._quarantined.pop(name, None)
        if pages is not None:
            self.device.release(pages.device)
            if self.host is not None:
                self.host.release(pages.host)

    @property
    def quarantined(self) -> Need:
        """Pages in quarantine."""
        each = self._quarantined.values()
        return Need(sum(len(pages.device) for pages in each), sum(len(pages.host) for pages in each))

    def release(self, holding: Holding) -> None:
        """Everything goes back, from whatever residence. Idempotent."""
        if holding.residence is Residence.ABSENT:
            return
        holding.move(Residence.ABSENT)
        self._give_back_device(holding)
        if self.host is not None:
            self.host.release(self._take(holding, Kind.HOST))
        self._measure(holding)

    def audit(self, holdings: list[Holding]) -> None:
        """Proves that both pools are exactly partitioned among `holdings` and what is free."""
        self.device.audit()
        held = [page for h in holdings for kind, pages in h.pages.items() if kind is not Kind.HOST for page in pages]
        held += [page for pages in self._quarantined.values() for page in pages.device]
        assert len(held) == len(set(held)), "a device page has two owners"
        assert len(held) == self.device.held, f"{len(held)} device pages are owned, {self.device.held} are held"
        on_host = [page for holding in holdings for page in holding.pages[Kind.HOST]]
        on_host += [page for pages in self._quarantined.values() for page in pages.host]
        assert len(on_host) == len(set(on_host)), "a host page has two owners"
        if self.host is not None:
            self.host.audit()
            assert len(on_host) == self.host.held, f"{len(on_host)} host pages are owned, {self.host.held} are held"
        for holding in holdings:
            self._audit_kinds(holding)

    def _audit_kinds(self, holding: Holding) -> None:
        allowed = {
            Residence.ABSENT: set(),
            Residence.PARKED: {Kind.HOST},
            Residence.RESIDENT: {Kind.ROWS, Kind.KEYS, Kind.HOST},
            Residence.STREAMED: {Kind.WORK, Kind.KEYS, Kind.HOST},
            Residence.TIERED: {Kind.SLOTS, Kind.TAIL, Kind.MAPS, Kind.KEYS, Kind.HOST},
            Residence.LANDING: {Kind.ROWS, Kind.KEYS, Kind.HOST},
        }[holding.residence]
        for kind, pages in holding.pages.items():
            assert not pages or kind in allowed, f"a {holding.residence.value} request holds pages for {kind.value}"

    def _wanted(self, holding: Holding, to: Residence, tokens: int) -> dict[Kind, int]:
        """Pages of each kind that a context of `tokens` rows has in residence `to`."""
        geometry = self.geometry
        wanted = {
            Kind.KEYS: geometry.key_pages(tokens),
            Kind.HOST: 0 if self.host is None else geometry.row_pages(tokens),
        }
        if to is Residence.RESIDENT:
            return wanted | {Kind.ROWS: geometry.row_pages(tokens)}
        if to is Residence.STREAMED:
            return wanted | {Kind.WORK: max(geometry.work_pages(tokens), geometry.hot_pages(tokens))}
        assert to is Residence.TIERED, f"nothing is granted to a request that is {to.value}"
        maps = geometry.map_pages(tokens)
        return wanted | {Kind.SLOTS: geometry.slot_pages, Kind.TAIL: TAIL_PAGES, Kind.MAPS: maps}

    def _landing(self, on_device: bool, tokens: int) -> dict[Kind, int]:
        """Pages of each kind that `tokens` rows land in."""
        rows = self.geometry.row_pages(tokens)
        assert on_device or self.host is not None, "there is no host store to land in"
        return {
            Kind.ROWS: rows if on_device else 0,
            Kind.KEYS: self.geometry.key_pages(tokens) if on_device or not self.landing.keys_on_host else 0,
            Kind.HOST: 0 if self.host is None else rows,
        }

    def _grant(self, holding: Holding, wanted: dict[Kind, int]) -> list[Command]:
        """Takes what is missing from the pools, which have room for it."""
        commands: list[Command] = []
        for kind, count in wanted.items():
            held = holding.pages[kind]
            missing = count - len(held)
            if missing <= 0:
                continue
            pool = self.host if kind is Kind.HOST else self.device
            assert pool is not None
            pages = pool.allocate(missing, after=held[-1] if held else None)
            assert pages is not None, f"no room for {missing} pages of {kind.value}, though there was"
            commands.append(Grant(holding.seat, kind, len(held), tuple(pages)))
            held += pages
        self._measure(holding)
        return commands

    def _measure(self, holding: Holding) -> None:
        geometry, held = self.geometry, {kind: len(pages) for kind, pages in holding.pages.items()}
        holding.host_room = NO_LIMIT if self.host is None else held[Kind.HOST] * geometry.page_rows
        rooms = [held[Kind.KEYS] * geometry.keys_per_page if geometry.keys_per_page else NO_LIMIT]
        if holding.residence is Residence.RESIDENT:
            rooms.append(held[Kind.ROWS] * geometry.page_rows)
        elif holding.residence is Residence.STREAMED:
            rooms.append(held[Kind.WORK] * geometry.layers * geometry.page_rows)
        elif holding.residence is Residence.TIERED:
            rooms.append(2 * (held[Kind.MAPS] * geometry.words_per_page - 2 * geometry.slots))
        else:
            rooms.append(0)
        holding.device_room = min(rooms)
        holding.room = min(holding.device_room, holding.host_room)

    def _recast(self, holding: Holding, of: list[Kind], length: int) -> list[Command]:
        """Gives back the pages of some kinds and grants what the residence wants instead: never more than that."""
        self.device.release([page for kind in of for page in self._take(holding, kind)])
        return self._grant(holding, self._wanted(holding, holding.residence, length))

    def _give_back_device(self, holding: Holding) -> None:
        self.device.release([p for kind in Kind if kind is not Kind.HOST for p in self._take(holding, kind)])

    @staticmethod
    def _take(holding: Holding, kind: Kind) -> list[int]:
        pages, holding.pages[kind] = holding.pages[kind], []
        return pages
