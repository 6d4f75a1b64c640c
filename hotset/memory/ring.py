"""The ring allocator: who may write where in a ring of bytes. Pure bookkeeping, no memory of its own."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from hotset.base.units import ceil_div


@dataclass(frozen=True, slots=True)
class Lease:
    """Bytes [first, first + nbytes) of the ring are the owner's. Its number is never given to another lease."""

    number: int
    owner: Hashable
    first: int
    nbytes: int


class Ring:
    """Grants free stretches of a ring of `nbytes` bytes, in the order in which they were asked for.

    Each lease is one stretch that begins at a multiple of `align`. The next is placed after the one before it, and
    around the end where that leaves too little room; so what was given back rests as long as it can. Leases may end in
    any order, and what they held is free at once. Nobody overtakes: the first in the queue waits until there is room
    for it, and, since nothing is granted meanwhile, gets it at the latest when every lease has ended, however large it
    is. Full is an answer: asks wait, and nothing here raises because there is no room.

    Every call may come twice, and a number that is over changes nothing. But an owner whose lease is over may ask
    anew, and a late copy of its first message would: whoever passes such messages on has to tell them apart.
    """

    def __init__(self, nbytes: int, align: int = 256) -> None:
        assert nbytes > 0 and align > 0, f"a ring of {nbytes} bytes, aligned to {align}"
        self.nbytes, self.align = nbytes, align
        self._leases: dict[int, Lease] = {}  # by number: whose bytes are taken, quarantined ones as well
        self._number_of: dict[Hashable, int] = {}  # of each owner's lease, while it may write
        self._asks: dict[Hashable, int] = {}  # bytes that each owner waits for, the first in the queue first
        self._quarantined: set[int] = set()
        self._untold: list[int] = []
        self._front = 0  # where the newest lease ends
        self._next_number = 0

    @property
    def held(self) -> int:
        """Bytes under a lease or in quarantine, with those that alignment leaves unused behind them."""
        return sum(self._end(lease) - lease.first for lease in self._leases.values())

    @property
    def free(self) -> int:
        return self.nbytes - self.held

    @property
    def quarantined(self) -> int:
        """Bytes of `held` that only `end_quarantine` gives back."""
        return sum(self._end(lease) - lease.first for lease in self._in_quarantine())

    @property
    def waiting(self) -> int:
        """Owners in the queue."""
        return len(self._asks)

    @property
    def stuck(self) -> bool:
        """The first in the queue would wait even if every lease ended: what is in quarantine leaves too little room."""
        return bool(self._asks) and not self.fits(self._wanted())

    def fits(self, nbytes: int) -> bool:
        """Whether a lease of so many bytes would find room if every lease ended, but for what is in quarantine."""
        return nbytes > 0 and self._first_fit(self._gaps(self._in_quarantine()), nbytes) is not None

    def ask(self, owner: Hashable, nbytes: int) -> bool:
        """Puts `owner` in the queue for `nbytes` bytes. False, and nothing changed: no lease can ever be so large.

        An owner that waits or has a lease stays as it is.
        """
        if owner in self._asks or owner in self._number_of:
            return True
        if not 0 < nbytes <= self.nbytes:
            return False
        self._asks[owner] = nbytes
        self._grant()
        return True

    def granted(self) -> list[Lease]:
        """The leases given since this was last called, in the order of asking, but for those already over."""
        untold, self._untold = self._untold, []
        return [self._leases[number] for number in untold if self._may_write(number)]

    def lease_of(self, owner: Hashable) -> Lease | None:
        number = self._number_of.get(owner)
        return None if number is None else self._leases[number]

    def withdraw(self, owner: Hashable) -> None:
        """The owner asks no longer, and a lease that it has is released. Nobody may be writing there any more."""
        if owner in self._number_of:
            self.release(self._number_of[owner])
        elif self._asks.pop(owner, None) is not None:
            self._grant()  # it may have stood in the way of smaller ones

    def release(self, number: int) -> bool:
        """Ends a lease: its bytes are free. False, and nothing changed: it is over, or in quarantine."""
        if not self._may_write(number):
            return False
        del self._number_of[self._leases[number].owner]
        self._give_back(number)
        return True

    def quarantine(self, number: int) -> None:
        """Ends a lease whose writer may still write. Its bytes stay unused until `end_quarantine`.

        The owner may ask anew.
        """
        if self._may_write(number):
            del self._number_of[self._leases[number].owner]
            self._quarantined.add(number)

    def end_quarantine(self, number: int) -> None:
        """The writer of a lease in quarantine is known to have stopped: its bytes are free."""
        if number in self._quarantined:
            self._quarantined.remove(number)
            self._give_back(number)

    def audit(self) -> None:
        """Proves that leases overlap nowhere, that bytes and owners are accounted for, and that nobody waits idly."""
        end = 0
        for lease in sorted(self._leases.values(), key=_first):
            assert lease.first >= end and lease.first % self.align == 0, f"{lease} begins before {end}, or unaligned"
            assert lease.nbytes > 0 and lease.first + lease.nbytes <= self.nbytes, f"{lease} leaves the ring"
            end = self._end(lease)
        assert all(number == lease.number < self._next_number for number, lease in self._leases.items())
        writing = {lease.owner: number for number, lease in self._leases.items() if self._may_write(number)}
        assert writing == self._number_of, f"owners {self._number_of} of leases {writing}"
        assert self._quarantined <= self._leases.keys(), f"{self._quarantined} in quarantine hold nothing"
        assert not self._asks.keys() & self._number_of.keys(), "an owner waits and has a lease"
        gaps = sum(end - first for first, end in self._gaps(self._leases.values()))
        assert gaps == self.free, f"{gaps} bytes lie between leases, {self.free} are free"
        assert not self._asks or self._place(self._wanted()) is None, (
            "the first in the queue waits though there is room"
        )

    def _grant(self) -> None:
        while self._asks:
            nbytes = self._wanted()
            first = self._place(nbytes)
            if first is None:
                return
            owner = next(iter(self._asks))
            del self._asks[owner]
            lease = Lease(self._next_number, owner, first, nbytes)
            self._next_number += 1
            self._leases[lease.number] = lease
            self._number_of[owner] = lease.number
            self._untold.append(lease.number)
            self._front = self._end(lease)

    def _give_back(self, number: int) -> None:
        del self._leases[number]
        if not self._leases:
            self._front = 0
        self._grant()

    def _place(self, nbytes: int) -> int | None:
        """Where a lease of `nbytes` would begin: after the newest if it can, else in the first gap of any."""
        gaps = self._gaps(self._leases.values())
        ahead = [(max(first, self._front), end) for first, end in gaps if end > self._front]
        # The gap that the front lies in comes whole in `gaps`: cut there, either half might be too small for ever.
        return self._first_fit((*ahead, *gaps), nbytes)

    def _gaps(self, leases: Iterable[Lease]) -> list[tuple[int, int]]:
        """[first, end) of every stretch that none of `leases` holds, in order of address."""
        gaps, first = [], 0
        for lease in sorted(leases, key=_first):
            if lease.first > first:
                gaps.append((first, lease.first))
            first = self._end(lease)
        if first < self.nbytes:
            gaps.append((first, self.nbytes))
        return gaps

    @staticmethod
    def _first_fit(gaps: Iterable[tuple[int, int]], nbytes: int) -> int | None:
        return next((first for first, end in gaps if end - first >= nbytes), None)

    def _wanted(self) -> int:
        """Bytes of the first in the queue."""
        return next(iter(self._asks.values()))

    def _may_write(self, number: int) -> bool:
        return number in self._leases and number not in self._quarantined

    def _in_quarantine(self) -> Iterator[Lease]:
        return (self._leases[number] for number in self._quarantined)

    def _end(self, lease: Lease) -> int:
        """Where the next lease may begin, or the end of the ring."""
        return min(self.nbytes, ceil_div(lease.first + lease.nbytes, self.align) * self.align)


def _first(lease: Lease) -> int:
    return lease.first
