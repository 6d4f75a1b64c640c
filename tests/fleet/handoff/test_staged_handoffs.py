"""Tests of staged contexts: rules of both state machines that need an exact order of messages, leases and copies.

The bytes are not real. test_handoffs_under_faults.py moves real ones between both state machines, in random orders.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sharded_memory import ShardedMemory
from waiting import ManualEvent

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staged_delivery import PIECE_TIMEOUTS, WINDOW, PiecePhase
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import FirstTokenSampled, HandoffKey, RowsComputed

DECODE, PREFILL = "decode:1", "prefill:1"
MODEL = msg.ModelIdentity("m", 3, "any", "5 bytes", 2, "w")
PIECE_ROWS = 11  # a quarter of the ring


def staged_store(ranks: int) -> msg.Store:
    """Returns a store with staging memory of 8 KiB."""
    store = ShardedMemory(ranks, 4, page_rows=8).store
    return replace(store, staging=(msg.MemoryRange(1 << 40, 1 << 13),) * ranks)


SOURCE, TARGET = staged_store(2), staged_store(4)
PIECE_BYTES = PIECE_ROWS * (3 * 2 * 4 * 7 + 2 * 5)


def request(rows: int, name: str = "r", first: int = 0) -> msg.HandoffRequest:
    pages = tuple(range(-(-rows // 8) - first // 8))
    return msg.HandoffRequest(
        HandoffKey(name, 1), PromptSpec(tuple(range(rows)), SamplingParams()), "host", pages, pages, first
    )


class ReceiverBench:
    """A receiver with a ring and one peer. The test sends the messages of the peer."""

    def __init__(self) -> None:
        self.staging = ReceiverStaging({"host": TARGET})
        self.receiver, self.ring, self.now = Receiver(staging=self.staging), self.staging.ring, 0.0
        self.receiver.add_peer(PREFILL, msg.Hello(PREFILL, MODEL, {"host": SOURCE}, "loopback", b""))

    def start(self, rows: int, name: str = "r", first: int = 0) -> HandoffKey:
        """Begins a handoff for which its sender offers staging."""
        fetch = msg.Fetch(PREFILL, request(rows, name, first))
        self.receiver.fetch(fetch, self.now)
        self.receive(msg.HandoffAccepted(fetch.request.key, PIECE_BYTES))
        return fetch.request.key

    def receive(self, message: msg.Message) -> list[Any]:
        """Handles a message, and returns all actions since the last call."""
        self.receiver.handle_message(PREFILL, message, self.now)
        return self.actions()

    def actions(self) -> list[Any]:
        actions = list(self.receiver.take_actions())
        self.receiver.audit()
        return [action.message if isinstance(action, msg.SendMessage) else action for action in actions]

    def lease(self, key: HandoffKey, piece: int) -> msg.LeaseGranted:
        """Requests a lease for a full piece. There must be space for it."""
        first = piece * PIECE_ROWS
        (granted,) = self.receive(msg.LeaseRequest(key, piece, first, first + PIECE_ROWS))
        assert isinstance(granted, msg.LeaseGranted)
        return granted

    def write(self, key: HandoffKey, granted: msg.LeaseGranted) -> list[Any]:
        return self.receive(msg.PieceWritten(key, granted.piece, granted.lease))


def test_a_lease_for_rows_that_the_receiver_has_is_not_granted() -> None:
    bench = ReceiverBench()
    key = bench.start(60, first=16)
    assert bench.receive(msg.LeaseRequest(key, 0, 8, 18)) == []
    assert bench.ring.held == 0 and not bench.ring.waiting
    (granted,) = bench.receive(msg.LeaseRequest(key, 0, 16, 18))
    assert isinstance(granted, msg.LeaseGranted) and bench.ring.held > 0


def test_messages_with_old_or_unknown_lease_numbers_have_no_effect() -> None:
    bench = ReceiverBench()
    first, second = bench.start(22, "first"), bench.start(22, "second")
    old = bench.lease(first, 0)
    bench.write(first, old)
    bench.receiver.on_unpacked(first, 0)
    bench.actions()
    granted = bench.lease(second, 0)
    for lease in (old.lease, 99):
        assert bench.receive(msg.PieceWritten(second, 0, lease)) == []
    (unpack,) = bench.write(second, granted)
    assert isinstance(unpack, msg.UnpackPiece)


def test_a_late_lease_request_for_an_unpacked_piece_is_answered_and_gets_no_lease() -> None:
    bench = ReceiverBench()
    key = bench.start(44)
    bench.write(key, bench.lease(key, 0))
    bench.receiver.on_unpacked(key, 0)
    assert bench.actions() == [msg.PieceUnpacked(key, 0)]
    assert bench.receive(msg.LeaseRequest(key, 0, 0, PIECE_ROWS)) == [msg.PieceUnpacked(key, 0)]
    assert bench.ring.held == 0 and bench.staging.unpacked_rows(key) == PIECE_ROWS


def test_ring_space_is_leased_again_only_after_its_piece_was_unpacked() -> None:
    bench = ReceiverBench()
    first, second = bench.start(44, "first"), bench.start(44, "second")
    granted = [bench.lease(first, piece) for piece in range(4)]
    assert bench.receive(msg.LeaseRequest(second, 0, 0, PIECE_ROWS)) == [], "the ring is full"
    (unpack,) = bench.write(first, granted[0])
    assert isinstance(unpack, msg.UnpackPiece)
    assert bench.write(first, granted[0]) == [], "a repeated PieceWritten must not unpack the piece twice"
    bench.receiver.on_unpacked(unpack.key, unpack.number)
    assert [type(message) for message in bench.actions()] == [msg.PieceUnpacked, msg.LeaseGranted]


@pytest.mark.parametrize("lost", [False, True])
def test_a_handoff_that_ends_while_a_piece_is_unpacked_frees_its_lease_once(lost: bool) -> None:
    """The sender has written the piece, so nothing is quarantined for it."""
    bench = ReceiverBench()
    key = bench.start(11)
    bench.write(key, bench.lease(key, 0))
    if lost:
        bench.receiver.peer_lost(PREFILL, "lost", bench.now)
    else:
        bench.receiver.cancel(key, bench.now)
        bench.receiver.handle_message(PREFILL, msg.Cancelled(key, True), bench.now)
    bench.receiver.on_unpacked(key, 0)
    assert bench.ring.held == bench.ring.quarantined == 0
    assert bench.actions()[-1].quiesced and bench.receiver.phases() == {}


@pytest.mark.parametrize("leased", [False, True])
def test_leases_of_a_dead_sender_are_quarantined_and_pages_are_not(leased: bool) -> None:
    bench = ReceiverBench()
    key = bench.start(22)
    if leased:
        bench.lease(key, 0)
    bench.receiver.peer_lost(PREFILL, "the process died", bench.now)
    assert msg.FetchFailed(key, True, False, "the process died") in bench.actions()
    assert bench.ring.held == bench.ring.quarantined and (bench.ring.held > 0) == leased
    if leased:
        bench.receiver.tick(6.0)
        assert bench.actions() == [msg.Cancel(key)], "the sender may only have been slow"
        assert bench.receive(msg.Cancelled(key, True)) == [], "Quiesced is only for pages that were quarantined"
    assert bench.ring.held == 0 and bench.receiver.phases() == {}


def test_contexts_are_written_directly_if_too_much_of_the_ring_is_quarantined() -> None:
    bench = ReceiverBench()
    key = bench.start(44, "dead")
    for piece in range(4):
        bench.lease(key, piece)
    bench.receiver.peer_lost(PREFILL, "the process died", bench.now)
    bench.actions()
    bench.receiver.add_peer(PREFILL, msg.Hello(PREFILL, MODEL, {"host": SOURCE}, "loopback", b""))
    bench.receiver.fetch(msg.Fetch(PREFILL, request(30, "next")), bench.now)
    bench.actions()
    assert bench.receive(msg.HandoffAccepted(HandoffKey("next", 1), PIECE_BYTES)) == [
        msg.StartWrites(HandoffKey("next", 1), staged=False)
    ]


def test_a_handoff_fails_if_done_arrives_before_all_pieces_are_unpacked() -> None:
    bench = ReceiverBench()
    key = bench.start(44)
    bench.write(key, bench.lease(key, 0))
    bench.receiver.on_unpacked(key, 0)
    bench.actions()
    _, failed = bench.receive(msg.HandoffDone(key, 7, None))
    assert failed == msg.FetchFailed(key, True, True, "the prefill worker ended the handoff after 11 rows")
    assert bench.ring.held == 0


class SenderBench:
    """A sender with four buffers and one peer. The test sends the messages of the peer."""

    def __init__(self) -> None:
        self.sender, self.now = Sender(Sources(SOURCE)), 0.0
        self.sender.add_peer(DECODE, msg.Hello(DECODE, MODEL, {"host": TARGET}, "loopback", b""))

    def start(self, rows: int, name: str = "r") -> HandoffKey:
        """Begins a handoff whose receiver accepts staging."""
        wanted = request(rows, name)
        self.receive(wanted)
        self.receive(msg.StartWrites(wanted.key, staged=True))
        return wanted.key

    def receive(self, message: msg.Message) -> list[Any]:
        self.sender.handle_message(DECODE, message, self.now)
        return self.actions()

    def announce(self, key: HandoffKey, first: int, last: int, after: ManualEvent | None = None) -> list[Any]:
        self.sender.handle_command(RowsComputed(DECODE, key, first, last, tuple(range(30)), after), self.now)
        return self.actions()

    def actions(self) -> list[Any]:
        self.sender.audit()
        actions = list(self.sender.take_actions())
        return [action.message if isinstance(action, msg.SendMessage) else action for action in actions]

    def grant(self, requests: Sequence[Any]) -> list[Any]:
        """Grants all leases that are requested among these actions. Returns the actions that follow."""
        wanted = [entry for entry in requests if isinstance(entry, msg.LeaseRequest)]
        return [action for entry in wanted for action in self.receive(msg.LeaseGranted(entry.key, entry.piece, 1, 0))]

    def end_write(self, number: int, key: HandoffKey) -> list[Any]:
        self.sender.on_write_ended(DECODE, key, number, WriteState.DONE, self.now)
        return self.actions()


def submitted(actions: Sequence[Any]) -> list[HandoffKey]:
    return [action.key for action in actions if isinstance(action, msg.SubmitWrites)]


def test_leases_are_requested_only_for_rows_that_are_being_computed() -> None:
    """Otherwise there could be a deadlock: a context could hold a lease while it waits for pages of the prefill worker,
    and other contexts could hold these pages while they wait for leases."""
    bench = SenderBench()
    key, running = bench.start(200), ManualEvent()
    assert bench.announce(key, 0, 10, running) == [], "10 rows are not a piece of 11"
    requests = bench.announce(key, 10, 12, running)
    assert requests == [msg.LeaseRequest(key, 0, 0, PIECE_ROWS)], "the request must not wait for the forward pass"
    assert bench.grant(requests) == [] and bench.sender.has_pending_events, "the write must wait for it"
    pieces = [message.piece for message in bench.announce(key, 12, 200, running)]
    assert pieces == list(range(1, WINDOW))
    running.happened = True
    bench.sender.poll_events(bench.now)
    assert submitted(bench.actions()) == [key]


def test_buffers_are_bounded_and_assigned_in_the_order_of_grants() -> None:
    bench = SenderBench()
    first, second = bench.start(60, "first"), bench.start(60, "second")
    requests = [bench.announce(key, 0, 60) for key in (first, second)]
    assert len(requests[0]) == len(requests[1]) == WINDOW
    assert submitted(bench.grant(requests[0]) + bench.grant(requests[1])) == [first] * 4, "there are four buffers"
    in_order = [submitted(bench.end_write(number, first)) for number in range(WINDOW)]
    assert in_order == [[first]] * (WINDOW - 4) + [[second]] * 4


def test_pieces_that_wait_too_long_with_or_for_a_lease_fail_with_the_reason() -> None:
    bench = SenderBench()
    leased, requested = bench.start(11, "leased"), bench.start(11, "requested")
    bench.grant(bench.announce(leased, 0, 11, ManualEvent()))
    bench.announce(requested, 0, 11)
    bench.now = PIECE_TIMEOUTS[PiecePhase.REQUESTED].limit
    bench.sender.tick(bench.now)
    failures = [message for message in bench.actions() if isinstance(message, msg.HandoffFailed)]
    assert [failed.key for failed in failures] == [leased, requested]
    for failed, phase in zip(failures, ("leased", "requested"), strict=True):
        assert f"was in phase '{phase}' for 120 s" in failed.reason and failed.retry and failed.quiesced


def test_start_writes_with_staging_that_was_not_offered_fails_the_handoff() -> None:
    bench = SenderBench()
    bench.receive(request(1))
    answers = bench.receive(msg.StartWrites(request(1).key, staged=True))
    assert any(isinstance(message, msg.HandoffFailed) for message in answers)
    assert bench.announce(request(1).key, 0, 1) == []


def test_a_handoff_ends_when_its_last_piece_is_unpacked() -> None:
    bench = SenderBench()
    key = bench.start(11)
    bench.grant(bench.announce(key, 0, 11))
    bench.sender.handle_command(FirstTokenSampled(DECODE, key, 7, None), bench.now)
    assert bench.end_write(0, key) == [msg.PieceWritten(key, 0, 1)]
    assert msg.HandoffDone(key, 7, None) in bench.receive(msg.PieceUnpacked(key, 0))
