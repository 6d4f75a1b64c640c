"""What a prefill worker and a decode worker say to each other, and each to its own engine. Values only.

Decode asks, prefill serves. `->` is from decode to prefill:

    Hello ->             <- Welcome, or Refused
    Ask ->               <- Accepted
    Go ->                (acknowledges Accepted: from now on rows may be written)
                         <- Progress as rows land; then Done, or Failed
    Received ->          (acknowledges Done or Failed: the prefill worker may forget the handoff)
    Cancel ->            <- Stopped (nothing is written any more, or it is not known)
    Ping ->              <- Pong

Where direct writes would be many and tiny, the sender offers (in Accepted) to pack rows and write them into a ring of
the receiver, which unpacks them. If the receiver takes that (in Go), then for each piece of the context, several at a
time:

                         <- Want (room in the ring, again until answered)
    Lent ->              (once there is room, first come first served)
                         <- Staged (the piece was written there; again until answered)
    Unpacked ->          (the piece is in its pages, the room is taken back)

Whatever has to be answered is sent again until it is, and means the same however often it comes. A handoff is known by
its key; of one request only the highest attempt counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hotset.base.sampling import PromptSpec
from hotset.transfer.api import DeviceEvent, Writes

PROTOCOL = 3

Landing = str  # 'device', 'host', or the host store of a further replica
RowSlices = tuple[
    tuple[int, int], ...
]  # (first byte in the whole model's row, bytes), one after another as they are stored
Alternatives = Mapping[int, tuple[float, int]]  # as in schedule/plan.py: token id -> (log-probability, rank)


@dataclass(frozen=True, slots=True)
class HandoffKey:
    request_id: str
    attempt: int


HandoffId = tuple[str, HandoffKey]  # of a handoff to its sender: the peer that asked, and the peer's key


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What must be the same on both sides, but for the name, and is shown to people where it is not."""

    name: str  # as people call it, on each side as they like
    layers: int
    row: str  # a row's layout in words: width, dtype, bytes
    key: str | None  # an index key's, likewise
    groups: int
    weights: str  # digest of the configuration, and of every weight file's size and both ends


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Rows, or index keys, that lie in pages. Position p of a context is row p % page_rows of page p // page_rows;
    rows of a page lie in `len(bases[0])` parts one after another, `part_rows` to a part.

    Row r of page number n of unit u begins at bases[u][r // part_rows] + n * page_bytes + r % part_rows * row_bytes.
    """

    bases: tuple[tuple[int, ...], ...]  # [units][parts] addresses; a unit is a layer, or an index group
    page_bytes: int  # from page to page within a part
    page_rows: int
    part_rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows that hold parts of the whole model's row, or all of it. `span.row_bytes` is from row to row: the slices may
    leave some of it free at the end."""

    span: PagedSpan
    slices: RowSlices


@dataclass(frozen=True, slots=True)
class Store:
    """Memory into which, or from which, contexts travel. Page n is page n of every shard. Two shards may hold the same
    bytes: either will do to read from, and both have to be written."""

    shards: tuple[Shard, ...]
    keys: PagedSpan | None  # index keys are never divided


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Bytes at one place, registered with the transfer engine."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    control: str  # where the sender of this listens
    model: ModelIdentity
    stores: Mapping[Landing, Store]  # where contexts may land here; of a prefill worker one, that they come from
    transfer: str  # name of the transfer engine
    description: bytes  # for Transfer.connect
    ring: MemoryRange | None = None  # through which packed rows may come


@dataclass(frozen=True, slots=True)
class Welcome:
    hello: Hello  # of the one who answers


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str  # with both sides' values


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """Compute this prompt and write its rows and index keys to these pages of mine."""

    key: HandoffKey
    prompt: PromptSpec
    landing: Landing
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandoffAccepted:
    key: HandoffKey
    piece_bytes: int = 0  # of the largest piece, if the rows should come by way of the ring


@dataclass(frozen=True, slots=True)
class StartWrites:
    """Nothing is written before this came: so whoever never said it knows that nobody writes to its pages."""

    key: HandoffKey
    staged: bool = False  # by way of the ring, and nothing straight to the pages


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Room in the ring for rows and index keys [first, last), which are piece number `piece` of the context."""

    key: HandoffKey
    piece: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The piece may be written at this offset of the ring. A lease's number is never used again."""

    key: HandoffKey
    piece: int
    lease: int
    offset: int


@dataclass(frozen=True, slots=True)
class PieceWritten:
    """The piece was written where this lease is: nobody writes there any more."""

    key: HandoffKey
    piece: int
    lease: int


@dataclass(frozen=True, slots=True)
class PieceUnpacked:
    key: HandoffKey
    piece: int


@dataclass(frozen=True, slots=True)
class Progress:
    key: HandoffKey
    rows: int  # [0, rows) have landed; 0: it is still waiting, but alive


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Everything has landed. The first token travels with the handoff."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    key: HandoffKey
    quiesced: bool  # nothing more will be written
    retry: bool  # asking again may help
    reason: str


@dataclass(frozen=True, slots=True)
class HandoffAck:
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Cancel:
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Cancelled:
    key: HandoffKey
    quiesced: bool


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


StagingMessage = LeaseRequest | LeaseGranted | PieceWritten | PieceUnpacked
HandoffMessage = (
    HandoffRequest
    | HandoffAccepted
    | StartWrites
    | Progress
    | HandoffDone
    | HandoffFailed
    | HandoffAck
    | Cancel
    | Cancelled
    | StagingMessage
)
Message = Hello | Welcome | Refused | Ping | Pong | HandoffMessage


# Between a decode engine and its receiver.


@dataclass(frozen=True, slots=True)
class Fetch:
    """Engine to receiver: have this prompt computed at `peer` (its control address). The pages are the request's."""

    peer: str
    ask: HandoffRequest


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Engine to receiver: nobody wants it any more. `FetchFailed` follows, unless `Landed` is on its way already."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver to engine: every row is in place."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Receiver to engine: it ended without landing. Unless `quiesced`, its pages must not be used again."""

    key: HandoffKey
    quiesced: bool
    retry: bool  # the same peer may be asked again
    reason: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Receiver to engine, after a `FetchFailed` that was not quiesced: now it is, and the pages may be used again."""

    key: HandoffKey


# Between a prefill engine and its sender.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Sender to engine: compute this prompt, and sample its first token. `key` and `peer` name it from now on."""

    peer: str
    key: HandoffKey
    prompt: PromptSpec


@dataclass(frozen=True, slots=True)
class RowsComputed:
    """Engine to sender: rows and index keys [first, last) will be in these pages of the host store when `after` has
    happened, and so with all that was told of the request before: events are of one stream. `pages` are all of the
    request's so far, from its first; they stay where they are."""

    peer: str
    key: HandoffKey
    first: int
    last: int
    pages: tuple[int, ...]
    after: DeviceEvent | None


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """Engine to sender: the prompt is computed whole; every `RowsComputed` of it has been told."""

    peer: str
    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Engine to sender: it will not be computed. `retry`: it might be at another time."""

    peer: str
    key: HandoffKey
    retry: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Sender to engine: the request's pages are not read any more, nor is it wanted; it may be running still. Comes
    once for every `StartPrefill`, however that ended."""

    peer: str
    key: HandoffKey


ReceiverCommand = Fetch | CancelFetch
ReceiverEvent = Landed | FetchFailed | Quiesced
SenderCommand = RowsComputed | FirstTokenSampled | PrefillFailed
SenderEvent = StartPrefill | ReleasePages


# From a state machine to whoever drives it.


@dataclass(frozen=True, slots=True)
class SendMessage:
    """It may be lost on the way: what matters is said again."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Rows and index keys [first, last) of a context, packed at `address` as `handoff/staging.py` says: out of pages of
    `source`, and to be put into pages of `target`. `row_pages` and `key_pages` are the context's, from its first, on
    the side that packs or unpacks."""

    source: Store
    target: Store
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]
    first: int
    last: int
    address: int


@dataclass(frozen=True, slots=True)
class SubmitWrites:
    """Pack, if there is something to pack; hand this to the transfer engine; then answer with `Sender.submitted`, once
    for each and in this order."""

    peer: str
    key: HandoffKey
    writes: Writes
    after: DeviceEvent | None
    pack: PackedPiece | None = None


@dataclass(frozen=True, slots=True)
class UnpackPiece:
    """Put this piece into its pages, to the end, before anything that comes after is done."""

    piece: PackedPiece


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message, who sent it and for whom it is."""

    origin: str  # the control address at which its sender listens
    sender: str  # its incarnation: drawn anew whenever a process starts
    addressee: str  # the incarnation that it is for; empty: whoever listens there now
    message: Message


@dataclass(frozen=True, slots=True)
class ProtocolMismatch:
    """A message in another version of the protocol: its sender can be refused, and no more."""

    origin: str
    sender: str
    protocol: int
    kind: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: str  # its control address
    message: Message


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """The process at this address is another one than before."""

    peer: str


ChannelEvent = MessageReceived | PeerRestarted | ProtocolMismatch
