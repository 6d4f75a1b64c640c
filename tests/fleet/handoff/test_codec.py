"""Tests of the codec: messages are decoded as they were encoded, and any other input raises BadMessage."""

import struct
import tracemalloc
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import BadMessage
from hotset.base.paged_span import PagedSpan
from hotset.base.request_options import MAX_CACHE_SALT_CHARACTERS
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.structure import Structure
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.codec import MARK, MAX_BYTES, PLAIN, TAG_BYTES, TAGGED, Codec
from hotset.fleet.handoff.layout import whole_rows
from hotset.schedule.handoffs import HandoffKey

ORIGIN = "127.0.0.1:9000"
SECRET = b"a secret that peers share"
KEY = HandoffKey("request-7/0", 2)
SPAN = PagedSpan(((1 << 47, 5), (64, 128)), page_bytes=4096, part_rows=32, row_bytes=128, step=2)
HELLO = msg.Hello(
    ORIGIN,
    msg.ModelIdentity("demo", 2, "bf16 [64]", "bf16 [16]", 1, "0f" * 16),
    {"host": msg.Store(whole_rows(SPAN), replace(SPAN, row_bytes=32)), "device": msg.Store(whole_rows(SPAN), None)},
    "loopback",
    bytes(range(256)),
)
PARAMS = SamplingParams(
    temperature=0.3,
    seed=-5,
    max_tokens=None,
    stop=("a", "ß"),
    stop_token_ids=(3,),
    logit_bias={7: -1.5},
    logprobs=2,
    structure=Structure("choice", '["a", "ß"]'),
)
MESSAGES: list[msg.Message] = [
    HELLO,
    msg.Welcome(HELLO),
    msg.Refused("the model's layers differ: 2 here, 3 there"),
    msg.HandoffRequest(
        KEY, PromptSpec(tuple(range(300)), PARAMS, frozenset({2, 3}), "ß"), "device", (0, 70_000), (1,), 64
    ),
    replace(
        HELLO,
        stores={
            "host 1": msg.Store(
                (msg.Shard(SPAN, ((0, 8), (64, 8))),) * 2,
                None,
                memory="device",
                staging=(msg.MemoryRange(1 << 46, 1 << 26),) * 2,
            )
        },
    ),
    msg.HandoffAccepted(KEY),
    msg.HandoffAccepted(KEY, 1 << 20),
    msg.StartWrites(KEY),
    msg.StartWrites(KEY, True),
    msg.LeaseRequest(KEY, 3, 0, 77),
    msg.LeaseGranted(KEY, 3, 1 << 40, 1 << 30),
    msg.PieceWritten(KEY, 3, 1 << 40),
    msg.PieceUnpacked(KEY, 3),
    msg.Progress(KEY, 0),
    msg.HandoffDone(KEY, 11, {11: (-0.25, 1), 3: (float("-inf"), 9)}),
    msg.HandoffDone(KEY, 11, None),
    msg.HandoffFailed(KEY, False, True, "a write failed"),
    msg.HandoffAck(KEY),
    msg.Cancel(KEY),
    msg.Cancelled(KEY, True),
    msg.Ping(0),
    msg.Pong((1 << 63) - 1),
]


def envelope(message: msg.Message, **changes: Any) -> msg.Envelope:
    return replace(msg.Envelope(ORIGIN, "ab12", "cd34", message), **changes)


def encode_fields(*fields: object) -> bytes:
    """Encodes an unsigned message whose envelope has these fields, valid or not."""
    return MARK + PLAIN + msgspec.msgpack.encode(fields)


def encode_raw(kind: str, fields: object, **envelope: Any) -> bytes:
    """Encodes a message of type `kind` with these fields. `envelope` replaces fields of an otherwise valid envelope."""
    head = {
        "protocol": msg.PROTOCOL,
        "sender_address": ORIGIN,
        "sender_incarnation": "ab12",
        "target_incarnation": "",
    } | envelope
    return encode_fields(*head.values(), kind, fields)


def test_every_message_type_has_an_example() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(msg.Message))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_decoded_as_they_were_encoded(message: msg.Message, secret: bytes | None) -> None:
    sent = envelope(message)
    assert Codec(secret).decode(Codec(secret).encode(sent)) == sent


@examples(60)
@given(st.binary(max_size=400), st.sampled_from([b"", MARK, MARK + PLAIN, MARK + TAGGED]), st.booleans())
def test_random_bytes_raise_bad_message(noise: bytes, head: bytes, secret: bool) -> None:
    with pytest.raises(BadMessage):
        Codec(SECRET if secret else None).decode(head + noise)


@examples(60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=5),
        max_leaves=30,
    )
)
def test_valid_msgpack_that_is_not_a_message_raises_bad_message(value: object) -> None:
    with pytest.raises(BadMessage):
        Codec().decode(MARK + PLAIN + msgspec.msgpack.encode(value))


@examples(60)
@given(st.sampled_from(MESSAGES), st.data())
def test_truncated_or_flipped_messages_raise_bad_message_or_are_valid(
    message: msg.Message, data: st.DataObject
) -> None:
    """Without a secret, a flipped bit may result in another valid message."""
    raw = bytearray(Codec().encode(envelope(message)))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = Codec().decode(bytes(raw))
    except BadMessage:
        return
    assert isinstance(found, msg.ProtocolMismatch) or isinstance(found.message, get_args(msg.Message))


@examples(40)
@given(st.sampled_from(MESSAGES), st.data())
def test_with_a_secret_any_flipped_bit_raises_bad_message(message: msg.Message, data: st.DataObject) -> None:
    raw = bytearray(Codec(SECRET).encode(envelope(message)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadMessage):
        Codec(SECRET).decode(bytes(raw))


@pytest.mark.parametrize(
    ("sent_with", "read_with", "error"),
    [
        (b"another", SECRET, "another secret"),
        (None, SECRET, "not signed"),
        (SECRET, None, "none is configured here"),
    ],
)
def test_the_error_tells_a_wrong_secret_from_a_missing_one(
    sent_with: bytes | None, read_with: bytes | None, error: str
) -> None:
    with pytest.raises(BadMessage, match=error):
        Codec(read_with).decode(Codec(sent_with).encode(envelope(msg.Ping(1))))


def test_a_truncated_tag_raises_bad_message() -> None:
    with pytest.raises(BadMessage, match="another secret"):
        Codec(SECRET).decode(MARK + TAGGED + bytes(TAG_BYTES - 1))


def test_only_the_envelope_of_a_message_of_another_version_is_decoded() -> None:
    newer = encode_raw("Hello", {"unknown": "field"}, protocol=msg.PROTOCOL + 1)
    assert Codec().decode(newer) == msg.ProtocolMismatch(ORIGIN, "ab12", msg.PROTOCOL + 1, "Hello")
    assert isinstance(Codec().decode(encode_raw("HandoffRequest", 3, protocol=0)), msg.ProtocolMismatch)


def test_refused_is_decoded_in_every_version() -> None:
    refusal = Codec().decode(encode_raw("Refused", {"reason": "too old"}, protocol=msg.PROTOCOL + 7))
    assert isinstance(refusal, msg.Envelope) and refusal.message == msg.Refused("too old")


def test_an_envelope_of_a_later_version_may_have_more_fields() -> None:
    extended = encode_fields(msg.PROTOCOL + 1, ORIGIN, "ab12", "", "Refused", {"reason": "too old"}, "something new")
    assert isinstance(Codec().decode(extended), msg.Envelope)


VALID_REQUEST: dict[str, Any] = msgspec.to_builtins(MESSAGES[3], builtin_types=(bytes,))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": {"token_ids": []}},
        {"prompt": {"token_ids": [1, -1]}},
        {"prompt": {"token_ids": [1 << 31]}},
        {"prompt": {"token_ids": [True]}},
        {"prompt": {"token_ids": ["1"]}},
        {"prompt": {"stop_ids": [-2]}},
        {"prompt": {"cache_salt": "x" * (MAX_CACHE_SALT_CHARACTERS + 1)}},
        {"prompt": {"cache_salt": 3}},
        {"first": -1},
        {"first": 300},
        {"first": None},
        {"row_pages": [-1]},
        {"row_pages": [1 << 31]},
        {"key_pages": [(1 << 64) - 1]},
        {"key_pages": [0.5]},
        {"landing": 7},
        {"key": {"request_id": "", "attempt": 0}},
        {"key": {"request_id": "r", "attempt": -1}},
        {"key": {"request_id": "r"}},
        {"key": None},
        {"prompt": {"params": {"temperature": -1.0}}},
        {"prompt": {"params": {"temperature": float("nan")}}},
        {"prompt": {"params": {"seed": 1 << 63}}},
        {"prompt": {"params": {"stop": 3}}},
        {"prompt": {"params": {"n": "1"}}},
    ],
    ids=str,
)
def test_a_request_with_an_invalid_field_raises_bad_message(changes: dict[str, Any]) -> None:
    assert isinstance(Codec().decode(encode_raw("HandoffRequest", VALID_REQUEST)), msg.Envelope)
    prompt = VALID_REQUEST["prompt"] | changes.get("prompt", {})
    with pytest.raises(BadMessage):
        Codec().decode(encode_raw("HandoffRequest", VALID_REQUEST | changes | {"prompt": prompt}))


@pytest.mark.parametrize(
    "raw",
    [
        encode_raw("UnknownType", {}),
        encode_raw("Ping", {"number": "one"}),
        encode_raw("Ping", {"number": 1 << 64 - 1, "x": b""}, sender_incarnation=""),
        encode_raw("Ping", {"number": 1}, sender_incarnation="not hex"),
        encode_raw("Ping", {"number": 1}, target_incarnation="\n"),
        encode_raw("Ping", {"number": 1}, sender_address="127.0.0.1"),
        encode_raw("Ping", {"number": 1}, sender_address="127.0.0.1:0"),
        encode_raw("Ping", {"number": 1}, sender_address="127.0.0.1:65536"),
        encode_raw("Ping", {"number": 1}, sender_address="line\nfeed:80"),
        encode_raw("Ping", {"number": 1}, sender_address="ipc:///tmp/x:80"),
        encode_raw("Ping", {"number": 1}, protocol="1"),
        encode_raw("Hello", msgspec.to_builtins(replace(HELLO, control="10.0.0.1:1"), builtin_types=(bytes,))),
        encode_raw("Progress", {"key": {"request_id": "r", "attempt": 0}, "rows": -1}),
        encode_raw("HandoffDone", {"key": {"request_id": "r", "attempt": 0}, "token_id": -1, "alternatives": None}),
        encode_raw("HandoffAccepted", {"key": {"request_id": "r", "attempt": 0}, "piece_bytes": -1}),
        encode_raw("LeaseRequest", {"key": {"request_id": "r", "attempt": 0}, "piece": 0, "first": 4, "last": 4}),
        encode_raw("LeaseRequest", {"key": {"request_id": "r", "attempt": 0}, "piece": -1, "first": 0, "last": 4}),
        encode_raw("LeaseGranted", {"key": {"request_id": "r", "attempt": 0}, "piece": 0, "lease": 0, "offset": -1}),
        encode_raw("PieceWritten", {"key": {"request_id": "r", "attempt": 0}, "piece": 0, "lease": -1}),
        encode_fields(msg.PROTOCOL, ORIGIN, "ab12", ""),
        encode_fields(),
    ],
)
def test_unknown_types_and_values_out_of_range_raise_bad_message(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        Codec().decode(raw)


ROWS = whole_rows(SPAN)
BEYOND = [
    *(
        msg.Store(ROWS, replace(SPAN, **changes))
        for changes in ({"bases": ((-1,),)}, {"bases": ((1 << 63,),)}, {"page_bytes": 1 << 63}, {"row_bytes": -1})
    ),
    *(msg.Store((msg.Shard(SPAN, (part,)),), None) for part in ((-1, 8), (0, -8), (1 << 63, 8))),
    *(msg.Store(ROWS, None, staging=(msg.MemoryRange(*ends),)) for ends in ((-1, 8), (8, -1), (1 << 62, 1 << 62))),
]


@pytest.mark.parametrize(
    ("store", "error"),
    [
        *((store, "out of range") for store in BEYOND),
        (msg.Store(ROWS, None, memory="tape"), "unknown kind of memory"),
    ],
)
def test_a_store_beyond_the_address_range_or_in_an_unknown_kind_of_memory_raises_bad_message(
    store: msg.Store, error: str
) -> None:
    hello = replace(HELLO, stores={"host": store})
    for message in (hello, msg.Welcome(hello)):
        with pytest.raises(BadMessage, match=error):
            Codec().decode(Codec().encode(envelope(message)))


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["array", "map", "text", "bytes"])
@pytest.mark.parametrize("length", [100_000_000, 0xFFFFFFFF])
def test_a_false_length_does_not_allocate_memory(head: bytes, length: int) -> None:
    prefix = msgspec.msgpack.encode((msg.PROTOCOL, ORIGIN, "ab12", "", "HandoffRequest"))
    field = msgspec.msgpack.encode({"prompt": {"token_ids": 0}})[:-1] + head + struct.pack(">I", length) + b"\x01"
    raw = MARK + PLAIN + bytes([prefix[0] + 1]) + prefix[1:] + field
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage):
            Codec().decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_messages_that_are_too_deep_or_too_large_raise_bad_message() -> None:
    with pytest.raises(BadMessage):
        Codec().decode(encode_raw("Ping", {})[:-1] + b"\x91" * 1_000_000)
    with pytest.raises(BadMessage, match="above the limit"):
        Codec().decode(bytes(MAX_BYTES + 1))


def test_a_request_of_two_million_tokens_is_below_the_size_limit() -> None:
    pages = tuple(range(3_125))
    tenth = msg.HandoffRequest(KEY, PromptSpec((250_000,) * 200_000, SamplingParams()), "host", pages, pages)
    assert 10 * len(Codec(SECRET).encode(envelope(tenth))) < MAX_BYTES
