"""The messages between a prefill worker and a decode worker, and between each of them and its own engine. Values only.

The decode worker requests, the prefill worker serves. `->` is from decode to prefill:

    Hello ->                <- Welcome, or Refused
    HandoffRequest ->       <- HandoffAccepted
    StartWrites ->          (acknowledges HandoffAccepted: from now on rows may be written)
                            <- Progress as rows land; then HandoffDone, or HandoffFailed
    HandoffAck ->           (acknowledges HandoffDone or HandoffFailed: the prefill worker may forget the handoff)
    Cancel ->               <- Cancelled (reports whether all writes have stopped, or that this is unknown)
    Ping ->                 <- Pong

Where direct writes would be many and tiny, the sender offers (in HandoffAccepted) to pack rows and write them into a
ring of the receiver, which unpacks them. If the receiver agrees (in StartWrites), then for each piece of the context,
several pieces at a time:

                            <- LeaseRequest (for space in the ring)
    LeaseGranted ->         (when there is space, in the order of the requests)
                            <- PieceWritten (the piece is in the ring)
    PieceUnpacked ->        (the piece is in its pages, and the lease has ended)

A message that needs an answer is retransmitted until the answer arrives. Every message is idempotent. A handoff is
identified by its key; of one request only the highest attempt counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hotset.base.sampling import PromptSpec
from hotset.transfer.api import DeviceEvent, Writes

PROTOCOL = 3

StoreName = str  # 'device', 'host', or the host store of a further replica
RowSlices = tuple[tuple[int, int], ...]  # (first byte in the whole model's row, bytes), in the order of storage
Alternatives = Mapping[int, tuple[float, int]]  # as in schedule/plan.py: token id -> (log-probability, rank)


@dataclass(frozen=True, slots=True)
class HandoffKey:
    request_id: str
    attempt: int


HandoffId = tuple[str, HandoffKey]  # identifies a handoff at its sender: the requesting peer, and the peer's key


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties of a model that must be equal on both sides, except for the name. A refusal shows both values."""

    name: str  # for people; each side may choose its own
    layers: int
    row: str  # a readable layout of a row: width, dtype, bytes
    key: str | None  # the same for an index key
    groups: int
    weights: str  # digest of the configuration, and of every weight file's size, beginning and end


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Rows, or index keys, in pages. Position p of a context is row p % page_rows of page p // page_rows. The rows of a
    page are divided into `len(bases[0])` consecutive parts of `part_rows` rows.

    Row r of page number n of unit u begins at bases[u][r // part_rows] + n * page_bytes + r % part_rows * row_bytes.
    """

    bases: tuple[tuple[int, ...], ...]  # [units][parts] addresses; a unit is a layer, or an index group
    page_bytes: int  # from page to page within a part
    page_rows: int
    part_rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows that hold some slices of the whole model's row, or all of it. `span.row_bytes` is the distance between rows:
    the slices may leave some of it unused at the end."""

    span: PagedSpan
    slices: RowSlices


@dataclass(frozen=True, slots=True)
class Store:
    """Memory to which, or from which, contexts are transferred. Page n is page n of every shard. Two shards may hold
    the same bytes: either can be read, and both must be written."""

    shards: tuple[Shard, ...]
    keys: PagedSpan | None  # index keys are never sharded


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Contiguous bytes that are registered with the transfer engine."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    control: str  # the control address of the worker that sends this
    model: ModelIdentity
    stores: Mapping[StoreName, Store]  # where contexts may land; a prefill worker has one, which they come from
    transfer: str  # name of the transfer engine
    description: bytes  # for Transfer.connect
    ring: MemoryRange | None = None  # for packed rows


@dataclass(frozen=True, slots=True)
class Welcome:
    hello: Hello  # of the worker that answers


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str  # with both sides' values


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """Requests that the prefill worker compute this prompt and write its rows and index keys to these pages."""

    key: HandoffKey
    prompt: PromptSpec
    landing: StoreName
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandoffAccepted:
    key: HandoffKey
    piece_bytes: int = 0  # size of the largest piece if the sender offers staging, else 0


@dataclass(frozen=True, slots=True)
class StartWrites:
    """Permits writes. The sender writes nothing before it arrives, so a receiver that never sent it can be sure that
    its pages are untouched."""

    key: HandoffKey
    staged: bool = False  # through the ring, and nothing directly to the pages


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Requests space in the ring for rows and index keys [first, last), piece number `piece` of the context."""

    key: HandoffKey
    piece: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Permits to write the piece at this offset of the ring. The number of a lease is never reused."""

    key: HandoffKey
    piece: int
    lease: int
    offset: int


@dataclass(frozen=True, slots=True)
class PieceWritten:
    """Reports that the piece is in the space of this lease, and that nothing more will be written there."""

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
    rows: int  # [0, rows) have landed; with 0 it only shows that the sender is alive


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Reports that all rows have landed, and carries the first token."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    key: HandoffKey
    quiesced: bool  # nothing more will be written
    retry: bool  # another attempt may succeed
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
    """Engine to receiver: have `peer` (a control address) compute this prompt. The pages belong to the request."""

    peer: str
    request: HandoffRequest


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Engine to receiver: the context is no longer needed. `FetchFailed` follows, unless `Landed` was already sent."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver to engine: every row is in its page."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Receiver to engine: the handoff ended without landing. Unless `quiesced`, its pages must not be used again."""

    key: HandoffKey
    quiesced: bool
    retry: bool  # another attempt at the same peer may succeed
    reason: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Receiver to engine, after a `FetchFailed` that was not quiesced: the pages may now be used again."""

    key: HandoffKey


# Between a prefill engine and its sender.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Sender to engine: compute this prompt and sample its first token. `peer` and `key` identify it from now on."""

    peer: str
    key: HandoffKey
    prompt: PromptSpec


@dataclass(frozen=True, slots=True)
class RowsComputed:
    """Engine to sender: rows and index keys [first, last) will be in these pages of the host store when `after` has
    happened. Events of a request are recorded on one stream, so all earlier rows are then there too. `pages` are all
    pages of the request so far, from its first; they do not move."""

    peer: str
    key: HandoffKey
    first: int
    last: int
    pages: tuple[int, ...]
    after: DeviceEvent | None


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """Engine to sender: the whole prompt is computed, and every `RowsComputed` of it was sent."""

    peer: str
    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Engine to sender: the prompt will not be computed. With `retry`, another attempt may succeed."""

    peer: str
    key: HandoffKey
    retry: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Sender to engine: the request's pages are no longer read, and the request is no longer needed, though it may
    still be running. It is sent exactly once for every `StartPrefill`, whatever the outcome."""

    peer: str
    key: HandoffKey


ReceiverCommand = Fetch | CancelFetch
ReceiverEvent = Landed | FetchFailed | Quiesced
SenderCommand = RowsComputed | FirstTokenSampled | PrefillFailed
SenderEvent = StartPrefill | ReleasePages


# From a state machine to the role that drives it.


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send this message. It may be lost: the state machine retransmits what matters."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Rows and index keys [first, last) of a context, packed at `address` in the layout of `handoff/staging.py`. They
    come from pages of `source` and go to pages of `target`. `row_pages` and `key_pages` are the context's pages, from
    its first, on the side that packs or unpacks."""

    source: Store
    target: Store
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]
    first: int
    last: int
    address: int


@dataclass(frozen=True, slots=True)
class SubmitWrites:
    """Pack `pack`, if given; submit the writes to the transfer engine; then call `Sender.on_submitted`, once for each
    action and in this order."""

    peer: str
    key: HandoffKey
    writes: Writes
    after: DeviceEvent | None
    pack: PackedPiece | None = None


@dataclass(frozen=True, slots=True)
class UnpackPiece:
    """Copy this piece into its pages. The copy must be complete before any later action runs."""

    piece: PackedPiece


# From the control channel.


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender and its addressee. An incarnation is a random word that a process draws at start."""

    sender_address: str  # the control address at which the sender listens
    sender_incarnation: str
    target_incarnation: str  # empty: any process that listens at the address
    message: Message


@dataclass(frozen=True, slots=True)
class ProtocolMismatch:
    """A message in another version of the protocol. Its sender can be refused; the message cannot be read."""

    sender_address: str
    sender_incarnation: str
    protocol: int
    kind: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: str  # its control address
    message: Message


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """A different process now answers at this address."""

    peer: str


ChannelEvent = MessageReceived | PeerRestarted | ProtocolMismatch
