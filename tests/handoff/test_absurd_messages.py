"""No message that the codec accepts kills an agent, however absurd it is."""

import numpy as np
from handoff_engines import LAYERS, MODEL, POISON, ROW_BYTES, Memory, first_token, until
from handoff_world import OURS, Clock, Dictated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotset.base.errors import BadMessage
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.agent import HandoffAgent, HandoffEvent
from hotset.handoff.codec import Codec
from hotset.handoff.layout import whole_rows
from hotset.handoff.messages import (
    Cancel,
    CancelFetch,
    Cancelled,
    ChannelEvent,
    Envelope,
    Fetch,
    FirstTokenSampled,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    LeaseGranted,
    LeaseRequest,
    MemoryRange,
    Message,
    MessageReceived,
    ModelIdentity,
    PagedSpan,
    PeerRestarted,
    PieceUnpacked,
    PieceWritten,
    Ping,
    Pong,
    PrefillFailed,
    Progress,
    Refused,
    RowsComputed,
    Shard,
    StartPrefill,
    StartWrites,
    Store,
    Welcome,
)
from hotset.handoff.packing import StagingMemory
from hotset.handoff.prefill_role import PrefillRole
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import ReceiverStaging
from hotset.transfer.loopback import Hub, Loopback

PEERS = ("10.0.0.1:1", "10.0.0.2:2")
PAGE_ROWS = 4


class AtOnce(Loopback):
    """Connects every peer to its own memory, so that what a peer claims about its memory is really used."""

    def connect(self, name: str, description: bytes) -> None:
        super().connect(name, self.describe())


numbers = st.sampled_from([0, 1, 2, 3, 7, 8, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63])
keys = st.builds(HandoffKey, st.sampled_from(["r", "s"]), st.integers(0, 2))
few = st.integers(0, 3)
some_ids = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple)
pages = st.lists(st.integers(0, 7) | numbers, max_size=4).map(tuple)
spans = st.builds(
    PagedSpan,
    st.lists(st.lists(numbers, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
    *(numbers, numbers, numbers, numbers),
)
slices = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
some_slices = st.lists(st.tuples(st.integers(0, ROW_BYTES), st.integers(0, ROW_BYTES)), max_size=3).map(tuple)
memory = Memory(8, PAGE_ROWS)
rings = st.none() | st.builds(MemoryRange, numbers, numbers) | st.just(MemoryRange(memory.buffer.ctypes.data, 1 << 12))
halves = Store(  # larger than its memory, but these tests never write to it
    tuple(Shard(memory.store.shards[0].span, ((first, ROW_BYTES // 2),)) for first in (0, ROW_BYTES // 2)),
    memory.store.keys,
)
sound_hellos = st.builds(
    lambda peer, store, ring: Hello(peer, MODEL, {"host": store}, "loopback", b"", ring),
    st.sampled_from(PEERS),
    st.sampled_from([memory.store, halves]),
    rings,
)
# Valid, except for its address.
addresses = st.integers(0, (1 << 63) - 1) | st.just(memory.buffer.ctypes.data)
lost_spans = st.builds(
    lambda bases, page_bytes: PagedSpan(tuple((base,) for base in bases), page_bytes, PAGE_ROWS, PAGE_ROWS, ROW_BYTES),
    st.lists(addresses, min_size=LAYERS, max_size=LAYERS),
    st.integers(PAGE_ROWS * ROW_BYTES, (1 << 63) - 1),
)
wild_hellos = st.builds(
    Hello,
    st.sampled_from(PEERS),
    st.just(MODEL)
    | st.builds(ModelIdentity, st.text(max_size=3), numbers, st.just(""), st.none(), numbers, st.just("")),
    st.dictionaries(
        st.sampled_from(["host", "device"]),
        st.builds(
            Store,
            st.just(memory.store.shards)
            | (lost_spans | spans).map(whole_rows)
            | st.lists(st.builds(Shard, lost_spans | spans, slices | some_slices), max_size=3).map(tuple),
            st.just(memory.store.keys) | st.none() | spans,
        ),
    ),
    st.sampled_from(["loopback", "nixl"]),
    st.binary(max_size=4),
    rings,
)
hellos = sound_hellos | wild_hellos
requests = st.builds(
    HandoffRequest,
    keys,
    st.builds(PromptSpec, some_ids, st.just(SamplingParams())),
    st.sampled_from(["host", "device"]),
    pages,
    pages,
)
valid_requests = st.builds(
    lambda key, ids: HandoffRequest(key, PromptSpec(ids, SamplingParams()), "host", (0, 1, 2), (3, 4, 5)),
    keys,
    some_ids,
)
alternatives = st.none() | st.dictionaries(numbers, st.tuples(st.floats(), numbers), max_size=2)
messages = st.one_of(
    hellos,
    hellos.map(Welcome),
    st.builds(Refused, st.text(max_size=5)),
    requests,
    valid_requests,
    *(st.builds(kind, keys) for kind in (HandoffAck, Cancel)),
    st.builds(HandoffAccepted, keys, st.integers(0, 2000) | numbers),
    st.builds(StartWrites, keys, st.booleans()),
    st.builds(LeaseRequest, keys, few | numbers, few | numbers, few | numbers),
    st.builds(LeaseGranted, keys, few | numbers, few | numbers, few | numbers),
    st.builds(PieceWritten, keys, few | numbers, few | numbers),
    st.builds(PieceUnpacked, keys, few | numbers),
    st.builds(Progress, keys, numbers),
    st.builds(HandoffDone, keys, numbers, alternatives),
    st.builds(HandoffFailed, keys, st.booleans(), st.booleans(), st.text(max_size=5)),
    st.builds(Cancelled, keys, st.booleans()),
    st.builds(Ping, numbers),
    st.builds(Pong, numbers),
)
Said = tuple[str, Message, float, bool]
steps = st.lists(st.tuples(st.sampled_from(PEERS), messages, st.floats(0.0, 3.0), st.booleans()), max_size=25)


@st.composite
def begun(draw: st.DrawFn) -> list[Said]:
    """Draws a handoff that reaches its writes, then any messages."""
    peer, request = PEERS[0], draw(valid_requests)
    store = Store(draw(st.just(memory.store.shards) | lost_spans.map(whole_rows)), memory.store.keys)
    ring = draw(rings)
    first: list[Message] = [Hello(peer, MODEL, {"host": store}, "loopback", b"", ring), request]
    first.append(StartWrites(request.key, staged=draw(st.booleans())))
    first += [LeaseGranted(request.key, piece, piece, 256 * piece) for piece in range(draw(few))]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


@st.composite
def welcomed(draw: st.DrawFn) -> list[Said]:
    """Draws a handoff that reaches its leases, then any messages."""
    peer, key = PEERS[0], HandoffKey("r", 0)
    store = draw(st.sampled_from([memory.store, halves]))
    first: list[Message] = [Welcome(Hello(peer, MODEL, {"host": store}, "loopback", b"")), HandoffAccepted(key, 1000)]
    first += [
        LeaseRequest(key, 0, 0, 2),
        LeaseRequest(key, 1, 2, 3),
        *(PieceWritten(key, piece, piece) for piece in range(draw(few))),
    ]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


def through_the_wire(peer: str, message: Message) -> list[ChannelEvent]:
    """Returns the events that the channel would pass to an agent; none if the codec rejects the message."""
    try:
        envelope = Codec().decode(Codec().encode(Envelope(peer, "ab", "", message)))
    except (BadMessage, OverflowError):
        return []
    assert isinstance(envelope, Envelope)
    return [MessageReceived(peer, envelope.message)]


def run(agent: HandoffAgent, channel: Dictated, clock: Clock, said: list[Said]) -> list[HandoffEvent]:
    """Runs the agent's loop by hand, and returns all events."""
    events: list[HandoffEvent] = []
    for peer, message, seconds, restart in said:
        clock.now += seconds
        channel.coming = [*([PeerRestarted(peer)] if restart else []), *through_the_wire(peer, message)]
        agent._work()
        if isinstance(agent._role, PrefillRole):
            assert until(lambda: not agent._inbox.empty() or not agent._role._connecting)
            agent._work()
        events += agent.take_events()
        agent.audit()
    return events


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(welcomed() | steps, st.lists(st.sampled_from(PEERS), min_size=1, max_size=2))
def test_a_decode_worker_survives_any_message_of_its_peers(said: list[Said], asked: list[str]) -> None:
    channel, clock = Dictated(), Clock()
    staging, target = StagingMemory(4096), Memory(8, PAGE_ROWS)
    hello = Hello(OURS, MODEL, {"host": target.store}, "loopback", b"", staging.memory_range)
    receiver = Receiver(staging=ReceiverStaging(staging.memory_range, hello.stores))
    agent = HandoffAgent(receiver, hello, channel, Loopback(Hub()), wake=lambda: None, clock=clock)
    wanted = [HandoffKey(name, 0) for name in "rs"[: len(asked)]]
    for peer, key in zip(asked, wanted, strict=True):
        agent.put(Fetch(peer, HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,))))
    events = run(agent, channel, clock, said)
    for key in wanted:
        agent.put(CancelFetch(key))
    events += run(agent, channel, clock, [(PEERS[0], Ping(0), 20.0, False)] * 4)
    ended = [event.key for event in events if type(event).__name__ in ("Landed", "FetchFailed")]
    assert sorted(map(str, ended)) == sorted(map(str, wanted))


def obeyed(agent: HandoffAgent, events: list[HandoffEvent]) -> int:
    """Acts as a prefill engine that computes every prompt, and returns how many."""
    prompts = [event for event in events if isinstance(event, StartPrefill)]
    for asked in prompts:
        length, key, peer = len(asked.prompt), asked.key, asked.peer
        if length % 5 == 4:
            agent.put(PrefillFailed(peer, key, True, "no"))
            continue
        agent.put(RowsComputed(peer, key, 0, length, (7, 6, 5), None))
        agent.put(FirstTokenSampled(peer, key, first_token(asked.prompt.token_ids), None))
    return len(prompts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(begun() | steps)
def test_a_prefill_worker_survives_any_message_of_its_peers(said: list[Said]) -> None:
    hub, channel, clock = Hub(), Dictated(), Clock()
    transfer = AtOnce(hub)
    source = Memory(8, PAGE_ROWS)
    transfer.register(source.region)
    staging = StagingMemory(1 << 12)
    transfer.register(staging.region)
    hello = Hello(OURS, MODEL, {"host": source.store}, "loopback", b"")
    agent = HandoffAgent(
        Sender(source.store, buffers=staging.sender_buffers, max_direct_writes=2),
        hello,
        channel,
        transfer,
        wake=lambda: None,
        clock=clock,
    )
    prompts = drops = 0
    for step in [*said, *[(PEERS[0], Ping(0), 200.0, False)] * 6]:
        events = run(agent, channel, clock, [step])
        hub.advance(clock.now)
        prompts += obeyed(agent, events)
        drops += sum(type(event).__name__ == "ReleasePages" for event in events)
    assert drops == prompts, "pages that are never given back"
    assert np.all(memory.buffer == POISON), "written where nobody had registered anything"
