"""Staged contexts: both state machines, real bytes, and every failure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_world import DECODE, Event, World

from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    FetchFailed,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Landed,
    LeaseGranted,
    LeaseRequest,
    PieceUnpacked,
    PieceWritten,
    Progress,
    Quiesced,
    SendMessage,
    StartWrites,
    UnpackPiece,
)
from hotset.handoff.outgoing import SENDER_TIMEOUTS, SenderPhase
from hotset.handoff.sender_staging import PIECE_TIMEOUTS, WINDOW, PiecePhase
from hotset.transfer.api import WriteState

P = "prefill:1"


def begun(world: World, rows: int = 50, name: str = "r", at: int = 1) -> HandoffKey:
    """Begins a handoff up to StartWrites."""
    key = world.fetch(rows, name, at)
    world.carry()
    assert world.prefills[f"prefill:{at}"].sender.phases()[DECODE, key] is SenderPhase.WRITING
    return key


def lost(world: World, key: HandoffKey) -> FetchFailed:
    (event,) = world.events[key]
    assert isinstance(event, FetchFailed)
    return event


def test_a_context_lands_in_a_few_writes_into_the_ring_alone() -> None:
    world = World()
    key = begun(world)
    world.compute(key)
    ring = world.ring_memory.memory_range
    while world.writes or world.messages:
        world.carry()
        for write in world.writes:
            ((_, there, nbytes),) = write.submit.writes.tolist()
            assert ring.address <= there and there + nbytes <= ring.address + ring.nbytes
        if world.writes:
            world.write()
    world.check(key)
    world.check_calm()
    assert world.written == 5, "50 rows in pieces of 11"


@pytest.mark.parametrize(("here", "there"), [(1, 4), (4, 1), (2, 4), (4, 2), (8, 2), (1, 8), (8, 1)])
def test_any_sharding_into_any_other(here: int, there: int) -> None:
    world = World(ranks=there, prefills=(here,))
    key = begun(world)
    for last in (13, 14, 40, None):
        world.compute(key, last)
    world.finish()
    world.check(key)
    world.check_calm()
    assert any(isinstance(message, PieceWritten) for _, _, message in world.sent)


@pytest.mark.parametrize("rows", [1, 2])
def test_few_writes_are_direct(rows: int) -> None:
    world = World()
    key = begun(world, rows)
    world.compute(key)
    world.finish()
    world.check(key)
    assert not any(isinstance(message, LeaseRequest) for _, _, message in world.sent)


def test_equal_shardings_are_written_directly() -> None:
    world = World(ranks=2)
    key = begun(world, 200)
    world.compute(key)
    world.finish()
    world.check(key)
    assert not any(isinstance(message, LeaseRequest) for _, _, message in world.sent)


def test_a_context_of_sixteen_rings_flows_through() -> None:
    world = World(ring_bytes=1 << 13)
    rows = 16 * (1 << 13) // world.row_bytes + 1
    key = begun(world, rows)
    for last in (*range(100, rows, 100), None):
        world.compute(key, last)
    most = 0
    while world.writes or world.messages:
        world.carry()
        most = max(most, world.ring.held)
        if world.writes:
            world.write()
    world.check(key)
    world.check_calm()
    assert world.ring.nbytes // 2 < most <= world.ring.nbytes


def test_senders_with_different_sharding_share_a_ring() -> None:
    world = World(prefills=(1, 2, 8))
    keys = [begun(world, 90, f"r{at} {number}", at) for number in range(3) for at in (1, 2, 3)]
    for at, key in enumerate(keys):
        world.compute(key, at=at % 3 + 1)
    assert world.ring.waiting > 0 or world.messages, "the ring has to be short"
    world.finish()
    for key in keys:
        world.check(key)
    world.check_calm()


@pytest.mark.parametrize(
    "kind",
    [HandoffAccepted, StartWrites, LeaseRequest, LeaseGranted, PieceWritten, PieceUnpacked, HandoffDone, HandoffAck],
)
def test_a_lost_message_is_retransmitted(kind: type) -> None:
    world = World()
    world.lose[kind] = 3
    key = world.fetch(50)
    for _ in range(12):
        world.carry()
        if key in world.prefills[P].contexts and not world.prefills[P].contexts[key].told:
            world.compute(key)
        while world.writes:
            world.write()
        world.pass_time(0.6)
    world.check(key)
    world.check_calm()
    assert world.lose[kind] == 0


def test_duplicated_and_late_messages_have_no_effect() -> None:
    world = World()
    world.twice = True
    key = begun(world, 100)
    world.compute(key)
    world.finish()
    world.check(key)
    world.twice = False
    late = [each for each in world.sent if not isinstance(each[2], HandoffRequest)]
    for envelope in [*late, *reversed(late)]:
        world.deliver(*envelope)
        world.finish()
    world.check(key)
    world.check_calm()


def test_messages_of_one_context_do_not_affect_another() -> None:
    """Messages with old lease numbers have no effect."""
    world = World()
    first = begun(world, 22, "first")
    world.compute(first)
    world.finish()
    old = [message.lease for _, _, message in world.sent if isinstance(message, PieceWritten)]
    second = begun(world, 22, "second")
    world.compute(second)
    world.carry(PieceWritten)
    for lease in [*old, 99]:
        world.deliver(P, DECODE, PieceWritten(second, 0, lease))
    assert world.staging.unpacked_rows(second) == 0, "unpacked what was not written"
    world.finish()
    world.check(second)
    world.check_calm()


def test_a_late_lease_request_for_an_unpacked_piece_takes_no_space() -> None:
    world = World()
    key = begun(world, 44)
    world.compute(key, 11)
    world.finish()
    assert world.staging.unpacked_rows(key) == 11 and world.ring.held == 0
    world.deliver(P, DECODE, LeaseRequest(key, 0, 0, 11))
    assert world.ring.held == 0 and world.sent[-1] == (DECODE, P, PieceUnpacked(key, 0))
    world.compute(key)
    world.finish()
    world.check(key)
    world.check_calm()


def test_a_lease_is_granted_again_only_after_it_was_read() -> None:
    world = World()
    keys = [begun(world, 44, name) for name in ("first", "second")]
    for key in keys:
        world.compute(key)
    world.carry(PieceWritten)
    world.write()
    (staged,) = (envelope for envelope in world.messages if isinstance(envelope[2], PieceWritten))
    world.receiver.handle_message(P, staged[2], world.now)
    actions = world.receiver.take_actions()
    assert isinstance(actions[0], UnpackPiece)
    assert [type(action.message) for action in actions[1:] if isinstance(action, SendMessage)] == [
        PieceUnpacked,
        LeaseGranted,
    ]


def test_nothing_is_packed_before_its_forward_pass() -> None:
    world = World()
    key = begun(world, 50)
    passed, running = Event(), Event(happened=False)
    world.compute(key, 25, passed)
    world.compute(key, None, running)
    world.carry()
    assert len(world.writes) == 2 and world.prefills[P].sender.has_pending_events, "rows up to 22 are there"
    world.finish()
    world.look()
    assert not world.writes
    running.happened = True
    world.look()
    assert world.writes
    world.finish()
    world.check(key)
    world.check_calm()


def test_leases_are_requested_only_for_rows_that_are_being_computed() -> None:
    """A context with a lease that waits for pages of contexts that wait for that lease would be a deadlock."""
    world = World()
    key = begun(world, 200)
    assert world.ring.held == 0
    world.compute(key, 10, Event(happened=False))
    world.carry()
    assert world.ring.held == 0, "a piece has 11 rows"
    world.compute(key, 12, Event(happened=False))
    world.carry()
    assert world.ring.held > 0 and not world.writes, "asked before the forward pass has happened"
    world.compute(key, None, Event(happened=False))
    world.carry()
    wants = {message.piece for _, _, message in world.sent if isinstance(message, LeaseRequest)}
    assert wants == set(range(WINDOW))


def test_buffers_are_bounded_and_assigned_in_the_order_of_grants() -> None:
    world = World(ring_bytes=1 << 15)
    keys = [begun(world, 60, f"r{number}") for number in range(3)]
    for key in keys:
        world.compute(key)
    world.carry()
    assert [write.submit.key for write in world.writes] == [keys[0]] * 4, "four buffers"
    world.write()
    assert [write.submit.key for write in world.writes] == [keys[0]] * 3 + [keys[1]]
    world.finish()
    world.check_calm()


@pytest.mark.parametrize("state", [WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])
def test_a_failed_write_costs_at_most_its_lease_and_never_pages(state: WriteState) -> None:
    world = World()
    key = begun(world)
    world.compute(key)
    world.carry()
    under_way = len(world.writes)
    world.write(state)
    for _ in range(under_way - 1):
        world.write()
    world.finish()
    event = lost(world, key)
    assert event.quiesced and event.retry and state.value in event.reason
    assert world.ring.held == world.ring.quarantined
    assert (world.ring.quarantined > 0) == (state is WriteState.FAILED_UNKNOWN)
    assert world.prefills[P].dropped == [key]


def test_the_lease_of_a_late_write_is_freed() -> None:
    world = World()
    key = begun(world, 22)
    world.compute(key)
    world.carry()
    world.pass_time(40 + SENDER_TIMEOUTS[SenderPhase.DRAINING].limit + 1)
    assert lost(world, key).quiesced and world.ring.quarantined > 0
    while world.writes:
        world.write()
    world.finish()
    world.pass_time(20)
    assert len(world.events[key]) == 1, "there is no Calm: its pages never were in doubt"
    world.check_calm()


@pytest.mark.parametrize("moment", ["waiting for room", "lent", "writing", "staged", "unpacked"])
def test_cancelling_at_any_moment_frees_everything(moment: str) -> None:
    world = World()
    if moment == "waiting for room":
        other = begun(world, 50, "other")
        world.compute(other, None, Event(happened=False))
        world.carry()
    key = begun(world, 22)
    world.compute(key, None, Event(happened=False) if moment == "lent" else None)
    world.carry(PieceWritten)
    if moment in ("staged", "unpacked"):
        while world.writes:
            world.write()
    if moment == "unpacked":
        world.carry(PieceUnpacked)
    world.receiver.cancel(key, world.now)
    world.act()
    if moment == "waiting for room":
        assert world.ring.waiting == 0
    elif moment not in ("unpacked",):
        assert world.ring.held > 0, "its sender may still write there"
    world.finish()
    assert lost(world, key).quiesced and key in world.prefills[P].dropped
    if moment == "waiting for room":
        world.receiver.cancel(other, world.now)
        world.finish()
    world.check_calm()


@pytest.mark.parametrize("lent", [False, True])
def test_leases_of_a_dead_sender_are_quarantined_and_pages_are_not(lent: bool) -> None:
    world = World()
    key = begun(world, 22)
    if lent:
        world.compute(key, None, Event(happened=False))
        world.carry()
    world.receiver.peer_lost(P, "it died", world.now)
    world.act()
    assert lost(world, key).quiesced
    assert world.ring.held == world.ring.quarantined and (world.ring.held > 0) == lent
    world.carry(Cancelled)
    if lent:
        world.pass_time(6, Cancelled)
        assert any(isinstance(message, Cancel) for _, _, message in world.sent), "it may only have been slow"
        world.finish()
        world.check_calm()


def test_with_a_quarantined_ring_contexts_are_written_directly() -> None:
    world = World()
    keys = [begun(world, 44, f"dead{number}") for number in range(2)]
    for key in keys:
        world.compute(key, None, Event(happened=False))
    world.carry()
    world.receiver.peer_lost(P, "it died", world.now)
    world.prefills[P].sender.peer_lost(DECODE, "it died", world.now)
    world.act()
    world.messages.clear()
    assert not world.ring.fits(2000)
    world.introduce(world.prefills[P])
    key = begun(world, 30, "next")
    world.compute(key)
    world.finish()
    world.check(key)
    assert (DECODE, P, StartWrites(key, False)) in world.sent


def test_a_piece_that_waits_too_long_for_a_lease_fails_with_the_reason() -> None:
    world = World(prefills=(1, 1))
    first = begun(world, 44, "first")
    world.compute(first, None, Event(happened=False))
    world.carry()
    second = begun(world, 44, "second", at=2)
    world.compute(second, at=2)
    world.pass_time(PIECE_TIMEOUTS[PiecePhase.REQUESTED].limit + 2)
    reasons = {key.request_id: lost(world, key).reason for key in (first, second)}
    assert "'leased' in the receiver's ring for 120 s" in reasons["first"]
    assert lost(world, first).retry and lost(world, first).quiesced
    world.finish()
    assert not world.ring.waiting


def test_done_before_all_pieces_are_unpacked_is_a_failure() -> None:
    world = World()
    key = begun(world, 44)
    world.compute(key)
    world.carry()
    world.deliver(P, DECODE, HandoffDone(key, 7, None))
    event = lost(world, key)
    assert event.retry and "after 0 rows" in event.reason
    world.finish()
    world.check_calm()


def test_a_lost_receiver_leaks_no_buffer() -> None:
    world = World()
    key = begun(world, 44)
    world.compute(key)
    world.carry()
    world.prefills[P].sender.peer_lost(DECODE, "it died", world.now)
    world.act()
    assert world.prefills[P].sender._buffers.users, "what is being read stays as it is"
    while world.writes:
        world.write()
    assert not world.prefills[P].sender._buffers.users and world.prefills[P].dropped == [key]


def test_staging_that_was_not_offered_fails_the_handoff() -> None:
    world = World()
    key = world.fetch(1)
    world.carry(StartWrites)
    world.messages.clear()
    world.deliver(DECODE, P, StartWrites(key, staged=True))
    assert any(isinstance(message, HandoffFailed) for _, _, message in world.sent)


def test_progress_reports_the_rows_in_their_pages() -> None:
    world = World()
    key = begun(world, 44)
    world.compute(key, 33)
    world.carry()
    world.write()
    world.carry()
    world.pass_time(1.1)
    told = [message.rows for _, _, message in world.sent if isinstance(message, Progress)]
    assert told[-1] == 11


STATES = st.sampled_from([WriteState.DONE] * 6 + [WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_in_any_order_of_events_what_lands_is_right_and_nothing_is_left(data: st.DataObject) -> None:
    world = World(ring_bytes=1 << 12, prefills=(1, 2))
    keys = {
        world.fetch(data.draw(st.integers(3, 40)), f"r{number}", number % 2 + 1): number % 2 + 1 for number in range(3)
    }
    events = {key: [Event(happened=False)] for key in keys}
    world.act()
    usual = data.draw(st.lists(st.sampled_from("m" * 12 + "dlwwwwcccteee"), min_size=60, max_size=150))
    for what in data.draw(st.lists(st.sampled_from("gah"), max_size=2)):
        usual.insert(data.draw(st.integers(0, len(usual))), what)
    for what in usual:
        if what in "mdl" and world.messages:
            at = data.draw(st.integers(0, min(5, len(world.messages) - 1)))
            envelope = world.messages[at]
            if what != "d":  # otherwise it is delivered again
                del world.messages[at]
            if what != "l":
                world.deliver(*envelope)
        elif what == "w" and world.writes:
            world.write(data.draw(STATES), data.draw(st.integers(0, len(world.writes) - 1)))
        elif what in "ceg":
            key = data.draw(st.sampled_from(list(keys)))
            if what == "c":
                compute_some(world, key, keys[key], events[key], data.draw(st.integers(1, 20)))
            elif what == "e":
                events[key][-1].happened = True
                world.look()
            else:
                world.receiver.cancel(key, world.now)
                world.act()
        elif what == "t":
            world.pass_time(data.draw(st.sampled_from([0.3, 2.0])))
        elif what == "h":
            world.pass_time(30.0)
        elif what == "a":  # a report that the peer is lost, perhaps false
            peer = data.draw(st.sampled_from(list(world.prefills)))
            world.receiver.peer_lost(peer, "silent", world.now)
            world.act()
            world.introduce(world.prefills[peer])
    settle(world, keys, events)


def compute_some(world: World, key: HandoffKey, at: int, events: list[Event], rows: int) -> None:
    end = world.prefills[f"prefill:{at}"]
    if key not in end.contexts or key in end.dropped:
        return
    told, total = end.contexts[key].told, len(world.requests[key].prompt)
    if told < total:
        events.append(Event(happened=False))
        events[-2].happened = True  # events happen in the order of one stream
        world.compute(key, min(total, told + rows), events[-1], at)


def settle(world: World, keys: dict[HandoffKey, int], events: dict[HandoffKey, list[Event]]) -> None:
    """Runs everything that is left to do."""
    for _ in range(8):
        world.finish()
        for key, at in keys.items():
            compute_some(world, key, at, events[key], 100)
            events[key][-1].happened = True
        world.look()
        world.finish()
        world.pass_time(5.0)
    world.pass_time(1300.0)
    for key in keys:
        (event,) = (each for each in world.events[key] if not isinstance(each, Quiesced))
        if isinstance(event, Landed):
            world.check(key)
    assert world.receiver.phases() == {} and not world.ring.waiting
    assert world.ring.held == world.ring.quarantined, "room that nobody has"
    for end in world.prefills.values():
        assert end.sender.phases() == {} and not end.sender._buffers.users
        assert sorted(map(str, end.dropped)) == sorted(map(str, end.contexts))
