"""The messages between a decode worker and a prefill worker, and between each of them and its own engine.

All are values without behaviour. `->` marks messages from the decode worker (the receiver of rows) to the prefill
worker (the sender of rows), `<-` the opposite direction:

    Hello ->                <- Welcome, or Refused
    HandoffRequest ->       <- HandoffAccepted; or HandoffFailed, Cancelled
    StartWrites ->          (acknowledges HandoffAccepted: from now on rows may be written)
                            <- Progress as rows land; then HandoffDone, or HandoffFailed
    HandoffAck ->           (acknowledges HandoffDone or HandoffFailed: the prefill worker may forget the handoff)
    Cancel ->               <- Cancelled (reports whether the handoff is quiesced, or that this is unknown)
    Ping ->                 <- Pong (in both directions)

*Quiesced* means that no further byte will be written. A *context* is the rows and index keys of one request.

If direct writes would be many and small, the sender offers (in HandoffAccepted) to stage the context: to pack rows into
pieces and write them into the receiver's ring, from which the receiver unpacks them. If the receiver accepts the offer
(in StartWrites), these messages follow for each piece, with several pieces in flight at a time:

                            <- LeaseRequest (for space in the ring)
    LeaseGranted ->         (when there is space, in the order of the requests)
                            <- PieceWritten (the piece is in the ring)
    PieceUnpacked ->        (the piece is in its pages, and the lease has ended)

A message that needs an answer is retransmitted until the answer arrives or a time limit has passed. Every message is
idempotent. A handoff is identified by its key, a request id and an attempt. A newer attempt of a request replaces
its older attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotset.base.paged_span import PagedSpan
from hotset.base.processes import ProcessIdentity
from hotset.base.sampling import Alternatives, PromptSpec
from hotset.engine.ports import Route
from hotset.fleet.transfer.api import Writes
from hotset.schedule.handoffs import Announcement, CancelFetch, ContextPages, DeviceEvent, HandoffKey

PROTOCOL = 10

StoreName = str  # 'device', 'host', or 'host N' for the host store of replica N
RowSlices = tuple[tuple[int, int], ...]  # (first byte in the whole model's row, length), in the order of storage


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Properties of a model that must be equal on both sides, except for the name. A refusal shows both values."""

    name: str  # appears in logs and errors; the two sides may use different names
    layers: int
    row: str  # readable layout of a row: width, dtype, bytes
    key: str | None  # readable layout of an index key, or None if the model has no indexer
    groups: int  # index groups
    weights: str  # digest of the configuration, and of every weight file's size, beginning and end


@dataclass(frozen=True, slots=True)
class Shard:
    """The memory of one rank. Its rows hold some slices of the whole model's row, or the whole row. If the slices are
    shorter than `span.row_bytes`, the bytes at the end of each row are unused."""

    span: PagedSpan
    slices: RowSlices


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Contiguous bytes that are registered with the transfer engine."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Store:
    """Memory from which contexts are read, or in which they land. Page n of a store consists of page n of every shard.
    If two shards hold the same bytes, a reader may use either of them, and a writer must write both.

    Packed pieces pass through staging memory. Every shard has its own, in its process and of its kind. Copy n of the
    index keys uses the staging memory of shard n. All staging memories of a worker have the same size.
    """

    shards: tuple[Shard, ...]
    keys: PagedSpan | None  # index keys are never sharded
    key_copies: tuple[PagedSpan, ...] = ()  # further copies of the index keys, which a writer must also write
    memory: str = "host"  # the kind of memory of the shards: 'host' or 'device'
    staging: tuple[MemoryRange, ...] = ()  # one for each shard; empty if contexts are not staged from or to this store

    @property
    def all_keys(self) -> tuple[PagedSpan, ...]:
        """Returns every copy of the index keys. It is empty if the model has none."""
        return () if self.keys is None else (self.keys, *self.key_copies)


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduces a worker to a peer."""

    control: str  # control address of the introduced worker
    model: ModelIdentity
    stores: Mapping[StoreName, Store]  # the stores in which contexts can land, or from which they are read
    transfer: str  # name of the transfer engine
    description: bytes  # result of Transfer.describe, for Transfer.connect at the peer
    process: ProcessIdentity | None = None  # None if the introduced process cannot be identified
    writers: tuple[ProcessIdentity, ...] = ()  # further processes of the introduced worker that may write
    endpoint: int = 0  # number of the endpoint that `description` describes
    probes: Mapping[str, MemoryRange] = field(default_factory=dict)  # memory for measuring routes, by kind


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello when the peer's memory is connected."""

    hello: Hello  # introduces the worker that answers
    endpoint: int = 0  # the endpoint in the answered Hello
    routes: tuple[Route, ...] = ()  # from the memory of the worker that answers; empty if there are no probes


@dataclass(frozen=True, slots=True)
class Refused:
    """Answers Hello with a refusal."""

    reason: str  # contains the values of both sides if they do not match


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """Requests that the prefill worker compute this prompt and write its rows and index keys to these pages. The decode
    worker has rows [0, first) in shared pages, which are not listed."""

    key: HandoffKey
    prompt: PromptSpec
    landing: StoreName  # the store in which the context lands
    row_pages: tuple[int, ...]  # pages of the context, beginning with the page that holds row `first`
    key_pages: tuple[int, ...]  # the same for index keys
    first: int = 0  # rows and index keys [first, len(prompt)) are written; row `first` begins a page


@dataclass(frozen=True, slots=True)
class HandoffAccepted:
    """Reports that the prompt will be computed. Writes wait for StartWrites."""

    key: HandoffKey
    piece_bytes: int = 0  # size of the largest piece if the sender offers staging, else 0


@dataclass(frozen=True, slots=True)
class StartWrites:
    """Permits writes. The sender writes nothing before this message arrives, so a receiver that has never sent it can
    be sure that its pages are untouched."""

    key: HandoffKey
    staged: bool = False  # permits writes into leases in the ring, and none to the pages


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Requests space in the ring for rows and index keys [first, last), piece number `piece` of the context."""

    key: HandoffKey
    piece: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Permits the sender to write the piece at this offset of the ring. The number of a lease is never reused."""

    key: HandoffKey
    piece: int
    lease: int
    offset: int


@dataclass(frozen=True, slots=True)
class PieceWritten:
    """Reports that the piece is in the ring, and that nothing more will be written to this lease."""

    key: HandoffKey
    piece: int
    lease: int


@dataclass(frozen=True, slots=True)
class PieceUnpacked:
    """Reports that the piece is in its pages, and that its lease has ended."""

    key: HandoffKey
    piece: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports how many rows have landed. It is also sent without new rows, as a sign of life."""

    key: HandoffKey
    rows: int  # rows [0, rows) have landed


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Reports that all rows have landed, and carries the first token."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """Reports that the prefill worker has ended the handoff, or does not begin it."""

    key: HandoffKey
    quiesced: bool  # no further byte will be written; if False, this is unknown
    retry: bool  # another attempt may succeed
    reason: str


@dataclass(frozen=True, slots=True)
class HandoffAck:
    """Acknowledges HandoffDone or HandoffFailed."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Cancel:
    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answers Cancel, or a HandoffRequest of a handoff that has ended or that a newer attempt has replaced."""

    key: HandoffKey
    quiesced: bool  # no further byte will be written; if False, this is unknown


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers Ping."""

    number: int  # the number of the Ping
    connected: bool = True  # False if a prefill worker has no Hello of this peer, or has forgotten the peer


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
    """Engine to receiver: request this prompt from `peer`, a control address. The engine has reserved the pages, and
    does not use them until the handoff has ended."""

    peer: str
    request: HandoffRequest


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver to engine: every row and index key is in its page."""

    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Receiver to engine: the handoff has failed. Unless `quiesced`, its pages must not be used until `Quiesced`."""

    key: HandoffKey
    quiesced: bool
    retry: bool  # another attempt at the same peer may succeed
    reason: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Receiver to engine, after a `FetchFailed` that was not quiesced: the pages can be used again."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class RoutesMeasured:
    """Agent to decode engine: a prefill worker is connected, and has measured its routes to this worker."""

    peer: str
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Agent to decode engine: a prefill worker that handoffs depend on is silent. Prompts need not wait for it."""

    peer: str
    reason: str


# Between a prefill engine and its sender.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Sender to engine: compute this prompt and sample its first token. `peer` and `key` identify the prompt."""

    peer: str
    key: HandoffKey
    prompt: PromptSpec
    from_device: bool = False  # the rows should stay in the device pool until `ReleasePages`, and be read there


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Sender to engine: the sender no longer needs the request's pages, although a hung write may still read them. The
    engine can end the request, which may still be running. This event is sent exactly once for every `StartPrefill`,
    whether the handoff succeeds or fails."""

    peer: str
    key: HandoffKey


ReceiverCommand = Fetch | CancelFetch
ReceiverEvent = Landed | FetchFailed | Quiesced | RoutesMeasured | PeerLost
SenderCommand = Announcement
SenderEvent = StartPrefill | ReleasePages


# From a state machine to the role that drives it.


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send this message. It may be lost; the state machine retransmits messages that need an answer."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Rows and index keys [first, last) of a context that are packed, or to be packed, at `offset` of the staging
    memory. `staging.py` describes the layout. The sender packs them from pages of `source`; the receiver unpacks them
    to pages of `target`."""

    source: Store
    target: Store
    pages: ContextPages  # on the side that packs or unpacks
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class SubmitWrites:
    """Pack the piece `pack`, if given. Then submit the writes to the transfer engine as one list, and call
    `Sender.on_write_ended` when it has ended. The actions must run in the order in which the sender returned them."""

    peer: str
    key: HandoffKey
    number: int  # of the list; no other list of this sender has it
    writes: Writes
    after: DeviceEvent | None  # the transfer engine begins to write when this has happened
    pack: PackedPiece | None = None


@dataclass(frozen=True, slots=True)
class UnpackPiece:
    """Copy this piece into its pages, and then call `Receiver.on_unpacked`. Events of this handoff must wait for the
    copy, because they allow the engine to use the pages."""

    key: HandoffKey
    number: int
    piece: PackedPiece


# From the control channel.


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender and its target. An incarnation is a random string that a process chooses at start."""

    sender_address: str  # the control address at which the sender listens
    sender_incarnation: str
    target_incarnation: str  # if empty, the message is for any process that listens at the target's address
    message: Message


@dataclass(frozen=True, slots=True)
class ProtocolMismatch:
    """A message in another version of the protocol, which cannot be decoded. Its sender can be refused."""

    sender_address: str
    sender_incarnation: str
    protocol: int
    kind: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: str  # control address
    message: Message


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """A different process now answers at this address."""

    peer: str


ChannelEvent = MessageReceived | PeerRestarted | ProtocolMismatch
