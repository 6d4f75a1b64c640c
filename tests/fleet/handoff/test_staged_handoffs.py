"""Tests of staged contexts with both state machines and real bytes: no faults, single faults, random orders."""

from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_world import DECODE, Event, World

from hotset.fleet.handoff.deliveries import PIECE_TIMEOUTS, WINDOW, PiecePhase
from hotset.fleet.handoff.messages import (
    Cancel,
    Cancelled,
    FetchFailed,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
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
from hotset.fleet.handoff.outgoing import SENDER_TIMEOUTS, SenderPhase
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import HandoffKey

PREFILL = "prefill:1"


def start_handoff(world: World, rows: int = 50, name: str = "r", prefill: int = 1) -> HandoffKey:
    """Starts a handoff and delivers messages until its sender has received StartWrites."""
    key = world.fetch(rows, name, prefill)
    world.deliver_messages()
    assert world.prefills[f"prefill:{prefill}"].sender.phases()[DECODE, key] is SenderPhase.WRITING
    return key


def failure_of(world: World, key: HandoffKey) -> FetchFailed:
    """Returns the only event of this handoff, which must be FetchFailed."""
    (event,) = world.events[key]
    assert isinstance(event, FetchFailed)
    return event


def test_a_staged_context_lands_with_one_write_per_piece_and_all_writes_go_to_the_ring() -> None:
    world = World()
    key = start_handoff(world)
    world.compute(key)
    ring = world.ring_memory.memory_range
    while world.writes or world.messages:
        world.deliver_messages()
        for write in world.writes:
            ((_, target, nbytes),) = write.action.writes.tolist()
            assert ring.address <= target and target + nbytes <= ring.address + ring.nbytes
        if world.writes:
            world.end_write()
    world.check_landed(key)
    world.check_idle()
    assert world.num_written == 5, "50 rows must travel in 5 pieces of at most 11 rows"


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 4), (4, 1), (2, 4), (4, 2), (8, 2), (1, 8), (8, 1)])
def test_a_context_lands_for_every_pair_of_shardings(prefill_ranks: int, decode_ranks: int) -> None:
    world = World(ranks=decode_ranks, prefills=(prefill_ranks,))
    key = start_handoff(world)
    for last in (13, 14, 40, None):
        world.compute(key, last)
    world.finish()
    world.check_landed(key)
    world.check_idle()
    assert any(isinstance(message, PieceWritten) for _, _, message in world.sent)


@pytest.mark.parametrize("first", [8, 24, 48])
def test_only_rows_that_the_receiver_lacks_are_staged(first: int) -> None:
    world = World()
    key = world.fetch(60, first=first)
    world.deliver_messages()
    shared = world.memory.memory.copy()
    for last in (5, 13, 29, None):
        world.compute(key, last)
    world.finish()
    world.check_landed(key)
    world.check_idle()
    pieces = [message for _, _, message in world.sent if isinstance(message, LeaseRequest)]
    assert sorted(row for piece in pieces for row in range(piece.first, piece.last)) == [*range(first, 60)]
    world.check_unlisted_pages(key, shared)


def test_a_lease_for_rows_that_the_receiver_has_is_not_granted() -> None:
    world = World()
    key = world.fetch(60, first=16)
    world.deliver_messages()
    world.deliver(PREFILL, DECODE, LeaseRequest(key, 0, 8, 18))
    assert world.ring.held == 0 and not world.ring.waiting
    world.deliver(PREFILL, DECODE, LeaseRequest(key, 0, 16, 18))
    assert world.ring.held > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_context_that_needs_few_writes_is_written_directly(rows: int) -> None:
    world = World()
    key = start_handoff(world, rows)
    world.compute(key)
    world.finish()
    world.check_landed(key)
    assert not any(isinstance(message, LeaseRequest) for _, _, message in world.sent)


def test_a_context_is_written_directly_if_both_sides_are_sharded_equally() -> None:
    world = World(ranks=2)
    key = start_handoff(world, 200)
    world.compute(key)
    world.finish()
    world.check_landed(key)
    assert not any(isinstance(message, LeaseRequest) for _, _, message in world.sent)


def test_a_context_sixteen_times_larger_than_the_ring_lands() -> None:
    world = World(ring_bytes=1 << 13)
    rows = 16 * (1 << 13) // world.row_bytes + 1
    key = start_handoff(world, rows)
    for last in (*range(100, rows, 100), None):
        world.compute(key, last)
    most_held = 0
    while world.writes or world.messages:
        world.deliver_messages()
        most_held = max(most_held, world.ring.held)
        if world.writes:
            world.end_write()
    world.check_landed(key)
    world.check_idle()
    assert world.ring.nbytes // 2 < most_held <= world.ring.nbytes


def test_senders_with_different_shardings_share_one_ring() -> None:
    world = World(prefills=(1, 2, 8))
    keys = [start_handoff(world, 90, f"r{prefill} {number}", prefill) for number in range(3) for prefill in (1, 2, 3)]
    for index, key in enumerate(keys):
        world.compute(key, prefill=index % 3 + 1)
    assert world.ring.waiting > 0 or world.messages, "the ring must be too small for all contexts at once"
    world.finish()
    for key in keys:
        world.check_landed(key)
    world.check_idle()


@pytest.mark.parametrize(
    "message_type",
    [HandoffAccepted, StartWrites, LeaseRequest, LeaseGranted, PieceWritten, PieceUnpacked, HandoffDone, HandoffAck],
)
def test_a_lost_message_is_retransmitted(message_type: type) -> None:
    world = World()
    world.lose[message_type] = 3
    key = world.fetch(50)
    for _ in range(12):
        world.deliver_messages()
        if key in world.prefills[PREFILL].contexts and not world.prefills[PREFILL].contexts[key].num_announced:
            world.compute(key)
        while world.writes:
            world.end_write()
        world.pass_time(0.6)
    world.check_landed(key)
    world.check_idle()
    assert world.lose[message_type] == 0


def test_duplicated_messages_and_messages_after_the_end_have_no_effect() -> None:
    world = World()
    world.duplicate = True
    key = start_handoff(world, 100)
    world.compute(key)
    world.finish()
    world.check_landed(key)
    world.duplicate = False
    late = [envelope for envelope in world.sent if not isinstance(envelope[2], HandoffRequest)]
    for envelope in [*late, *reversed(late)]:
        world.deliver(*envelope)
        world.finish()
    world.check_landed(key)
    world.check_idle()


def test_messages_with_old_or_unknown_lease_numbers_have_no_effect() -> None:
    world = World()
    first = start_handoff(world, 22, "first")
    world.compute(first)
    world.finish()
    old_leases = [message.lease for _, _, message in world.sent if isinstance(message, PieceWritten)]
    second = start_handoff(world, 22, "second")
    world.compute(second)
    world.deliver_messages(PieceWritten)
    for lease in [*old_leases, 99]:
        world.deliver(PREFILL, DECODE, PieceWritten(second, 0, lease))
    assert world.staging.unpacked_rows(second) == 0, "a piece was unpacked before it was written"
    world.finish()
    world.check_landed(second)
    world.check_idle()


def test_a_late_lease_request_for_an_unpacked_piece_is_answered_and_gets_no_lease() -> None:
    world = World()
    key = start_handoff(world, 44)
    world.compute(key, 11)
    world.finish()
    assert world.staging.unpacked_rows(key) == 11 and world.ring.held == 0
    world.deliver(PREFILL, DECODE, LeaseRequest(key, 0, 0, 11))
    assert world.ring.held == 0 and world.sent[-1] == (DECODE, PREFILL, PieceUnpacked(key, 0))
    world.compute(key)
    world.finish()
    world.check_landed(key)
    world.check_idle()


def test_ring_space_is_leased_again_only_after_its_piece_was_unpacked() -> None:
    world = World()
    keys = [start_handoff(world, 44, name) for name in ("first", "second")]
    for key in keys:
        world.compute(key)
    world.deliver_messages(PieceWritten)
    world.end_write()
    (envelope,) = (envelope for envelope in world.messages if isinstance(envelope[2], PieceWritten))
    world.receiver.handle_message(PREFILL, envelope[2], world.now)
    (unpack,) = world.receiver.take_actions()
    assert isinstance(unpack, UnpackPiece)
    world.receiver.handle_message(PREFILL, envelope[2], world.now)
    assert world.receiver.take_actions() == [], "a repeated PieceWritten must not unpack the piece twice"
    world.receiver.on_unpacked(unpack.key, unpack.number)
    sent = [action.message for action in world.receiver.take_actions() if isinstance(action, SendMessage)]
    assert [type(message) for message in sent] == [PieceUnpacked, LeaseGranted]


@pytest.mark.parametrize("lost", [False, True])
def test_a_handoff_that_ends_while_a_piece_is_unpacked_frees_its_lease_once(lost: bool) -> None:
    """The sender has written the piece, so nothing is quarantined for it."""
    world = World()
    key = start_handoff(world, 11)
    world.compute(key)
    world.deliver_messages(PieceWritten)
    world.end_write()
    (envelope,) = (envelope for envelope in world.messages if isinstance(envelope[2], PieceWritten))
    world.receiver.handle_message(PREFILL, envelope[2], world.now)
    (unpack,) = world.receiver.take_actions()
    assert isinstance(unpack, UnpackPiece) and world.ring.held > 0
    if lost:
        world.receiver.peer_lost(PREFILL, "lost", world.now)
    else:
        world.receiver.cancel(key, world.now)
        world.receiver.handle_message(PREFILL, Cancelled(key, True), world.now)
    world.receiver.on_unpacked(unpack.key, unpack.number)
    assert world.ring.held == world.ring.quarantined == 0
    world.run_actions()
    assert failure_of(world, key).quiesced and world.receiver.phases() == {}


def test_a_piece_is_packed_only_after_its_forward_pass() -> None:
    world = World()
    key = start_handoff(world, 50)
    finished, running = Event(), Event(happened=False)
    world.compute(key, 25, finished)
    world.compute(key, None, running)
    world.deliver_messages()
    assert len(world.writes) == 2 and world.prefills[PREFILL].sender.has_pending_events, (
        "of the 25 computed rows, exactly two pieces of 11 must be in flight"
    )
    world.finish()
    world.poll_events()
    assert not world.writes
    running.happened = True
    world.poll_events()
    assert world.writes
    world.finish()
    world.check_landed(key)
    world.check_idle()


def test_leases_are_requested_only_for_rows_that_are_being_computed() -> None:
    """Otherwise there could be a deadlock: a context could hold a lease while it waits for pages of the prefill worker,
    and other contexts could hold these pages while they wait for leases."""
    world = World()
    key = start_handoff(world, 200)
    assert world.ring.held == 0
    world.compute(key, 10, Event(happened=False))
    world.deliver_messages()
    assert world.ring.held == 0, "a lease was granted for a piece of 11 rows when only 10 were announced"
    world.compute(key, 12, Event(happened=False))
    world.deliver_messages()
    assert world.ring.held > 0 and not world.writes, (
        "the lease must be requested before the forward pass has finished, and the write must wait for the forward pass"
    )
    world.compute(key, None, Event(happened=False))
    world.deliver_messages()
    requested_pieces = {message.piece for _, _, message in world.sent if isinstance(message, LeaseRequest)}
    assert requested_pieces == set(range(WINDOW))


def test_buffers_are_bounded_and_assigned_in_the_order_of_grants() -> None:
    world = World(ring_bytes=1 << 15)
    keys = [start_handoff(world, 60, f"r{number}") for number in range(3)]
    for key in keys:
        world.compute(key)
    world.deliver_messages()
    assert [write.action.key for write in world.writes] == [keys[0]] * 4, "the first four grants get the buffers"
    for _ in range(WINDOW - 4):
        world.end_write()
        assert [write.action.key for write in world.writes] == [keys[0]] * 4, "its other pieces were granted next"
    world.end_write()
    assert [write.action.key for write in world.writes] == [keys[0]] * 3 + [keys[1]]
    world.finish()
    world.check_idle()


@pytest.mark.parametrize("state", [WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])
def test_a_failed_write_quarantines_at_most_its_lease_and_no_pages(state: WriteState) -> None:
    world = World()
    key = start_handoff(world)
    world.compute(key)
    world.deliver_messages()
    num_in_flight = len(world.writes)
    world.end_write(state)
    for _ in range(num_in_flight - 1):
        world.end_write()
    world.finish()
    event = failure_of(world, key)
    assert event.quiesced and event.retry and state.value in event.reason
    assert world.ring.held == world.ring.quarantined
    assert (world.ring.quarantined > 0) == (state is WriteState.FAILED_UNKNOWN)
    assert world.prefills[PREFILL].released == [key]


def test_the_lease_of_a_hung_write_is_freed_when_the_write_ends() -> None:
    world = World()
    key = start_handoff(world, 22)
    world.compute(key)
    world.deliver_messages()
    world.pass_time(40 + SENDER_TIMEOUTS[SenderPhase.DRAINING].limit + 1)
    assert failure_of(world, key).quiesced and world.ring.quarantined > 0
    while world.writes:
        world.end_write()
    world.finish()
    world.pass_time(20)
    assert len(world.events[key]) == 1, "Quiesced was sent, although the pages were never quarantined"
    world.check_idle()


@pytest.mark.parametrize("moment", ["waiting for space", "leased", "writing", "written", "unpacked"])
def test_cancelling_at_any_moment_frees_all_leases_buffers_and_pages(moment: str) -> None:
    world = World()
    if moment == "waiting for space":
        other = start_handoff(world, 50, "other")
        world.compute(other, None, Event(happened=False))
        world.deliver_messages()
    num_waiting = world.ring.waiting
    key = start_handoff(world, 22)
    world.compute(key, None, Event(happened=False) if moment == "leased" else None)
    world.deliver_messages(PieceWritten)
    if moment in ("written", "unpacked"):
        while world.writes:
            world.end_write()
    if moment == "unpacked":
        world.deliver_messages(PieceUnpacked)
    world.receiver.cancel(key, world.now)
    world.run_actions()
    if moment == "waiting for space":
        assert world.ring.waiting == num_waiting
    elif moment != "unpacked":
        assert world.ring.held > 0, "a lease was freed while the sender could still write to it"
    world.finish()
    assert failure_of(world, key).quiesced and key in world.prefills[PREFILL].released
    if moment == "waiting for space":
        world.receiver.cancel(other, world.now)
        world.finish()
    world.check_idle()


@pytest.mark.parametrize("leased", [False, True])
def test_leases_of_a_dead_sender_are_quarantined_and_pages_are_not(leased: bool) -> None:
    world = World()
    key = start_handoff(world, 22)
    if leased:
        world.compute(key, None, Event(happened=False))
        world.deliver_messages()
    world.receiver.peer_lost(PREFILL, "the process died", world.now)
    world.run_actions()
    assert failure_of(world, key).quiesced
    assert world.ring.held == world.ring.quarantined and (world.ring.held > 0) == leased
    world.deliver_messages(Cancelled)
    if leased:
        world.pass_time(6, Cancelled)
        assert any(isinstance(message, Cancel) for _, _, message in world.sent), (
            "Cancel must be retransmitted, because the sender may only have been slow"
        )
        world.finish()
        world.check_idle()


def test_contexts_are_written_directly_if_too_much_of_the_ring_is_quarantined() -> None:
    world = World()
    keys = [start_handoff(world, 44, f"dead{number}") for number in range(2)]
    for key in keys:
        world.compute(key, None, Event(happened=False))
    world.deliver_messages()
    world.receiver.peer_lost(PREFILL, "the process died", world.now)
    world.prefills[PREFILL].sender.peer_lost(DECODE, "the process died", world.now)
    world.run_actions()
    world.messages.clear()
    assert not world.ring.fits(2000)
    world.introduce(world.prefills[PREFILL])
    key = start_handoff(world, 30, "next")
    world.compute(key)
    world.finish()
    world.check_landed(key)
    assert (DECODE, PREFILL, StartWrites(key, False)) in world.sent


def test_pieces_that_wait_too_long_with_or_for_a_lease_fail_with_the_reason() -> None:
    world = World(prefills=(1, 1))
    first = start_handoff(world, 44, "first")
    world.compute(first, None, Event(happened=False))
    world.deliver_messages()
    second = start_handoff(world, 44, "second", prefill=2)
    world.compute(second, prefill=2)
    world.pass_time(PIECE_TIMEOUTS[PiecePhase.REQUESTED].limit + 2)
    reasons = {key.request_id: failure_of(world, key).reason for key in (first, second)}
    assert "was in phase 'leased' for 120 s" in reasons["first"]
    assert "was in phase 'requested' for 120 s" in reasons["second"]
    assert failure_of(world, first).retry and failure_of(world, first).quiesced
    world.finish()
    assert not world.ring.waiting


def test_a_handoff_fails_if_done_arrives_before_all_pieces_are_unpacked() -> None:
    world = World()
    key = start_handoff(world, 44)
    world.compute(key)
    world.deliver_messages()
    world.deliver(PREFILL, DECODE, HandoffDone(key, 7, None))
    event = failure_of(world, key)
    assert event.retry and "after 0 rows" in event.reason
    world.finish()
    world.check_idle()


def test_buffers_of_a_lost_receiver_are_freed_when_their_writes_end() -> None:
    world = World()
    key = start_handoff(world, 44)
    world.compute(key)
    world.deliver_messages()
    world.prefills[PREFILL].sender.peer_lost(DECODE, "the process died", world.now)
    world.run_actions()
    assert world.prefills[PREFILL].sender._buffers.users, "a buffer was freed while a write from it was in flight"
    while world.writes:
        world.end_write()
    assert not world.prefills[PREFILL].sender._buffers.users and world.prefills[PREFILL].released == [key]


def test_start_writes_with_staging_that_was_not_offered_fails_the_handoff() -> None:
    world = World()
    key = world.fetch(1)
    world.deliver_messages(StartWrites)
    world.messages.clear()
    world.deliver(DECODE, PREFILL, StartWrites(key, staged=True))
    assert any(isinstance(message, HandoffFailed) for _, _, message in world.sent)


def test_progress_reports_the_number_of_rows_that_were_unpacked_into_pages() -> None:
    world = World()
    key = start_handoff(world, 44)
    world.compute(key, 33)
    world.deliver_messages()
    world.end_write()
    world.deliver_messages()
    world.pass_time(1.1)
    reported = [message.rows for _, _, message in world.sent if isinstance(message, Progress)]
    assert reported[-1] == 11


class Step(Enum):
    """One step of a random run."""

    DELIVER = "deliver one of the oldest messages"
    DELIVER_COPY = "deliver one of the oldest messages and leave it in the queue, so that it arrives again"
    LOSE = "lose one of the oldest messages"
    END_WRITE = "end a write in a random state"
    COMPUTE = "submit a forward pass of one context"
    FINISH_FORWARD_PASS = "finish the newest forward pass of one context"
    PASS_TIME = "advance the clock by 0.3 or 2 seconds"
    CANCEL = "cancel one handoff"
    REPORT_PEER_LOST = "report to the receiver that a prefill worker is lost, and introduce it again"
    PASS_30_SECONDS = "advance the clock by 30 seconds"


FREQUENT_STEPS = [
    *[Step.DELIVER] * 12,
    Step.DELIVER_COPY,
    Step.LOSE,
    *[Step.END_WRITE] * 4,
    *[Step.COMPUTE] * 3,
    Step.PASS_TIME,
    *[Step.FINISH_FORWARD_PASS] * 3,
]
RARE_STEPS = [Step.CANCEL, Step.REPORT_PEER_LOST, Step.PASS_30_SECONDS]
STATES = st.sampled_from([WriteState.DONE] * 6 + [WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_in_any_order_of_events_landed_contexts_are_correct_and_everything_is_released(data: st.DataObject) -> None:
    world = World(ring_bytes=1 << 12, prefills=(1, 2))
    keys: dict[HandoffKey, int] = {}  # the number of the prefill worker of each handoff
    for number in range(3):
        prefill = number % 2 + 1
        keys[world.fetch(data.draw(st.integers(3, 40)), f"r{number}", prefill)] = prefill
    events = {key: [Event(happened=False)] for key in keys}
    world.run_actions()
    steps = data.draw(st.lists(st.sampled_from(FREQUENT_STEPS), min_size=60, max_size=150))
    for rare_step in data.draw(st.lists(st.sampled_from(RARE_STEPS), max_size=2)):
        steps.insert(data.draw(st.integers(0, len(steps))), rare_step)
    for step in steps:
        if step in (Step.DELIVER, Step.DELIVER_COPY, Step.LOSE) and world.messages:
            index = data.draw(st.integers(0, min(5, len(world.messages) - 1)))
            envelope = world.messages[index]
            if step is not Step.DELIVER_COPY:
                del world.messages[index]
            if step is not Step.LOSE:
                world.deliver(*envelope)
        elif step is Step.END_WRITE and world.writes:
            world.end_write(data.draw(STATES), data.draw(st.integers(0, len(world.writes) - 1)))
        elif step in (Step.COMPUTE, Step.FINISH_FORWARD_PASS, Step.CANCEL):
            key = data.draw(st.sampled_from(list(keys)))
            if step is Step.COMPUTE:
                compute_some(world, key, keys[key], events[key], data.draw(st.integers(1, 20)))
            elif step is Step.FINISH_FORWARD_PASS:
                events[key][-1].happened = True
                world.poll_events()
            else:
                world.receiver.cancel(key, world.now)
                world.run_actions()
        elif step is Step.PASS_TIME:
            world.pass_time(data.draw(st.sampled_from([0.3, 2.0])))
        elif step is Step.PASS_30_SECONDS:
            world.pass_time(30.0)
        elif step is Step.REPORT_PEER_LOST:  # the peer is still running, as after a false alarm
            peer = data.draw(st.sampled_from(list(world.prefills)))
            world.receiver.peer_lost(peer, "silent", world.now)
            world.run_actions()
            world.introduce(world.prefills[peer])
    settle(world, keys, events)


def compute_some(world: World, key: HandoffKey, prefill: int, events: list[Event], rows: int) -> None:
    """Submits a forward pass for the next `rows` rows of a context, with a new event, and finishes the previous pass.
    Does nothing if all rows are announced or the context has ended."""
    worker = world.prefills[f"prefill:{prefill}"]
    if key not in worker.contexts or key in worker.released:
        return
    announced, total = worker.contexts[key].num_announced, len(world.requests[key].prompt)
    if announced < total:
        events.append(Event(happened=False))
        events[-2].happened = True  # otherwise the new event could happen before it
        world.compute(key, min(total, announced + rows), events[-1], prefill)


def settle(world: World, keys: dict[HandoffKey, int], events: dict[HandoffKey, list[Event]]) -> None:
    """Computes all contexts, ends all writes, lets every timeout pass, and checks the outcome of each handoff."""
    for _ in range(8):
        world.finish()
        for key, prefill in keys.items():
            compute_some(world, key, prefill, events[key], 100)
            events[key][-1].happened = True
        world.poll_events()
        world.finish()
        world.pass_time(5.0)
    world.pass_time(400.0)  # longer than a piece waits for a lease in a ring that is full of quarantined leases
    world.finish()
    # Memory of handoffs whose end no sender has confirmed is still in quarantine. `end_writers` stands for the closing
    # of the peers' endpoints, which ends the quarantine.
    assert set(world.receiver.phases()) == world.receiver.unconfirmed_keys()
    world.receiver.end_writers(world.receiver.unconfirmed_keys(), world.now)
    world.run_actions()
    world.pass_time(1300.0)
    world.finish()
    for key in keys:
        (outcome,) = (event for event in world.events[key] if not isinstance(event, Quiesced))
        if isinstance(outcome, Landed):
            world.check_landed(key)
    assert world.receiver.phases() == {} and not world.ring.waiting
    assert world.ring.held == 0, "space of the ring leaked"
    for worker in world.prefills.values():
        assert worker.sender.phases() == {} and not worker.sender._buffers.users
        worker.check_released()
