"""Encodes messages as a mark, a signature if the workers share a secret, and a versioned envelope in MessagePack.

    "HS" | 0 | envelope                      without a shared secret
    "HS" | 1 | tag (32 bytes) | envelope     the tag is the keyed BLAKE2b hash of the envelope

The envelope and `Refused` have the same fields in every version of the protocol, so a peer with another version can be
refused with a reason. The tag proves that the sender has the secret; nothing is encrypted. A recorded message can be
replayed. This does little harm: messages are idempotent, and most of them name the incarnation of their receiver (see
`channel.py`), so a restarted receiver drops them. At worst, the handoffs with one peer fail, like after its restart.
"""

import hashlib
import hmac
import re
from functools import lru_cache
from typing import Any, get_args

import msgspec

from hotset.base.address import Address
from hotset.base.errors import BadMessage, InternalError
from hotset.base.paged_span import PagedSpan
from hotset.base.request_options import MAX_CACHE_SALT_CHARACTERS
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.messages import Hello, Message
from hotset.fleet.transfer.api import MemoryKind

MAX_BYTES = 16 << 20  # enough for a HandoffRequest of two million tokens
MAX_QUOTED = 256  # maximum characters of received text that an error quotes
MAX_TOKEN = MAX_PAGE = (1 << 31) - 1
MAX_ADDRESS = (1 << 63) - 1  # addresses are computed in int64

MEMORY_KINDS = {kind.value for kind in MemoryKind}

MARK = b"HS"
PLAIN, TAGGED = b"\x00", b"\x01"
TAG_BYTES = 32
INCARNATION = re.compile(r"[0-9a-f]{1,64}")


class _WireEnvelope(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    sender_address: str
    sender_incarnation: str
    target_incarnation: str
    kind: str
    body: msgspec.Raw


KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in KINDS.items()}
_ENVELOPES = msgspec.msgpack.Decoder(_WireEnvelope)
_ENCODER = msgspec.msgpack.Encoder()


class Codec:
    """Encodes and decodes envelopes. With a secret, it accepts only messages of workers that share the secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and not secret:
            raise InternalError("the secret is empty")
        self._key = None if secret is None else hashlib.blake2b(secret).digest()

    def encode(self, envelope: msg.Envelope) -> bytes:
        encoded = _ENCODER.encode(
            _WireEnvelope(
                protocol=msg.PROTOCOL,
                sender_address=envelope.sender_address,
                sender_incarnation=envelope.sender_incarnation,
                target_incarnation=envelope.target_incarnation,
                kind=type(envelope.message).__name__,
                body=msgspec.Raw(_ENCODER.encode(envelope.message)),
            )
        )
        if self._key is None:
            return MARK + PLAIN + encoded
        return MARK + TAGGED + self._tag(self._key, encoded) + encoded

    def decode(self, raw: bytes) -> msg.Envelope | msg.ProtocolMismatch:
        """Decodes one message. Returns ProtocolMismatch for a message in another version of the protocol, unless it is
        Refused. Raises BadMessage, and no other exception, for anything that is not a valid message."""
        envelope_bytes = self._checked(raw)
        try:
            envelope = _ENVELOPES.decode(envelope_bytes)
            _check_names(envelope)
            # Refused can be decoded in every version.
            if envelope.protocol != msg.PROTOCOL and envelope.kind != msg.Refused.__name__:
                return msg.ProtocolMismatch(
                    envelope.sender_address, envelope.sender_incarnation, envelope.protocol, envelope.kind
                )
            decoder = _DECODERS.get(envelope.kind)
            if decoder is None:
                raise BadMessage(f"its kind is unknown: {envelope.kind[:MAX_QUOTED]!r}")
            message: Message = decoder.decode(envelope.body)
            _check_message(message, envelope.sender_address)
        except BadMessage:
            raise
        except Exception as error:
            # Untrusted bytes can cause any exception: RecursionError, MemoryError, or one from a value's own checks.
            raise BadMessage(f"it cannot be decoded: {str(error)[:MAX_QUOTED]}") from error
        return msg.Envelope(envelope.sender_address, envelope.sender_incarnation, envelope.target_incarnation, message)

    def _checked(self, raw: bytes) -> bytes:
        """Checks the mark and, with a secret, the tag. Returns the bytes of the envelope."""
        if len(raw) > MAX_BYTES:
            raise BadMessage(f"it has {len(raw)} bytes, above the limit of {MAX_BYTES}")
        mark, form, body = raw[: len(MARK)], raw[len(MARK) : len(MARK) + 1], raw[len(MARK) + 1 :]
        if mark != MARK or form not in (PLAIN, TAGGED):
            raise BadMessage("it is not a message of this protocol")
        if self._key is None:
            if form == TAGGED:
                raise BadMessage("it is signed with a shared secret, but none is configured here")
            return body
        if form == PLAIN:
            raise BadMessage("it is not signed, but a shared secret is configured here")
        if not hmac.compare_digest(body[:TAG_BYTES], self._tag(self._key, body[TAG_BYTES:])):
            raise BadMessage("it is signed with another secret, or damaged")
        return body[TAG_BYTES:]

    @staticmethod
    def _tag(key: bytes, envelope: bytes) -> bytes:
        return hashlib.blake2b(envelope, digest_size=TAG_BYTES, key=key).digest()


@lru_cache(maxsize=256)  # a peer sends thousands of messages
def _is_reachable(address: str) -> bool:
    parsed = Address.parse(address)
    return parsed is not None and parsed.reachable


def _check_names(envelope: _WireEnvelope) -> None:
    """Checks the sender's address and the incarnations."""
    if not _is_reachable(envelope.sender_address):
        raise BadMessage(f"its sender's address is invalid: {envelope.sender_address[:MAX_QUOTED]!r}")
    if not INCARNATION.fullmatch(envelope.sender_incarnation):
        raise BadMessage("its sender's incarnation is invalid")
    if envelope.target_incarnation and not INCARNATION.fullmatch(envelope.target_incarnation):
        raise BadMessage("its target incarnation is invalid")


def _check_message(message: Message, sender_address: str) -> None:
    """Checks the values of a message, beyond their types."""
    match message:
        case Hello(control=control) | msg.Welcome(hello=Hello(control=control)):
            _require(control == sender_address, "it introduces a worker other than its sender")
            hello = message.hello if isinstance(message, msg.Welcome) else message
            staging = [memory for store in hello.stores.values() for memory in store.staging]
            for memory in (*hello.probes.values(), *staging):
                valid = min(memory.address, memory.nbytes) >= 0 and memory.address + memory.nbytes <= MAX_ADDRESS
                _require(valid, "staging memory or a probe is out of range")
            _require(hello.probes.keys() <= MEMORY_KINDS, "the probes name an unknown kind of memory")
            for route in message.routes if isinstance(message, msg.Welcome) else ():
                speeds = min(route.gb_per_s, route.seconds_per_write)
                _require({route.source, route.target} <= MEMORY_KINDS and speeds >= 0, "a route is invalid")
            processes = [*hello.writers, *([] if hello.process is None else [hello.process])]
            _require(all(process.pid > 0 for process in processes), "a process id is not positive")
            for store in hello.stores.values():
                _require(store.memory in MEMORY_KINDS, "a store is in an unknown kind of memory")
                for shard in store.shards:
                    _check_span(shard.span)
                    _check_slices(shard.slices)
                for keys in store.all_keys:
                    _check_span(keys)
        case msg.Refused() | msg.Ping() | msg.Pong():
            pass
        case _:
            _require(message.key.request_id != "", "request_id is empty")
            _require(message.key.attempt >= 0, "attempt is negative")
            _check_contents(message)


def _check_span(span: PagedSpan) -> None:
    numbers = [span.page_bytes, span.part_rows, span.row_bytes, span.step]
    numbers += [base for parts in span.bases for base in parts]
    _require(min(numbers) >= 0 and max(numbers) <= MAX_ADDRESS, "an address or a size is out of range")


def _check_slices(slices: msg.RowSlices) -> None:
    numbers = [number for row_slice in slices for number in row_slice]
    _require(
        min(numbers, default=0) >= 0 and max(numbers, default=0) <= MAX_ADDRESS, "a slice of a row is out of range"
    )


def _check_contents(message: Message) -> None:
    match message:
        case msg.HandoffRequest():
            prompt, pages = message.prompt, (*message.row_pages, *message.key_pages)
            ids = (*prompt.token_ids, *prompt.stop_ids)
            _require(len(prompt) > 0, "token_ids are empty")
            _require(len(prompt.cache_salt) <= MAX_CACHE_SALT_CHARACTERS, "cache_salt is too long")
            _require(0 <= message.first < len(prompt), "first is not a row of the prompt")
            _require(min(ids) >= 0 and max(ids) <= MAX_TOKEN, "a token id is out of range")
            _require(not pages or (min(pages) >= 0 and max(pages) <= MAX_PAGE), "a page number is out of range")
        case msg.Progress(_, rows):
            _require(rows >= 0, "rows is negative")
        case msg.HandoffAccepted(_, piece_bytes):
            _require(0 <= piece_bytes <= MAX_ADDRESS, "piece_bytes is out of range")
        case msg.LeaseRequest(_, piece, first, last):
            _require(0 <= piece <= MAX_TOKEN and 0 <= first < last <= MAX_TOKEN, "a piece is out of range")
        case msg.LeaseGranted(_, piece, lease, offset):
            _require(0 <= piece <= MAX_TOKEN and lease >= 0 and 0 <= offset <= MAX_ADDRESS, "a lease is out of range")
        case msg.PieceWritten(_, piece, lease):
            _require(0 <= piece <= MAX_TOKEN and lease >= 0, "a lease is out of range")
        case msg.HandoffDone(_, token_id):
            _require(0 <= token_id <= MAX_TOKEN, "token_id is out of range")


def _require(valid: bool, error: str) -> None:
    if not valid:
        raise BadMessage(error)
