"""What a prefill worker and a decode worker say to each other, and each to its own engine. Values only.

Decode asks, prefill serves. `->` is from decode to prefill:

    Hello ->             <- Welcome, or Refused
    Ask ->               <- Accepted
    Go ->                (acknowledges Accepted: from now on rows may be written)
                         <- Progress as rows land; then Done, or Failed
    Received ->          (acknowledges Done or Failed: the prefill worker may forget the handoff)
    Cancel ->            <- Stopped (nothing is written any more, or it is not known)
    Ping ->              <- Pong

Whatever has to be answered is sent again until it is, and means the same however often it comes. A handoff is known by
its key; of one request only the highest attempt counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hotset.base.sampling import SamplingParams
from hotset.transfer.api import Event, Writes

PROTOCOL = 1

Landing = Literal["host", "device"]
Alternatives = Mapping[int, tuple[float, int]]  # as in schedule/plan.py: token id -> (log-probability, rank)


@dataclass(frozen=True, slots=True)
class Key:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Model:
    """What must be the same on both sides, but for the name, and is shown to people where it is not."""

    name: str  # as people call it, on each side as they like
    layers: int
    row: str  # a row's layout in words: width, dtype, bytes
    key: str | None  # an index key's, likewise
    groups: int
    weights: str  # digest of the configuration, and of every weight file's size and both ends


@dataclass(frozen=True, slots=True)
class Span:
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
class Store:
    """Memory into which, or from which, contexts travel."""

    rows: Span
    keys: Span | None


@dataclass(frozen=True, slots=True)
class Hello:
    control: str  # where the sender of this listens
    model: Model
    stores: Mapping[Landing, Store]  # where contexts may land here
    transfer: str  # name of the transfer engine
    description: bytes  # for Transfer.connect


@dataclass(frozen=True, slots=True)
class Welcome:
    hello: Hello  # of the one who answers


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str  # with both sides' values


@dataclass(frozen=True, slots=True)
class Ask:
    """Compute this prompt and write its rows and index keys to these pages of mine."""

    key: Key
    token_ids: tuple[int, ...]
    params: SamplingParams
    landing: Landing
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()  # the sampler must know them where `params` forbid an early end


@dataclass(frozen=True, slots=True)
class Accepted:
    key: Key


@dataclass(frozen=True, slots=True)
class Go:
    """Nothing is written before this came: so whoever never said it knows that nobody writes to its pages."""

    key: Key


@dataclass(frozen=True, slots=True)
class Progress:
    key: Key
    rows: int  # [0, rows) have landed; 0: it is still waiting, but alive


@dataclass(frozen=True, slots=True)
class Done:
    """Everything has landed. The first token travels with the handoff."""

    key: Key
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class Failed:
    key: Key
    quiesced: bool  # nothing more will be written
    retry: bool  # asking again may help
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    key: Key


@dataclass(frozen=True, slots=True)
class Cancel:
    key: Key


@dataclass(frozen=True, slots=True)
class Stopped:
    key: Key
    quiesced: bool


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


HandoffMessage = Ask | Accepted | Go | Progress | Done | Failed | Received | Cancel | Stopped
Message = Hello | Welcome | Refused | Ping | Pong | HandoffMessage


# Between a decode engine and its receiver.


@dataclass(frozen=True, slots=True)
class Fetch:
    """Engine to receiver: have this prompt computed at `peer` (its control address). The pages are the request's."""

    peer: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Engine to receiver: nobody wants it any more. `Lost` follows, unless `Landed` is on its way already."""

    key: Key


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver to engine: every row is in place."""

    key: Key
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class Lost:
    """Receiver to engine: it ended without landing. Unless `quiesced`, its pages must not be used again."""

    key: Key
    quiesced: bool
    retry: bool  # the same peer may be asked again
    reason: str


@dataclass(frozen=True, slots=True)
class Calm:
    """Receiver to engine, after a `Lost` that was not quiesced: now it is, and the pages may be used again."""

    key: Key


# Between a prefill engine and its sender.


@dataclass(frozen=True, slots=True)
class Prefill:
    """Sender to engine: compute this prompt, and sample its first token. `key` and `peer` name it from now on."""

    peer: str
    key: Key
    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """Engine to sender: rows and index keys [first, last) will be in these pages of the host store when `after` has
    happened, and so with all that was told of the request before: events are of one stream. `pages` are all of the
    request's so far, from its first; they stay where they are."""

    peer: str
    key: Key
    first: int
    last: int
    pages: tuple[int, ...]
    after: Event | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Engine to sender: the prompt is computed whole; every `Written` of it has been told."""

    peer: str
    key: Key
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class NotComputed:
    """Engine to sender: it will not be computed. `retry`: it might be at another time."""

    peer: str
    key: Key
    retry: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Sender to engine: the request's pages are not read any more, nor is it wanted; it may be running still. Comes
    once for every `Prefill`, however that ended."""

    peer: str
    key: Key


ReceiverCommand = Fetch | GiveUp
ReceiverFact = Landed | Lost | Calm
SenderCommand = Written | Sampled | NotComputed
SenderFact = Prefill | Drop


# From a state machine to whoever drives it.


@dataclass(frozen=True, slots=True)
class Send:
    """It may be lost on the way: what matters is said again."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand this to the transfer engine, then answer with `Sender.submitted`, once for each and in this order."""

    peer: str
    key: Key
    writes: Writes
    after: Event | None
