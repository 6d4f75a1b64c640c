"""Commands from the ledger to the workers' memory. They travel in plans and are executed before the plan's step.

Workers execute commands in order, and only this order makes them safe: a page that one command frees may be granted by
a later command of the same plan. All workers execute the same commands in the same order.
"""

from dataclasses import dataclass

from hotset.tiers.residence import PageUse, Residence


@dataclass(frozen=True, slots=True)
class Grant:
    """Grants `pages` to a seat for one use. They become the seat's pages from number `first` on for this use.

    If `shared`, the pages hold index keys of the seat's context already, and other seats may read them. A seat gets
    shared pages before all its other key pages, and never writes to them.
    """

    seat: int
    use: PageUse
    first: int
    pages: tuple[int, ...]
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Flush:
    """Copies the partly filled last page of a context of `length` rows, if there is one, to the host."""

    seat: int
    length: int


@dataclass(frozen=True, slots=True)
class Load:
    """Loads from the host what a context of `length` rows needs in residence `to`.

    RESIDENT needs all rows, TIERED those of tail and slots, STREAMED none. If `keys`, the index keys are loaded too,
    except those in shared pages.
    """

    seat: int
    length: int
    to: Residence
    keys: bool


@dataclass(frozen=True, slots=True)
class MirrorLanded:
    """Copies the full pages of a context to the host after its rows [first, length) have landed.

    Index keys are copied and, if `rows`, also the rows. If not `rows`, the rows have landed in host pages. The pages of
    rows [0, first) are in the prefix cache: they are on the host, and must not be written.
    """

    seat: int
    length: int
    rows: bool
    first: int = 0


@dataclass(frozen=True, slots=True)
class Demote:
    """Makes a resident seat tiered. Its own pages become slots, tail and maps.

    Page number `first` of the context is the first that becomes slots: slot s already holds position
    `first` * page_rows + s. The newest rows are already in the tail's pages.
    """

    seat: int
    length: int
    first: int
    slots: tuple[int, ...]
    tail: tuple[int, ...]
    maps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """Makes a tiered seat resident. `rows` are all its row pages in order; the pages of its tail come last."""

    seat: int
    length: int
    rows: tuple[int, ...]


Command = Grant | Flush | Load | MirrorLanded | Demote | Promote
