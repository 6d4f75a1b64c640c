"""Commands from the ledger to the workers' memory. They travel in plans and are executed before the plan's step.

Workers execute commands in order, and only this order makes them safe: a page that one command frees may be granted by
a later command of the same plan. All workers execute the same commands in the same order.
"""

from dataclasses import dataclass

from hotset.tiers.residence import PageUse, Residence


@dataclass(frozen=True, slots=True)
class Grant:
    """Gives a seat `pages` for one use, as its pages number `first` and following."""

    seat: int
    use: PageUse
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Copies the partly filled last page of a context of `length` rows, rows and index keys, to the host."""

    seat: int
    length: int


@dataclass(frozen=True, slots=True)
class Load:
    """Loads a context of `length` rows from the host: the rows that residence `to` needs, and, if `keys`, all keys."""

    seat: int
    length: int
    to: Residence
    keys: bool


@dataclass(frozen=True, slots=True)
class MirrorLanded:
    """Copies the full pages of a context of `length` rows that landed on the device to the host.

    Its index keys are copied, and, if `rows`, its rows as well: otherwise they landed on the host.
    """

    seat: int
    length: int
    rows: bool


@dataclass(frozen=True, slots=True)
class Demote:
    """Makes a resident seat tiered. Its own pages become slots, tail and maps.

    Slot s already holds position `first` * page_rows + s, and the tail's pages already hold the newest rows.
    """

    seat: int
    length: int
    first: int
    slots: tuple[int, ...]
    tail: tuple[int, ...]
    maps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """Makes a tiered seat resident. `rows` are all its pages in order; those of the tail already hold their rows."""

    seat: int
    length: int
    rows: tuple[int, ...]


Command = Grant | Flush | Load | MirrorLanded | Demote | Promote
