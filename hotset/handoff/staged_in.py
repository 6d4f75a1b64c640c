"""The decode side of staging: who may write where in the ring, and which pieces of which context are in their pages.

Pure, like the machine that owns it. Room in the ring is a lease; from `Lent` on its sender may write there, until it
says `Staged`, or that it has stopped. The pages of a staged context are written by this worker alone: whatever becomes
of the sender, it is only leases that can be in doubt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotset.handoff.messages import Ask, Hello, Key, Landing, Lent, Packed, Send, Space, Staged, Store, Unpacked, Want
from hotset.handoff.staging import packed_row_bytes
from hotset.memory.ring import Ring

Owner = tuple[Key, int]  # of a lease: the handoff, and the number of a piece


@dataclass(slots=True)
class _Context:
    peer: str
    ask: Ask
    source: Store
    target: Store
    piece_bytes: int  # at the most
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # that wait for room, or have it: their rows
    unpacked: dict[int, int] = field(default_factory=dict)  # by number: rows
    stopping: bool = False  # room that it does not have yet is wanted no more
    doubtful: list[int] = field(default_factory=list)  # leases in quarantine

    def packed(self, piece: int, address: int) -> Packed:
        first, last = self.pieces[piece]
        pages = self.ask.row_pages, self.ask.key_pages
        return Packed(self.source, self.target, *pages, first, last, address)


class StagedIn:
    """The ring, and every context on its way through it. Only the receiver changes it."""

    def __init__(self, space: Space, stores: Mapping[Landing, Store]) -> None:
        """`space` is the ring's memory. `stores` are the landings into which this process can unpack."""
        self.ring = Ring(space.nbytes)
        self._space, self._stores = space, dict(stores)
        self._contexts: dict[Key, _Context] = {}

    def begin(self, peer: str, hello: Hello, ask: Ask, piece_bytes: int) -> bool:
        """False: it cannot come this way. Too much of the ring may be in quarantine."""
        target = self._stores.get(ask.landing)
        if target is None or len(hello.stores) != 1 or not self.ring.fits(piece_bytes):
            return False
        (source,) = hello.stores.values()
        self._contexts[ask.key] = _Context(peer, ask, source, target, piece_bytes)
        return True

    def want(self, want: Want) -> list[Send]:
        """Puts a piece in the queue for room. Returns what there is to say now; the rest comes with `granted`."""
        context, owner = self._contexts[want.key], (want.key, want.piece)
        if want.piece in context.unpacked:
            return [Send(context.peer, Unpacked(want.key, want.piece))]
        lease = self.ring.lease_of(owner)
        if lease is not None:
            return [Send(context.peer, Lent(want.key, want.piece, lease.number, lease.first))]
        nbytes = (want.last - want.first) * packed_row_bytes(context.source, context.target)
        sound = 0 <= want.first < want.last <= len(context.ask.token_ids) and nbytes <= context.piece_bytes
        if sound and not context.stopping and want.piece not in context.pieces:
            context.pieces[want.piece] = want.first, want.last
            self.ring.ask(owner, nbytes)
        return []

    def granted(self) -> list[Send]:
        """What there is to say to those who have got room since this was called last."""
        said = []
        for lease in self.ring.granted():
            key, piece = self._owner(lease.owner)
            said.append(Send(self._contexts[key].peer, Lent(key, piece, lease.number, lease.first)))
        return said

    def staged(self, staged: Staged) -> Packed | None:
        """A piece is in the ring: what is to be unpacked. None: it was, or the lease is not that piece's. The caller
        unpacks before it says anything to anybody: the room is given to others here."""
        context, owner = self._contexts[staged.key], (staged.key, staged.piece)
        lease = self.ring.lease_of(owner)
        if lease is None or lease.number != staged.lease:
            return None
        packed = context.packed(staged.piece, self._space.address + lease.first)
        del context.pieces[staged.piece]
        context.unpacked[staged.piece] = packed.last - packed.first
        self.ring.release(lease.number)
        return packed

    def is_unpacked(self, key: Key, piece: int) -> bool:
        return piece in self._contexts[key].unpacked

    def rows(self, key: Key) -> int:
        """Of a context: so many are in their pages."""
        return sum(self._contexts[key].unpacked.values())

    def stop(self, key: Key) -> None:
        """Nobody wants this context any more. Its sender may still write to the room that it has."""
        context = self._contexts[key]
        context.stopping = True
        for piece in list(context.pieces):
            if self.ring.lease_of((key, piece)) is None:
                self.ring.withdraw((key, piece))
                del context.pieces[piece]

    def doubt(self, key: Key) -> bool:
        """Quarantines the context's leases until `end_quarantine`. Returns whether it has any."""
        self.stop(key)
        context = self._contexts[key]
        for piece in context.pieces:
            lease = self.ring.lease_of((key, piece))
            assert lease is not None
            self.ring.quarantine(lease.number)
            context.doubtful.append(lease.number)
        context.pieces.clear()
        return bool(context.doubtful)

    def end_quarantine(self, key: Key) -> None:
        """Its sender has stopped."""
        for number in self._contexts[key].doubtful:
            self.ring.end_quarantine(number)

    def end(self, key: Key) -> None:
        """Nothing more comes of it. Room that is in doubt stays so for good."""
        self.stop(key)
        for piece in self._contexts.pop(key).pieces:
            self.ring.withdraw((key, piece))

    def audit(self, keys: set[Key]) -> None:
        """Proves that these contexts, and no others, hold or want room."""
        self.ring.audit()
        assert self._contexts.keys() == keys, f"staged contexts {self._contexts.keys()}, not {keys}"
        owners = {(key, piece) for key, context in self._contexts.items() for piece in context.pieces}
        leased = sum(self.ring.lease_of(owner) is not None for owner in owners)
        assert leased + self.ring.waiting == len(owners), f"{self.ring.waiting} wait, {leased} have room: {owners}"
        assert leased or self.ring.held == self.ring.quarantined, "room that nobody has is not free"
        for key, context in self._contexts.items():
            assert not context.unpacked.keys() & context.pieces.keys(), f"{key}: unpacked, and wanted"

    @staticmethod
    def _owner(owner: object) -> Owner:
        assert isinstance(owner, tuple)
        key, piece = owner
        return key, piece
