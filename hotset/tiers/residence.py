"""The residences of a request, the pages that it holds in each, and the table of allowed transitions."""

from dataclasses import dataclass, field
from enum import Enum

from hotset.base.errors import IllegalTransition, InternalError
from hotset.base.story import Story
from hotset.memory.geometry import Geometry
from hotset.tiers.prefix_cache import CachedPage


class Residence(Enum):
    """Where the rows of a request are."""

    ABSENT = "absent"  # holds no pages: not admitted, or everything was released
    RESIDENT = "resident"  # every row is on the device; full pages are also in the host store, if there is one
    STREAMED = "streamed"  # being prefilled with its rows on the host; each layer passes through a workspace
    TIERED = "tiered"  # rows on the host; slots and tail on the device
    PARKED = "parked"  # rows and index keys on the host only
    LANDING = "landing"  # another process writes or has written its rows and index keys; they are not read yet

    __hash__ = object.__hash__  # members are unique; Enum's own hash is slow, and every step needs many


RESIDENCE_TRANSITIONS: dict[Residence, frozenset[Residence]] = {
    # admit, reserve
    Residence.ABSENT: frozenset({Residence.RESIDENT, Residence.STREAMED, Residence.LANDING, Residence.PARKED}),
    Residence.RESIDENT: frozenset({Residence.TIERED, Residence.PARKED, Residence.ABSENT}),  # demote, park, release
    Residence.STREAMED: frozenset({Residence.TIERED, Residence.PARKED, Residence.ABSENT}),  # stream ends, park, release
    Residence.TIERED: frozenset({Residence.RESIDENT, Residence.PARKED, Residence.ABSENT}),  # promote, park, release
    # resume, release
    Residence.PARKED: frozenset({Residence.RESIDENT, Residence.STREAMED, Residence.TIERED, Residence.ABSENT}),
    Residence.LANDING: frozenset({Residence.RESIDENT, Residence.TIERED, Residence.ABSENT}),  # land, quarantine, release
}


class PageUse(Enum):
    """What a page is used for. HOST pages come from the host store, all others from the device pool."""

    ROWS = "rows"
    KEYS = "keys"
    SLOTS = "slots"
    TAIL = "tail"
    MAPS = "maps"
    WORK = "work"
    HOST = "host"

    __hash__ = object.__hash__  # as for Residence


PAGE_USES: dict[Residence, frozenset[PageUse]] = {
    Residence.ABSENT: frozenset(),
    Residence.PARKED: frozenset({PageUse.HOST}),
    Residence.RESIDENT: frozenset({PageUse.ROWS, PageUse.KEYS, PageUse.HOST}),
    Residence.STREAMED: frozenset({PageUse.WORK, PageUse.KEYS, PageUse.HOST}),
    Residence.TIERED: frozenset({PageUse.SLOTS, PageUse.TAIL, PageUse.MAPS, PageUse.KEYS, PageUse.HOST}),
    Residence.LANDING: frozenset({PageUse.ROWS, PageUse.KEYS, PageUse.HOST}),
}


@dataclass(slots=True)
class Holding:
    """The seat and the pages that one request holds. Only the ledger changes it."""

    seat: int = -1  # meaningless while absent, parked or landing
    residence: Residence = Residence.ABSENT
    pages: dict[PageUse, list[int]] = field(default_factory=lambda: {use: [] for use in PageUse})
    # The pages of the prefix cache that the request uses, from the first page of its context on. A host page that is
    # one of them is shared and never written; all other pages are the request's own.
    cached: list[CachedPage] = field(default_factory=list)
    keys_land_on_host: bool = False  # while landing: its index keys arrive in the host pages of its rows
    # Numbers of rows for which the request holds device pages, host pages, and both. They are stored, and updated after
    # every change, because every step reads them.
    device_capacity: int = 0
    host_capacity: int = 0
    capacity: int = 0
    story: Story = field(default_factory=Story, compare=False)  # of the request; its scheduler records phases there

    def move(self, to: Residence) -> None:
        if to not in RESIDENCE_TRANSITIONS[self.residence]:
            raise IllegalTransition(self.residence, to)
        self.residence = to
        self.story.record("residence", to.value)

    @property
    def own_host_pages(self) -> list[int]:
        """The host pages that are not in the prefix cache."""
        pages, cached = self.pages[PageUse.HOST], self.cached
        kept = [page for page, of_cache in zip(pages, cached, strict=False) if page != of_cache.page]
        return kept + pages[len(cached) :]

    @property
    def device_pages(self) -> int:
        return sum(len(pages) for use, pages in self.pages.items() if use is not PageUse.HOST)


def required_pages(geometry: Geometry, to: Residence, tokens: int, *, on_host: bool) -> dict[PageUse, int]:
    """Returns the number of pages for each use that a context of `tokens` rows requires in residence `to`."""
    rows = geometry.row_pages(tokens)
    required = {PageUse.KEYS: geometry.key_pages(tokens), PageUse.HOST: rows if on_host else 0}
    if to is Residence.RESIDENT:
        required[PageUse.ROWS] = rows
    elif to is Residence.STREAMED:
        required[PageUse.WORK] = max(geometry.work_pages(tokens), geometry.hot_pages(tokens))
    elif to is Residence.TIERED:
        required[PageUse.SLOTS], required[PageUse.TAIL] = geometry.slot_pages, geometry.tail_pages
        required[PageUse.MAPS] = geometry.map_pages(tokens)
    else:
        raise InternalError(f"a request that is {to.value} is granted no pages")
    return required


def device_capacity(geometry: Geometry, holding: Holding) -> int:
    """Returns for how many rows a request holds device pages: the inverse of `required_pages`."""
    pages, residence, rows = holding.pages, holding.residence, 0
    if residence is Residence.RESIDENT:
        rows = len(pages[PageUse.ROWS]) * geometry.page_rows
    elif residence is Residence.STREAMED:
        rows = len(pages[PageUse.WORK]) * geometry.layers * geometry.page_rows
    elif residence is Residence.TIERED:
        rows = 2 * (len(pages[PageUse.MAPS]) * geometry.words_per_page - 2 * geometry.slots)
    return min(rows, geometry.key_capacity(len(pages[PageUse.KEYS]))) if geometry.keys_per_block else rows
