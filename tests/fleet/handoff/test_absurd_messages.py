"""Property tests: an agent survives every sequence of messages that the codec accepts, including absurd ones."""

from dataclasses import replace
from functools import partial

import numpy as np
from examples import examples
from handoff_engines import LAYERS, MODEL, ROW_BYTES, first_token, make_memory
from handoff_world import OWN_ADDRESS, ScriptedChannel
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from loopback import Hub, Loopback
from sharded_memory import POISON
from waiting import Clock, wait_until

from hotset.base.errors import BadMessage
from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import HandoffAgent, HandoffEvent
from hotset.fleet.handoff.codec import Codec
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.layout import whole_rows
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.packing import StagingMemory
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.schedule.handoffs import CancelFetch, FirstTokenSampled, HandoffKey, PrefillFailed, RowsComputed

PEERS = ("10.0.0.1:1", "10.0.0.2:2")
PAGE_ROWS = 4


class SelfConnected(Loopback):
    """Connects every peer to this endpoint itself, so writes to the addresses in the peer's Hello are attempted."""

    def connect(self, name: str, description: bytes) -> None:
        super().connect(name, self.describe())


numbers = st.sampled_from([0, 1, 2, 3, 7, 8, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63])
keys = st.builds(HandoffKey, st.sampled_from(["r", "s"]), st.integers(0, 2))
small_numbers = st.integers(0, 3)
token_ids = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple)
pages = st.lists(st.integers(0, 7) | numbers, max_size=4).map(tuple)
spans = st.builds(
    PagedSpan,
    st.lists(st.lists(numbers, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
    numbers,
    numbers,
    numbers,
    numbers,
)
slices = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
slices_of_a_row = st.lists(st.tuples(st.integers(0, ROW_BYTES), st.integers(0, ROW_BYTES)), max_size=3).map(tuple)
memory = make_memory(8, PAGE_ROWS)
rings = st.builds(msg.MemoryRange, numbers, numbers) | st.just(msg.MemoryRange(memory.buffer.ctypes.data, 1 << 12))
# Two shards of half a row each. Both are at the same addresses, but no test reads or writes there.
half_row_store = msg.Store(
    tuple(msg.Shard(memory.store.shards[0].span, ((first, ROW_BYTES // 2),)) for first in (0, ROW_BYTES // 2)),
    memory.store.keys,
)


def with_ring(store: msg.Store, ring: msg.MemoryRange | None) -> msg.Store:
    return replace(store, staging=() if ring is None else (ring,) * len(store.shards))


valid_hellos = st.builds(
    lambda peer, store, ring: msg.Hello(peer, MODEL, {"host": with_ring(store, ring)}, "loopback", b""),
    st.sampled_from(PEERS),
    st.sampled_from([memory.store, half_row_store]),
    st.none() | rings,
)
# Spans with a valid shape, but arbitrary addresses and distances between pages.
addresses = st.integers(0, (1 << 63) - 1) | st.just(memory.buffer.ctypes.data)
misplaced_spans = st.builds(
    lambda bases, page_bytes: PagedSpan(tuple((base,) for base in bases), page_bytes, PAGE_ROWS, ROW_BYTES),
    st.lists(addresses, min_size=LAYERS, max_size=LAYERS),
    st.integers(PAGE_ROWS * ROW_BYTES, (1 << 63) - 1),
)
arbitrary_hellos = st.builds(
    msg.Hello,
    st.sampled_from(PEERS),
    st.just(MODEL)
    | st.builds(msg.ModelIdentity, st.text(max_size=3), numbers, st.just(""), st.none(), numbers, st.just("")),
    st.dictionaries(
        st.sampled_from(["host", "device"]),
        st.builds(
            msg.Store,
            st.just(memory.store.shards)
            | (misplaced_spans | spans).map(whole_rows)
            | st.lists(st.builds(msg.Shard, misplaced_spans | spans, slices | slices_of_a_row), max_size=3).map(tuple),
            st.just(memory.store.keys) | st.none() | spans,
            st.just(()) | st.lists(spans, max_size=2).map(tuple),
            st.sampled_from(["host", "device"]),
            st.lists(rings, max_size=3).map(tuple),
        ),
    ),
    st.sampled_from(["loopback", "nixl"]),
    st.binary(max_size=4),
)
hellos = valid_hellos | arbitrary_hellos
requests = st.builds(
    msg.HandoffRequest,
    keys,
    st.builds(PromptSpec, token_ids, st.just(SamplingParams())),
    st.sampled_from(["host", "device"]),
    pages,
    pages,
)
valid_requests = st.builds(
    lambda key, ids: msg.HandoffRequest(key, PromptSpec(ids, SamplingParams()), "host", (0, 1, 2), (3, 4, 5)),
    keys,
    token_ids,
)
alternatives = st.none() | st.dictionaries(numbers, st.tuples(st.floats(), numbers), max_size=2)
messages = st.one_of(
    hellos,
    hellos.map(msg.Welcome),
    st.builds(msg.Refused, st.text(max_size=5)),
    requests,
    valid_requests,
    *(st.builds(kind, keys) for kind in (msg.HandoffAck, msg.Cancel)),
    st.builds(msg.HandoffAccepted, keys, st.integers(0, 2000) | numbers),
    st.builds(msg.StartWrites, keys, st.booleans()),
    st.builds(msg.LeaseRequest, keys, small_numbers | numbers, small_numbers | numbers, small_numbers | numbers),
    st.builds(msg.LeaseGranted, keys, small_numbers | numbers, small_numbers | numbers, small_numbers | numbers),
    st.builds(msg.PieceWritten, keys, small_numbers | numbers, small_numbers | numbers),
    st.builds(msg.PieceUnpacked, keys, small_numbers | numbers),
    st.builds(msg.Progress, keys, numbers),
    st.builds(msg.HandoffDone, keys, numbers, alternatives),
    st.builds(msg.HandoffFailed, keys, st.booleans(), st.booleans(), st.text(max_size=5)),
    st.builds(msg.Cancelled, keys, st.booleans()),
    st.builds(msg.Ping, numbers),
    st.builds(msg.Pong, numbers),
)
# (peer, message, seconds that pass before the message, whether the peer is restarted before the message)
Step = tuple[str, msg.Message, float, bool]
steps = st.lists(st.tuples(st.sampled_from(PEERS), messages, st.floats(0.0, 3.0), st.booleans()), max_size=25)


@st.composite
def prefill_scripts(draw: st.DrawFn) -> list[Step]:
    """Draws messages to a prefill worker: first messages that let a handoff begin to write, then arbitrary ones."""
    peer, request = PEERS[0], draw(valid_requests)
    store = msg.Store(draw(st.just(memory.store.shards) | misplaced_spans.map(whole_rows)), memory.store.keys)
    store = with_ring(store, draw(st.none() | rings))
    first: list[msg.Message] = [msg.Hello(peer, MODEL, {"host": store}, "loopback", b""), request]
    first.append(msg.StartWrites(request.key, staged=draw(st.booleans())))
    first += [msg.LeaseGranted(request.key, piece, piece, 256 * piece) for piece in range(draw(small_numbers))]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


@st.composite
def decode_scripts(draw: st.DrawFn) -> list[Step]:
    """Draws messages to a decode worker: first messages that let a handoff get leases, then arbitrary ones."""
    peer, key = PEERS[0], HandoffKey("r", 0)
    store = draw(st.sampled_from([memory.store, half_row_store]))
    first: list[msg.Message] = [
        msg.Welcome(msg.Hello(peer, MODEL, {"host": store}, "loopback", b""), endpoint=1),
        msg.HandoffAccepted(key, 1000),
    ]
    first += [
        msg.LeaseRequest(key, 0, 0, 2),
        msg.LeaseRequest(key, 1, 2, 3),
        *(msg.PieceWritten(key, piece, piece) for piece in range(draw(small_numbers))),
    ]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


def encode_and_decode(peer: str, message: msg.Message) -> list[msg.ChannelEvent]:
    """Returns the event that a channel would pass to the agent, or an empty list if the codec rejects the message."""
    try:
        envelope = Codec().decode(Codec().encode(msg.Envelope(peer, "ab", "", message)))
    except (BadMessage, OverflowError):
        return []
    assert isinstance(envelope, msg.Envelope)
    return [msg.MessageReceived(peer, envelope.message)]


def has_threads(agent: HandoffAgent) -> bool:
    """Returns whether a thread copies a piece, connects to a peer's memory, or opens an endpoint for a peer."""
    if agent._copies:
        return True
    if isinstance(agent, PrefillAgent):
        return bool(agent._connecting)
    assert isinstance(agent, DecodeAgent)
    return any(link.hello is None for link in agent._links.current)


def run(agent: HandoffAgent, channel: ScriptedChannel, clock: Clock, script: list[Step]) -> list[HandoffEvent]:
    """Passes the messages to the agent one at a time, audits the agent, and returns the events for its engine."""
    events: list[HandoffEvent] = []
    for peer, message, seconds, restart in script:
        clock.now += seconds
        channel.incoming = [*([msg.PeerRestarted(peer)] if restart else []), *encode_and_decode(peer, message)]
        agent._work()
        assert wait_until(lambda: not agent._inbox.empty() or not has_threads(agent))
        agent._work()
        events += agent.take_events()
        agent.audit()
    return events


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(decode_scripts() | steps, st.lists(st.sampled_from(PEERS), min_size=1, max_size=2))
def test_a_decode_worker_survives_all_messages_and_every_fetch_ends_once(script: list[Step], peers: list[str]) -> None:
    channel, clock, endpoints = ScriptedChannel(), Clock(), Endpoints(partial(Loopback, Hub()))
    staging, target = StagingMemory(4096), make_memory(8, PAGE_ROWS)
    hello = msg.Hello(OWN_ADDRESS, MODEL, {"host": staging.beside(target.store)}, "loopback", b"")
    receiver = Receiver(staging=ReceiverStaging(hello.stores))
    agent = DecodeAgent(receiver, hello, channel, endpoints, wake=lambda: None, clock=clock)
    fetched = [HandoffKey(name, 0) for name in "rs"[: len(peers)]]
    for peer, key in zip(peers, fetched, strict=True):
        agent.put(msg.Fetch(peer, msg.HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,))))
    events = run(agent, channel, clock, script)
    for key in fetched:
        agent.put(CancelFetch(key))
    events += run(agent, channel, clock, [(PEERS[0], msg.Ping(0), 20.0, False)] * 4)
    agent.close(0.0)
    ended = [event.key for event in events if type(event).__name__ in ("Landed", "FetchFailed")]
    assert sorted(map(str, ended)) == sorted(map(str, fetched))


def run_prefill_engine(agent: HandoffAgent, events: list[HandoffEvent]) -> int:
    """Announces every prompt as computed, except that prompts of some lengths fail. Returns the number of prompts."""
    starts = [event for event in events if isinstance(event, msg.StartPrefill)]
    for start in starts:
        length, key, peer = len(start.prompt), start.key, start.peer
        if length % 5 == 4:
            agent.put(PrefillFailed(peer, key, True, "not computed"))
            continue
        agent.put(RowsComputed(peer, key, 0, length, (7, 6, 5), None))
        agent.put(FirstTokenSampled(peer, key, first_token(start.prompt.token_ids), None))
    return len(starts)


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(prefill_scripts() | steps)
def test_a_prefill_worker_survives_all_messages_and_releases_all_pages(script: list[Step]) -> None:
    hub, channel, clock = Hub(), ScriptedChannel(), Clock()
    transfer = SelfConnected(hub)
    source = make_memory(8, PAGE_ROWS)
    transfer.register(source.region)
    staging = StagingMemory(1 << 12)
    transfer.register(staging.region)
    store = staging.beside(source.store)
    hello = msg.Hello(OWN_ADDRESS, MODEL, {"host": store}, "loopback", b"")
    agent = PrefillAgent(
        Sender(Sources(store), max_direct_writes=2),
        hello,
        channel,
        transfer,
        wake=lambda: None,
        clock=clock,
    )
    num_starts = num_releases = 0
    for step in [*script, *[(PEERS[0], msg.Ping(0), 200.0, False)] * 6]:
        events = run(agent, channel, clock, [step])
        hub.advance(clock.now)
        num_starts += run_prefill_engine(agent, events)
        num_releases += sum(type(event).__name__ == "ReleasePages" for event in events)
    agent.close(0.0)
    assert num_releases == num_starts, "ReleasePages must be sent exactly once for every StartPrefill"
    assert np.all(memory.buffer == POISON), "unregistered memory was written to"
