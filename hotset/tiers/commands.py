"""What the ledger tells workers to do with memory: plain values, carried out in order, before the step they come with.

Order is all that makes them safe: a page that one command frees may be granted by a later one of the same plan, and
every worker carries out the same commands in the same order.
"""

from dataclasses import dataclass
from enum import Enum

from hotset.tiers.residence import Residence


class Kind(Enum):
    """What a page is held for. HOST pages come from the host store, all others from the device pool."""

    ROWS = "rows"
    KEYS = "keys"
    SLOTS = "slots"
    TAIL = "tail"
    MAPS = "maps"
    WORK = "work"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Grant:
    """A seat's pages number `first` and following, of one kind."""

    seat: int
    kind: Kind
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Copies to the host what of a context of `length` rows is not there yet: rows and index keys of its last page."""

    seat: int
    length: int


@dataclass(frozen=True, slots=True)
class Load:
    """Brings a context of `length` rows from the host: its index keys if `keys`, and what `to` needs of its rows."""

    seat: int
    length: int
    to: Residence
    keys: bool


@dataclass(frozen=True, slots=True)
class Keep:
    """Copies to the host, of a context of `length` rows that landed, the full pages of what landed on the device: its
    index keys, and its rows if `rows`."""

    seat: int
    length: int
    rows: bool


@dataclass(frozen=True, slots=True)
class Demote:
    """A resident seat becomes tiered on pages of its own, which it has been granted as slots, tail and maps.

    Slot s holds position `first` * page_rows + s in place; the tail's pages hold the newest rows in place.
    """

    seat: int
    length: int
    first: int
    slots: tuple[int, ...]
    tail: tuple[int, ...]
    maps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """A tiered seat becomes resident: `rows` are its pages from the first, of which those in the tail stay in place."""

    seat: int
    length: int
    rows: tuple[int, ...]


Command = Grant | Flush | Load | Keep | Demote | Promote
