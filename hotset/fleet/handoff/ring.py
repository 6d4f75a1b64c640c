"""The ring allocator grants leases of byte ranges in a ring. It only keeps records and owns no memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.schedule.handoffs import HandoffKey

ALIGN = 256  # alignment of leases, and therefore of packed pieces, in bytes

Owner = tuple[HandoffKey, int]  # a context, and the number of its piece


@dataclass(frozen=True, slots=True)
class Lease:
    """Bytes [first, first + nbytes) of the ring belong to the owner. The number of a lease is never used again."""

    number: int
    owner: Owner
    first: int
    nbytes: int


class Ring:
    """Grants free ranges of a ring of `nbytes` bytes in the order of requests.

    Each lease is one range that begins at a multiple of `align`. It is placed in the first sufficient gap after the
    newest lease or, if there is none, in the first sufficient gap of the ring. Released bytes are therefore usually
    reused late. Leases can end in any order. The bytes of an ended lease are free at once, unless the lease is in
    quarantine. Requests are never reordered: the first in the queue waits until it fits, and no other request is
    granted meanwhile. Even a request for the whole ring is therefore granted, at the latest when every lease has ended
    and none is in quarantine. A request that does not fit waits; it does not raise.

    Every call can be repeated, and a call with the number of an ended lease changes nothing. However, an owner whose
    lease has ended can request another lease. A delayed duplicate of its first request would therefore be granted
    again. The caller must filter such duplicates.
    """

    def __init__(self, nbytes: int, align: int = ALIGN) -> None:
        if not (nbytes > 0 and align > 0):
            raise InternalError(f"the size {nbytes} and the alignment {align} of a ring must be positive")
        self.nbytes, self.align = nbytes, align
        self._leases: dict[int, Lease] = {}  # by number, including those in quarantine
        self._number_of: dict[Owner, int] = {}  # number of each owner's lease, unless it is in quarantine
        self._queue: dict[Owner, int] = {}  # bytes that each waiting owner has requested, in order
        self._quarantined: set[int] = set()
        self._unreported: list[int] = []
        self._front = 0  # end of the newest lease, even if it has ended; 0 if there are no leases
        self._next_number = 0

    @property
    def held(self) -> int:
        """Bytes under a lease or in quarantine, including the padding up to the next aligned byte."""
        return sum(self._end(lease) - lease.first for lease in self._leases.values())

    @property
    def free(self) -> int:
        return self.nbytes - self.held

    @property
    def quarantined(self) -> int:
        """Bytes of `held` that only `end_quarantine` frees."""
        return sum(self._end(lease) - lease.first for lease in self._in_quarantine())

    @property
    def waiting(self) -> int:
        """The number of owners in the queue."""
        return len(self._queue)

    def fits(self, nbytes: int) -> bool:
        """Returns whether a lease of `nbytes` bytes would fit if only the leases in quarantine remained."""
        return nbytes > 0 and self._first_fit(self._gaps(self._in_quarantine()), nbytes) is not None

    def request(self, owner: Owner, nbytes: int) -> bool:
        """Puts `owner` in the queue for `nbytes` bytes. Returns False if the ring can never grant such a size.

        Does nothing and returns True if the owner already waits or has a lease.
        """
        if owner in self._queue or owner in self._number_of:
            return True
        if not 0 < nbytes <= self.nbytes:
            return False
        self._queue[owner] = nbytes
        self._grant()
        return True

    def take_granted(self) -> list[Lease]:
        """Returns the leases granted since the last call, in the order of requests, except those that have ended."""
        unreported, self._unreported = self._unreported, []
        return [self._leases[number] for number in unreported if self._may_write(number)]

    def lease_of(self, owner: Owner) -> Lease | None:
        number = self._number_of.get(owner)
        return None if number is None else self._leases[number]

    def withdraw(self, owner: Owner) -> None:
        """Removes the owner from the queue, or ends its lease and frees its bytes.

        The caller ensures that no process writes to the lease any more.
        """
        if (number := self._number_of.pop(owner, None)) is not None:
            self._free(number)
        elif self._queue.pop(owner, None) is not None:
            self._grant()  # requests behind it may fit

    def quarantine(self, number: int) -> None:
        """Ends a lease whose writer may still write. Its bytes stay unused until `end_quarantine`.

        The owner can request another lease.
        """
        if self._may_write(number):
            del self._number_of[self._leases[number].owner]
            self._quarantined.add(number)

    def end_quarantine(self, number: int) -> None:
        """Frees the bytes of a lease in quarantine whose writer has stopped."""
        if number in self._quarantined:
            self._quarantined.remove(number)
            self._free(number)

    def audit(self) -> None:
        """Proves that leases do not overlap, that all records agree, and that the first in the queue does not fit."""
        end = 0
        for lease in sorted(self._leases.values(), key=_first):
            assert lease.first >= end and lease.first % self.align == 0, f"{lease} begins before {end} or is unaligned"
            assert lease.nbytes > 0 and lease.first + lease.nbytes <= self.nbytes, f"{lease} is not inside the ring"
            end = self._end(lease)
        assert all(number == lease.number < self._next_number for number, lease in self._leases.items())
        writing = {lease.owner: number for number, lease in self._leases.items() if self._may_write(number)}
        assert writing == self._number_of, f"the owners {self._number_of} are not those of the leases {writing}"
        assert self._quarantined <= self._leases.keys(), f"{self._quarantined} are quarantined, but not all exist"
        assert not self._queue.keys() & self._number_of.keys(), "an owner waits although it has a lease"
        gaps = sum(end - first for first, end in self._gaps(self._leases.values()))
        assert gaps == self.free, f"{gaps} bytes lie between leases, but {self.free} are free"
        assert not self._queue or self._find_place(self._next_size()) is None, (
            "the first in the queue waits although it fits"
        )

    def _grant(self) -> None:
        while self._queue:
            nbytes = self._next_size()
            first = self._find_place(nbytes)
            if first is None:
                return
            owner = next(iter(self._queue))
            del self._queue[owner]
            lease = Lease(self._next_number, owner, first, nbytes)
            self._next_number += 1
            self._leases[lease.number] = lease
            self._number_of[owner] = lease.number
            self._unreported.append(lease.number)
            self._front = self._end(lease)

    def _free(self, number: int) -> None:
        del self._leases[number]
        if not self._leases:
            self._front = 0
        self._grant()

    def _find_place(self, nbytes: int) -> int | None:
        """Returns where a lease of `nbytes` begins: after the newest lease if it fits there, else in the first gap."""
        gaps = self._gaps(self._leases.values())
        ahead = [(max(first, self._front), end) for first, end in gaps if end > self._front]
        # The gap around the front is also in `gaps`, undivided: its two halves alone might always be too small.
        return self._first_fit((*ahead, *gaps), nbytes)

    def _gaps(self, leases: Iterable[Lease]) -> list[tuple[int, int]]:
        """Returns [first, end) of every range that none of `leases` holds, in order of address."""
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

    def _next_size(self) -> int:
        """Returns how many bytes the first in the queue has requested."""
        return next(iter(self._queue.values()))

    def _may_write(self, number: int) -> bool:
        return number in self._leases and number not in self._quarantined

    def _in_quarantine(self) -> Iterator[Lease]:
        return (self._leases[number] for number in self._quarantined)

    def _end(self, lease: Lease) -> int:
        """Returns the first aligned byte after a lease, or the end of the ring."""
        return min(self.nbytes, ceil_div(lease.first + lease.nbytes, self.align) * self.align)


def _first(lease: Lease) -> int:
    return lease.first
