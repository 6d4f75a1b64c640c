"""No message that gets through the wire kills an agent, however little sense it makes."""

import numpy as np
from handoff_engines import LAYERS, MODEL, POISON, ROW_BYTES, Memory, first_token, until
from handoff_world import OURS, Clock, Dictated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotset.base.errors import BadMessage
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.agent import Fact, HandoffAgent
from hotset.handoff.codec import Codec
from hotset.handoff.layout import whole_rows
from hotset.handoff.messages import (
    Accepted,
    Arrival,
    Ask,
    Cancel,
    Fetch,
    GiveUp,
    Go,
    HandoffDone,
    HandoffFailed,
    Hello,
    Key,
    Lent,
    Letter,
    Message,
    Model,
    NotComputed,
    Ping,
    Pong,
    PostEvent,
    Prefill,
    Progress,
    Received,
    Refused,
    Restarted,
    Sampled,
    Shard,
    Space,
    Span,
    Staged,
    Stopped,
    Store,
    Unpacked,
    Want,
    Welcome,
    Written,
)
from hotset.handoff.packing import StagingMemory
from hotset.handoff.prefill_role import PrefillSide
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import StagedIn
from hotset.transfer.loopback import Hub, Loopback

PEERS = ("10.0.0.1:1", "10.0.0.2:2")
PAGE_ROWS = 4


class AtOnce(Loopback):
    """Connects to its own memory, whoever asks; so what a peer claims of its memory is put to the test."""

    def connect(self, name: str, description: bytes) -> None:
        super().connect(name, self.describe())


numbers = st.sampled_from([0, 1, 2, 3, 7, 8, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63])
keys = st.builds(Key, st.sampled_from(["r", "s"]), st.integers(0, 2))
few = st.integers(0, 3)
some_ids = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple)
pages = st.lists(st.integers(0, 7) | numbers, max_size=4).map(tuple)
spans = st.builds(
    Span,
    st.lists(st.lists(numbers, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
    *(numbers, numbers, numbers, numbers),
)
slices = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
some_slices = st.lists(st.tuples(st.integers(0, ROW_BYTES), st.integers(0, ROW_BYTES)), max_size=3).map(tuple)
memory = Memory(8, PAGE_ROWS)
rings = st.none() | st.builds(Space, numbers, numbers) | st.just(Space(memory.buffer.ctypes.data, 1 << 12))
halves = Store(  # whose memory is too large by half, but nobody writes to it here
    tuple(Shard(memory.store.shards[0].span, ((first, ROW_BYTES // 2),)) for first in (0, ROW_BYTES // 2)),
    memory.store.keys,
)
sound_hellos = st.builds(
    lambda peer, store, ring: Hello(peer, MODEL, {"host": store}, "loopback", b"", ring),
    st.sampled_from(PEERS),
    st.sampled_from([memory.store, halves]),
    rings,
)
# As it should be, but for where it lies.
addresses = st.integers(0, (1 << 63) - 1) | st.just(memory.buffer.ctypes.data)
lost_spans = st.builds(
    lambda bases, page_bytes: Span(tuple((base,) for base in bases), page_bytes, PAGE_ROWS, PAGE_ROWS, ROW_BYTES),
    st.lists(addresses, min_size=LAYERS, max_size=LAYERS),
    st.integers(PAGE_ROWS * ROW_BYTES, (1 << 63) - 1),
)
wild_hellos = st.builds(
    Hello,
    st.sampled_from(PEERS),
    st.just(MODEL) | st.builds(Model, st.text(max_size=3), numbers, st.just(""), st.none(), numbers, st.just("")),
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
asks = st.builds(
    Ask,
    keys,
    st.builds(PromptSpec, some_ids, st.just(SamplingParams())),
    st.sampled_from(["host", "device"]),
    pages,
    pages,
)
sound_asks = st.builds(
    lambda key, ids: Ask(key, PromptSpec(ids, SamplingParams()), "host", (0, 1, 2), (3, 4, 5)), keys, some_ids
)
alternatives = st.none() | st.dictionaries(numbers, st.tuples(st.floats(), numbers), max_size=2)
messages = st.one_of(
    hellos,
    hellos.map(Welcome),
    st.builds(Refused, st.text(max_size=5)),
    asks,
    sound_asks,
    *(st.builds(kind, keys) for kind in (Received, Cancel)),
    st.builds(Accepted, keys, st.integers(0, 2000) | numbers),
    st.builds(Go, keys, st.booleans()),
    st.builds(Want, keys, few | numbers, few | numbers, few | numbers),
    st.builds(Lent, keys, few | numbers, few | numbers, few | numbers),
    st.builds(Staged, keys, few | numbers, few | numbers),
    st.builds(Unpacked, keys, few | numbers),
    st.builds(Progress, keys, numbers),
    st.builds(HandoffDone, keys, numbers, alternatives),
    st.builds(HandoffFailed, keys, st.booleans(), st.booleans(), st.text(max_size=5)),
    st.builds(Stopped, keys, st.booleans()),
    st.builds(Ping, numbers),
    st.builds(Pong, numbers),
)
Said = tuple[str, Message, float, bool]
steps = st.lists(st.tuples(st.sampled_from(PEERS), messages, st.floats(0.0, 3.0), st.booleans()), max_size=25)


@st.composite
def begun(draw: st.DrawFn) -> list[Said]:
    """A handoff that gets as far as its writes, then anything."""
    peer, ask = PEERS[0], draw(sound_asks)
    store = Store(draw(st.just(memory.store.shards) | lost_spans.map(whole_rows)), memory.store.keys)
    ring = draw(rings)
    first: list[Message] = [Hello(peer, MODEL, {"host": store}, "loopback", b"", ring), ask]
    first.append(Go(ask.key, staged=draw(st.booleans())))
    first += [Lent(ask.key, piece, piece, 256 * piece) for piece in range(draw(few))]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


@st.composite
def welcomed(draw: st.DrawFn) -> list[Said]:
    """A handoff that gets as far as room in the ring, then anything."""
    peer, key = PEERS[0], Key("r", 0)
    store = draw(st.sampled_from([memory.store, halves]))
    first: list[Message] = [Welcome(Hello(peer, MODEL, {"host": store}, "loopback", b"")), Accepted(key, 1000)]
    first += [Want(key, 0, 0, 2), Want(key, 1, 2, 3), *(Staged(key, piece, piece) for piece in range(draw(few)))]
    return [*((peer, message, 0.1, False) for message in first), *draw(steps)]


def through_the_wire(peer: str, message: Message) -> list[PostEvent]:
    """As the channel would give it to an agent: nothing, if it does not get through."""
    try:
        letter = Codec().decode(Codec().encode(Letter(peer, "ab", "", message)))
    except (BadMessage, OverflowError):
        return []
    assert isinstance(letter, Letter)
    return [Arrival(peer, letter.message)]


def run(agent: HandoffAgent, post: Dictated, clock: Clock, said: list[Said]) -> list[Fact]:
    """Takes turns of the agent by hand; returns all facts."""
    facts: list[Fact] = []
    for peer, message, seconds, restart in said:
        clock.now += seconds
        post.coming = [*([Restarted(peer)] if restart else []), *through_the_wire(peer, message)]
        agent._work()
        if isinstance(agent._side, PrefillSide):
            assert until(lambda: not agent._inbox.empty() or not agent._side._connecting)
            agent._work()
        facts += agent.facts()
        agent.audit()
    return facts


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(welcomed() | steps, st.lists(st.sampled_from(PEERS), min_size=1, max_size=2))
def test_a_decode_worker_survives_whatever_its_peers_say(said: list[Said], asked: list[str]) -> None:
    post, clock = Dictated(), Clock()
    staging, target = StagingMemory(4096), Memory(8, PAGE_ROWS)
    hello = Hello(OURS, MODEL, {"host": target.store}, "loopback", b"", staging.space)
    receiver = Receiver(staging=StagedIn(staging.space, hello.stores))
    agent = HandoffAgent(receiver, hello, post, Loopback(Hub()), wake=lambda: None, clock=clock)
    wanted = [Key(name, 0) for name in "rs"[: len(asked)]]
    for peer, key in zip(asked, wanted, strict=True):
        agent.put(Fetch(peer, Ask(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,))))
    facts = run(agent, post, clock, said)
    for key in wanted:
        agent.put(GiveUp(key))
    facts += run(agent, post, clock, [(PEERS[0], Ping(0), 20.0, False)] * 4)
    ended = [fact.key for fact in facts if type(fact).__name__ in ("Landed", "Lost")]
    assert sorted(map(str, ended)) == sorted(map(str, wanted))


def obeyed(agent: HandoffAgent, facts: list[Fact]) -> int:
    """A prefill engine that does what it is asked; returns how often."""
    prompts = [fact for fact in facts if isinstance(fact, Prefill)]
    for asked in prompts:
        length, key, peer = len(asked.prompt), asked.key, asked.peer
        if length % 5 == 4:
            agent.put(NotComputed(peer, key, True, "no"))
            continue
        agent.put(Written(peer, key, 0, length, (7, 6, 5), None))
        agent.put(Sampled(peer, key, first_token(asked.prompt.token_ids), None))
    return len(prompts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(begun() | steps)
def test_a_prefill_worker_survives_whatever_its_peers_say(said: list[Said]) -> None:
    hub, post, clock = Hub(), Dictated(), Clock()
    transfer = AtOnce(hub)
    source = Memory(8, PAGE_ROWS)
    transfer.register(source.region)
    staging = StagingMemory(1 << 12)
    transfer.register(staging.region)
    hello = Hello(OURS, MODEL, {"host": source.store}, "loopback", b"")
    agent = HandoffAgent(
        Sender(source.store, buffers=staging.buffers, few_writes=2),
        hello,
        post,
        transfer,
        wake=lambda: None,
        clock=clock,
    )
    prompts = drops = 0
    for step in [*said, *[(PEERS[0], Ping(0), 200.0, False)] * 6]:
        facts = run(agent, post, clock, [step])
        hub.advance(clock.now)
        prompts += obeyed(agent, facts)
        drops += sum(type(fact).__name__ == "Drop" for fact in facts)
    assert drops == prompts, "pages that are never given back"
    assert np.all(memory.buffer == POISON), "written where nobody had registered anything"
