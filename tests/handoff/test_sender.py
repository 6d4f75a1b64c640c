"""The sender's state machine: one rule at a time, then any order of events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.layout import plan_writes, whole_rows
from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    FirstTokenSampled,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    Message,
    ModelIdentity,
    PagedSpan,
    PrefillFailed,
    Progress,
    ReleasePages,
    RowsComputed,
    SenderCommand,
    SendMessage,
    StartPrefill,
    StartWrites,
    Store,
    SubmitWrites,
)
from hotset.handoff.outgoing import MAX_LISTS_IN_FLIGHT, SENDER_TIMEOUTS, SenderPhase
from hotset.handoff.sender import Sender
from hotset.transfer.api import WriteState, WriteTicket

PEER, OTHER = "10.0.0.1:7000", "10.0.0.2:7000"
KEY = HandoffKey("r", 1)
ROWS = 10
STORE = Store(whole_rows(PagedSpan(((1 << 20,), (1 << 21,)), 32, 4, 4, 8)), PagedSpan(((1 << 22,),), 16, 4, 4, 4))
TARGET = Store(
    whole_rows(PagedSpan(((1 << 30,), (1 << 31,)), 64, 8, 8, 8)), PagedSpan(((1 << 32, 1 << 33),), 12, 6, 3, 4)
)
HELLO = Hello(PEER, ModelIdentity("m", 2, "8 bytes", "4 bytes", 1, ""), {"host": TARGET}, "loopback", b"first")
PAGES = (7, 3, 5)


class Event:
    def query(self) -> bool:
        return False


def prompt(rows: int) -> PromptSpec:
    return PromptSpec(tuple(range(rows)), SamplingParams(), frozenset({3}))


def request(key: HandoffKey = KEY, rows: int = ROWS) -> HandoffRequest:
    return HandoffRequest(key, prompt(rows), "host", (2, 9), (4, 1))


def carried(first: int, last: int) -> list[list[int]]:
    """Returns the writes of these rows and their keys."""
    assert STORE.keys is not None and TARGET.keys is not None
    rows = plan_writes(STORE.shards[0].span, PAGES, TARGET.shards[0].span, (2, 9), first, last)
    keys = plan_writes(STORE.keys, PAGES, TARGET.keys, (4, 1), first, last)
    return [*rows.tolist(), *keys.tolist()]


class Desk:
    """A sender, the time, tickets, and its actions since the last check."""

    def __init__(self, **limits: Any) -> None:
        self.sender, self.now, self.tickets = Sender(STORE, **limits), 0.0, 0
        self.sender.add_peer(PEER, HELLO)
        self.sender.add_peer(OTHER, HELLO)

    def take(self, message: Message, peer: str = PEER) -> None:
        self.sender.handle_message(peer, message, self.now)

    def tell(self, command: SenderCommand) -> None:
        self.sender.handle_command(command, self.now)

    def written(
        self, first: int, last: int, key: HandoffKey = KEY, peer: str = PEER, after: Event | None = None
    ) -> None:
        self.tell(RowsComputed(peer, key, first, last, PAGES, after))

    def sampled(self, key: HandoffKey = KEY, peer: str = PEER) -> None:
        self.tell(FirstTokenSampled(peer, key, 42, {42: (-1.0, 1)}))

    def submit(self, key: HandoffKey = KEY, peer: str = PEER) -> WriteTicket:
        """Answers one `SubmitWrites`."""
        self.tickets += 1
        ticket = WriteTicket(self.tickets, 0)
        self.sender.on_submitted(peer, key, ticket)
        return ticket

    def end(
        self, ticket: WriteTicket, state: WriteState = WriteState.DONE, key: HandoffKey = KEY, peer: str = PEER
    ) -> None:
        self.sender.on_write_ended(peer, key, ticket, state, self.now)

    def writing(self, key: HandoffKey = KEY, peer: str = PEER) -> "Desk":
        self.take(request(key), peer)
        self.take(StartWrites(key), peer)
        self.actions()
        return self

    def under_way(self, *ends: int) -> list[WriteTicket]:
        """Begins a handoff and submits one chunk up to each of `ends`."""
        self.writing()
        for first, last in zip((0, *ends), ends, strict=False):
            self.written(first, last)
        self.actions()
        return [self.submit() for _ in ends]

    def pass_time(self, seconds: float) -> None:
        """Ticks at every deadline on the way, as an agent does."""
        end = self.now + seconds
        while (at := self.sender.next_deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            self.sender.tick(self.now)
        self.now = end
        self.sender.tick(end)

    def actions(self) -> list[Any]:
        self.sender.audit()
        return list(self.sender.take_actions())

    def sent(self) -> list[Message]:
        """Returns the sent messages, and drops the other actions."""
        return [action.message for action in self.actions() if isinstance(action, SendMessage)]

    @property
    def phase(self) -> SenderPhase | None:
        return self.sender.phases().get((PEER, KEY))


def test_a_retransmitted_request_is_accepted_again_and_computed_once() -> None:
    desk = Desk()
    desk.take(request())
    assert desk.actions() == [
        SendMessage(PEER, HandoffAccepted(KEY)),
        StartPrefill(PEER, KEY, prompt(ROWS)),
    ]
    desk.take(request())
    assert desk.actions() == [SendMessage(PEER, HandoffAccepted(KEY))]
    desk.pass_time(1.2)
    assert desk.sent() == [HandoffAccepted(KEY)] * 2 and desk.sender.num_retransmits == 2


def test_nothing_is_written_before_start_writes() -> None:
    desk = Desk()
    desk.take(request())
    desk.written(0, 6)
    desk.written(6, 10)
    desk.sampled()
    desk.pass_time(3)
    assert not [action for action in desk.actions() if isinstance(action, SubmitWrites)]
    desk.take(StartWrites(KEY))
    (submit,) = [action for action in desk.actions() if isinstance(action, SubmitWrites)]
    assert submit.writes.tolist() == carried(0, 10)
    desk.take(StartWrites(KEY))
    assert desk.actions() == []


def test_writes_go_from_our_pages_to_theirs_and_wait_for_the_forward_pass() -> None:
    """Defects 7 and 16: each side's own page numbers and sizes, and the event of the forward pass."""
    desk, event = Desk().writing(), Event()
    desk.written(0, 6, after=event)
    (submit,) = desk.actions()
    assert submit.writes.tolist() == carried(0, 6)
    assert submit.after is event and (submit.peer, submit.key) == (PEER, KEY)


def test_rows_announced_while_lists_are_in_flight_are_merged_into_the_next_list() -> None:
    """The cost is per write, and the newest event of a stream happens after all the others."""
    desk = Desk()
    first, second = desk.under_way(2, 4)
    events = [Event() for _ in range(3)]
    for at, event in zip((4, 6, 8), events, strict=True):
        desk.written(at, at + 2, after=event)
    desk.sampled()
    assert desk.actions() == []
    desk.end(second)
    submit, progress = desk.actions()
    assert submit.writes.tolist() == carried(4, 10) and submit.after is events[-1]
    assert progress == SendMessage(PEER, Progress(KEY, 0))
    third = desk.submit()
    desk.end(first)
    assert desk.sent() == [Progress(KEY, 4)]
    desk.end(third)
    assert desk.sent() == [Progress(KEY, 10), HandoffDone(KEY, 42, {42: (-1.0, 1)})]


def test_rows_that_wait_behind_a_failed_write_are_never_written() -> None:
    desk = Desk()
    first, second = desk.under_way(2, 4)
    desk.written(4, 10)
    desk.end(first, WriteState.FAILED_QUIESCED)
    desk.end(second)
    assert (
        not [action for action in desk.actions() if isinstance(action, SubmitWrites)]
        and desk.phase is SenderPhase.NOTIFYING
    )


def test_rows_that_move_while_they_wait_raise_an_assertion() -> None:
    desk = Desk()
    desk.under_way(2, 4)
    desk.written(4, 6)
    with pytest.raises(AssertionError, match="announced rows have moved"):
        desk.tell(RowsComputed(PEER, KEY, 6, 8, (7, 4, 5), None))


def test_done_waits_for_every_write_and_for_the_first_token() -> None:
    desk = Desk()
    first, second = desk.under_way(6, 10)
    desk.end(first)
    assert desk.actions() == [SendMessage(PEER, Progress(KEY, 6))]
    desk.sampled()
    assert desk.actions() == []
    desk.end(second)
    assert desk.actions() == [
        SendMessage(PEER, Progress(KEY, 10)),
        ReleasePages(PEER, KEY),
        SendMessage(PEER, HandoffDone(KEY, 42, {42: (-1.0, 1)})),
    ]


def test_done_waits_for_the_first_token_when_writes_are_quicker() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.end(ticket)
    assert desk.sent() == [Progress(KEY, 10)]
    desk.sampled()
    assert desk.sent() == [HandoffDone(KEY, 42, {42: (-1.0, 1)})]


def test_chunks_may_end_in_any_order() -> None:
    """Defect 11: an earlier chunk that ends after the last one blocks nothing, and rows do not count too early."""
    desk = Desk()
    tickets = desk.under_way(4, 8)
    desk.written(8, 10)
    desk.sampled()
    desk.end(tickets[1])
    tickets.append(desk.submit())
    desk.end(tickets[2])
    assert desk.sent() == [Progress(KEY, 0)] * 2
    desk.end(tickets[0])
    assert desk.sent() == [Progress(KEY, 10), HandoffDone(KEY, 42, {42: (-1.0, 1)})]


def test_done_is_retransmitted_until_it_is_acknowledged() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.sampled()
    desk.end(ticket)
    desk.actions()
    desk.pass_time(1.2)
    desk.take(request())
    assert desk.sent() == [HandoffDone(KEY, 42, {42: (-1.0, 1)})] * 3
    desk.take(HandoffAck(KEY))
    desk.take(HandoffAck(KEY))
    assert desk.actions() == [] and desk.sender.next_deadline() is None


def test_a_late_copy_of_a_served_request_begins_nothing() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.sampled()
    desk.end(ticket)
    desk.take(HandoffAck(KEY))
    desk.actions()
    desk.take(request())
    assert desk.actions() == [SendMessage(PEER, Cancelled(KEY, True))]


def test_a_queued_request_sends_progress() -> None:
    desk = Desk().writing()
    desk.pass_time(5.5)
    assert desk.sent() == [Progress(KEY, 0)] * 5


def test_cancel_before_start_writes_ends_it_at_once() -> None:
    desk = Desk()
    desk.take(request())
    desk.written(0, 10)
    desk.actions()
    desk.take(Cancel(KEY))
    assert desk.actions() == [ReleasePages(PEER, KEY), SendMessage(PEER, Cancelled(KEY, True))]
    desk.take(Cancel(KEY))
    desk.take(StartWrites(KEY))
    assert desk.actions() == [SendMessage(PEER, Cancelled(KEY, True))]


def test_cancel_keeps_the_pages_until_the_last_write_has_ended() -> None:
    """Defect 3: an abort while rows are in flight."""
    desk = Desk()
    first, second = desk.under_way(6, 10)
    desk.take(Cancel(KEY))
    desk.take(Cancel(KEY))
    desk.end(first)
    assert desk.actions() == []
    desk.sampled()
    desk.end(second)
    assert desk.actions() == [ReleasePages(PEER, KEY), SendMessage(PEER, Cancelled(KEY, True))]


def test_a_cancelled_handoff_begins_no_further_write() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(6)
    desk.take(Cancel(KEY))
    desk.written(6, 10)
    assert desk.actions() == []
    desk.end(ticket)
    desk.written(6, 10)
    assert desk.actions() == [ReleasePages(PEER, KEY), SendMessage(PEER, Cancelled(KEY, True))]


def test_a_request_that_arrives_after_its_cancel_is_not_begun() -> None:
    desk = Desk()
    desk.take(Cancel(KEY))
    desk.take(request())
    assert desk.actions() == [SendMessage(PEER, Cancelled(KEY, False))] * 2
    desk.take(request(), OTHER)
    assert SendMessage(OTHER, HandoffAccepted(KEY)) in desk.actions(), (
        "somebody else's request of the same name is another one"
    )


def test_a_sender_without_a_record_reports_not_quiesced() -> None:
    """A new incarnation answers a Cancel for the old one, whose writes may continue."""
    desk = Desk()
    desk.take(Cancel(KEY))
    assert desk.sent() == [Cancelled(KEY, False)]


@pytest.mark.parametrize(
    ("state", "quiesced"), [(WriteState.FAILED_QUIESCED, True), (WriteState.FAILED_UNKNOWN, False)]
)
def test_a_failed_write_is_reported_when_the_others_have_ended(state: WriteState, quiesced: bool) -> None:
    """Defect 13: a write that ended as unknown may still be writing."""
    desk = Desk()
    first, second = desk.under_way(6, 10)
    desk.end(second, state)
    assert desk.phase is SenderPhase.DRAINING and not [
        each for each in desk.actions() if isinstance(each, ReleasePages)
    ]
    desk.end(first)
    drop, send = desk.actions()
    assert drop == ReleasePages(PEER, KEY) and isinstance(send.message, HandoffFailed)
    assert (send.message.quiesced, send.message.retry) == (quiesced, True)
    assert "writing rows 6 to 10 ended as 'failed" in send.message.reason
    desk.pass_time(0.6)
    assert desk.sent() == [send.message]
    desk.take(HandoffAck(KEY))
    desk.take(Cancel(KEY))
    assert desk.sent() == [Cancelled(KEY, quiesced)]


def test_an_unknown_write_marks_a_handoff_that_is_being_cancelled() -> None:
    desk = Desk()
    first, second = desk.under_way(6, 10)
    desk.take(Cancel(KEY))
    desk.end(first, WriteState.FAILED_UNKNOWN)
    desk.end(second)
    assert desk.sent() == [Cancelled(KEY, False)]


def test_a_failed_handoff_affects_no_other_of_the_same_peer() -> None:
    """Defect 12."""
    desk, other = Desk(), HandoffKey("s", 1)
    (ticket,) = desk.under_way(10)
    desk.writing(other)
    desk.written(0, 10, other)
    desk.sampled(other)
    second = desk.submit(other)
    desk.end(ticket, WriteState.FAILED_UNKNOWN)
    desk.actions()
    desk.end(second, key=other)
    assert HandoffDone(other, 42, {42: (-1.0, 1)}) in desk.sent()
    desk.take(request(HandoffKey("t", 1)))
    assert HandoffAccepted(HandoffKey("t", 1)) in desk.sent()


def test_a_hung_write_is_reported_and_reported_again_if_it_ends() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.pass_time(40)
    assert desk.phase is SenderPhase.DRAINING and ReleasePages(PEER, KEY) not in desk.actions()
    desk.pass_time(10)
    failed = HandoffFailed(KEY, False, True, "a write has not ended within 40 s")
    actions = desk.actions()
    assert ReleasePages(PEER, KEY) in actions and SendMessage(PEER, failed) in actions
    desk.take(HandoffAck(KEY))
    desk.pass_time(5)
    assert desk.actions() == []
    desk.take(Cancel(KEY))
    assert desk.sent() == [Cancelled(KEY, False)]
    desk.end(ticket)
    assert desk.sent() == [Cancelled(KEY, True)]
    desk.take(Cancel(KEY))
    assert desk.sent() == [Cancelled(KEY, True)]


def test_a_hung_write_that_ends_before_the_ack_changes_the_report() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.pass_time(50)
    desk.actions()
    desk.end(ticket)
    assert desk.sent() == [HandoffFailed(KEY, True, True, "a write has not ended within 40 s")]
    assert desk.phase is SenderPhase.NOTIFYING


def test_a_cancelled_write_that_never_ends_is_answered_in_time() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.take(Cancel(KEY))
    desk.pass_time(10)
    assert desk.actions() == [ReleasePages(PEER, KEY), SendMessage(PEER, Cancelled(KEY, False))]
    desk.end(ticket, WriteState.FAILED_UNKNOWN)
    assert desk.sent() == [Cancelled(KEY, False)] and desk.phase is None


def test_a_prompt_that_cannot_be_computed_is_reported() -> None:
    desk = Desk()
    desk.take(request())
    desk.actions()
    desk.tell(PrefillFailed(PEER, KEY, True, "the engine is stopping"))
    assert desk.actions() == [
        ReleasePages(PEER, KEY),
        SendMessage(PEER, HandoffFailed(KEY, True, True, "the engine is stopping")),
    ]


def test_an_engine_that_fails_midway_waits_for_its_writes() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(6)
    desk.tell(PrefillFailed(PEER, KEY, False, "out of luck"))
    assert desk.sent() == [Progress(KEY, 0)]
    desk.end(ticket)
    assert desk.actions() == [
        ReleasePages(PEER, KEY),
        SendMessage(PEER, HandoffFailed(KEY, True, False, "out of luck")),
    ]


def test_a_receiver_that_never_sends_start_writes_gets_a_failure() -> None:
    desk = Desk()
    desk.take(request())
    desk.pass_time(10)
    actions = desk.actions()
    assert actions[-2:] == [
        ReleasePages(PEER, KEY),
        SendMessage(PEER, HandoffFailed(KEY, True, True, "no StartWrites within 10 s")),
    ]


def test_an_engine_that_announces_nothing_for_long_times_out() -> None:
    desk = Desk().writing()
    desk.pass_time(599)
    desk.written(0, 10)
    desk.end(desk.submit())
    assert desk.phase is SenderPhase.WRITING
    desk.pass_time(600)
    assert desk.sent()[-1] == HandoffFailed(KEY, True, True, "the engine has computed nothing for 600 s")


def test_death_of_the_receiver_keeps_pages_until_the_writes_have_ended() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.writing(HandoffKey("s", 1))
    desk.writing(KEY, OTHER)
    desk.sender.peer_lost(PEER, "it died", desk.now)
    assert desk.actions() == [ReleasePages(PEER, HandoffKey("s", 1))]
    assert desk.sender.open_keys(PEER) == [] and desk.sender.open_keys(OTHER) == [KEY]
    desk.end(ticket)
    assert desk.actions() == [ReleasePages(PEER, KEY)] and desk.sender.phases() == {(OTHER, KEY): SenderPhase.WRITING}


def test_a_restarted_receiver_may_use_its_keys_again() -> None:
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.sender.peer_lost(PEER, "it came back as another", desk.now)
    desk.sender.add_peer(PEER, replace(HELLO, description=b"second"))
    desk.take(request())
    assert desk.actions() == [], "not while the pages of the one before are being read"
    desk.end(ticket, WriteState.FAILED_QUIESCED)
    desk.sender.peer_lost(PEER, "and again", desk.now)
    desk.sender.add_peer(PEER, replace(HELLO, description=b"third"))
    desk.take(request())
    drop, accepted, prefill = desk.actions()
    assert (
        drop == ReleasePages(PEER, KEY)
        and accepted == SendMessage(PEER, HandoffAccepted(KEY))
        and isinstance(prefill, StartPrefill)
    )


def test_a_receiver_that_was_only_slow_does_not_get_a_second_writer() -> None:
    """It would take HandoffAccepted for that of the handoff that it waits for, and old writes may arrive late."""
    desk = Desk()
    (ticket,) = desk.under_way(10)
    desk.sender.peer_lost(PEER, "silent", desk.now)
    desk.end(ticket, WriteState.FAILED_UNKNOWN)
    desk.take(request())
    desk.sender.add_peer(PEER, HELLO)
    desk.take(request())
    assert desk.actions() == [ReleasePages(PEER, KEY), *[SendMessage(PEER, Cancelled(KEY, False))] * 2]


def test_of_one_request_only_the_highest_attempt_counts() -> None:
    desk, later = Desk().writing(), HandoffKey("r", 2)
    desk.take(request(later))
    actions = desk.actions()
    assert actions[:2] == [ReleasePages(PEER, KEY), SendMessage(PEER, Cancelled(KEY, True))]
    assert actions[2] == SendMessage(PEER, HandoffAccepted(later))
    for stale in (HandoffKey("r", 0), KEY):
        desk.take(request(stale))
        assert desk.actions() == [SendMessage(PEER, Cancelled(stale, stale == KEY))]
    desk.take(Cancel(later))
    desk.actions()
    desk.take(request(HandoffKey("r", 0)))
    assert desk.actions() == [SendMessage(PEER, Cancelled(HandoffKey("r", 0), False))]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (replace(request(), landing="device"), "landing 'device' was not offered"),
        (replace(request(), row_pages=(2,)), "1 pages for 10 rows, 8 to a page"),
        (replace(request(), key_pages=(2,)), "1 pages for 10 keys, 6 to a page"),
        (replace(request(), prompt=prompt(0)), "a prompt without tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(asked: HandoffRequest, error: str) -> None:
    desk = Desk()
    desk.take(asked)
    (message,) = desk.sent()
    assert isinstance(message, HandoffFailed) and error in message.reason
    assert not message.retry and not message.quiesced and desk.phase is None


def test_an_unknown_peer_is_asked_for_hello() -> None:
    desk = Desk()
    desk.take(request(), "10.0.0.3:7000")
    (message,) = desk.sent()
    assert isinstance(message, HandoffFailed) and message.retry and "Hello" in message.reason


def test_an_engine_that_skips_rows_raises_an_assertion() -> None:
    desk = Desk().writing()
    with pytest.raises(AssertionError, match="0 rows are announced"):
        desk.written(2, 10)
    with pytest.raises(AssertionError, match="sampled after 0 of 10 rows"):
        desk.sampled()


def test_tombstones_are_bounded_in_number_and_time() -> None:
    """Defect 14: orphaned ids leak nothing."""
    desk = Desk(max_tombstones=3, tombstone_limit=10.0)
    keys = [HandoffKey(str(number), 0) for number in range(5)]
    for key in keys:
        desk.take(Cancel(key))
        desk.pass_time(1)
    desk.actions()
    begun = []
    for key in keys:
        desk.take(request(key))
        begun += [action.key for action in desk.actions() if isinstance(action, StartPrefill)]
    assert begun == keys[:2], "the oldest gave way"
    desk.pass_time(11)
    desk.actions()
    desk.take(request(keys[4]))
    assert HandoffAccepted(keys[4]) in desk.sent()


def test_everything_is_forgotten_in_the_end() -> None:
    desk = Desk()
    desk.under_way(6, 10)
    for number in range(20):
        key = HandoffKey(str(number), 0)
        desk.take(request(key))
        if number % 2:
            desk.take(StartWrites(key))
    desk.pass_time(sum(wait.limit for wait in SENDER_TIMEOUTS.values()))
    assert desk.sender.phases() == {} and desk.sender.next_deadline() is None
    actions = desk.actions()
    assert len([each for each in actions if isinstance(each, ReleasePages)]) == 21


KEYS = st.builds(HandoffKey, st.sampled_from("ab"), st.integers(1, 3))
PEERS = st.sampled_from([PEER, OTHER])
ENDS = st.sampled_from([WriteState.DONE, WriteState.DONE, WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])
CHUNK = 2


class Work:
    """The engine's view of one `StartPrefill`."""

    def __init__(self) -> None:
        self.written, self.sampled, self.went, self.dropped = 0, False, False, False
        self.tickets: dict[int, WriteState] = {}
        self.nbytes = 0  # submitted
        self.given_up = False

    @property
    def quiesced(self) -> bool:
        return all(state in (WriteState.DONE, WriteState.FAILED_QUIESCED) for state in self.tickets.values())


class AnyOrder(RuleBasedStateMachine):
    """For any order of messages: pages are released once and in time, and `quiesced` is never reported wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.work: dict[tuple[str, HandoffKey], Work] = {}
        self.incarnation = 0

    def settle(self) -> None:
        for action in self.desk.actions():
            match action:
                case StartPrefill(peer, key):
                    before = self.work.get((peer, key))
                    assert before is None or before.dropped, "computed twice at once"
                    self.work[peer, key] = Work()
                case ReleasePages(peer, key):
                    self.drop(self.work[peer, key])
                case SubmitWrites(peer, key, listed):
                    work = self.work[peer, key]
                    assert work.went, "written before Go"
                    work.tickets[self.desk.submit(key, peer).number] = WriteState.PENDING
                    work.nbytes += int(listed[:, 2].sum())
                    assert list(work.tickets.values()).count(WriteState.PENDING) <= MAX_LISTS_IN_FLIGHT, (
                        "too much at a time"
                    )
                case SendMessage(peer, message):
                    self.said(peer, message)

    def drop(self, work: Work) -> None:
        assert not work.dropped, "pages given back twice"
        work.dropped = True
        assert work.given_up or WriteState.PENDING not in work.tickets.values(), "pages given back while they are read"

    def said(self, peer: str, message: Any) -> None:
        if isinstance(message, HandoffDone):
            work = self.work[peer, message.key]
            assert work.sampled and work.written == ROWS and set(work.tickets.values()) == {WriteState.DONE}
            assert work.nbytes == sum(nbytes for _, _, nbytes in carried(0, ROWS)), "rows were skipped, or sent twice"
        if isinstance(message, HandoffFailed | Cancelled) and message.quiesced:
            assert self.work[peer, message.key].quiesced, "sworn, and it is not so"

    @rule(key=KEYS, peer=PEERS)
    def request(self, key: HandoffKey, peer: str) -> None:
        self.desk.take(request(key), peer)
        self.settle()

    @rule(key=KEYS, peer=PEERS)
    def go(self, key: HandoffKey, peer: str) -> None:
        if self.desk.sender.phases().get((peer, key)) is SenderPhase.ACCEPTED:
            self.work[peer, key].went = True
        self.desk.take(StartWrites(key), peer)
        self.settle()

    @rule(key=KEYS, peer=PEERS, kind=st.sampled_from([Cancel, HandoffAck]))
    def say(self, key: HandoffKey, peer: str, kind: Any) -> None:
        self.desk.take(kind(key), peer)
        self.settle()

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        at_work = [name for name, work in self.work.items() if not work.sampled]
        if not at_work:
            return
        name = data.draw(st.sampled_from(at_work))
        work = self.work[name]
        if work.written == ROWS:
            work.sampled = True
            self.desk.sampled(name[1], name[0])
        else:
            work.written += CHUNK
            self.desk.written(work.written - CHUNK, work.written, name[1], name[0])
        self.settle()

    @rule(data=st.data(), state=ENDS)
    def end(self, data: st.DataObject, state: WriteState) -> None:
        pending = [
            (name, number)
            for name, work in self.work.items()
            for number, was in work.tickets.items()
            if was is WriteState.PENDING
        ]
        if pending:
            (peer, key), number = data.draw(st.sampled_from(pending))
            self.work[peer, key].tickets[number] = state
            self.desk.end(WriteTicket(number, 0), state, key, peer)
            self.settle()

    @rule(peer=PEERS, again=st.booleans())
    def die(self, peer: str, again: bool) -> None:
        self.desk.sender.peer_lost(peer, "it died", self.desk.now)
        self.incarnation += again
        hello = replace(HELLO, description=b"%d" % self.incarnation)
        self.desk.sender.add_peer(peer, hello)
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        for work in self.work.values():
            work.given_up |= (
                seconds >= SENDER_TIMEOUTS[SenderPhase.DRAINING].limit and WriteState.PENDING in work.tickets.values()
            )
        self.desk.pass_time(seconds)
        self.settle()

    @invariant()
    def held_are_those_not_dropped(self) -> None:
        phases = self.desk.sender.phases()
        held = {
            name
            for name, phase in phases.items()
            if phase in (SenderPhase.ACCEPTED, SenderPhase.WRITING, SenderPhase.DRAINING)
        }
        assert held == {name for name, work in self.work.items() if not work.dropped}

    def teardown(self) -> None:
        self.wait(2000.0)
        assert self.desk.sender.phases() == {} and all(work.dropped for work in self.work.values())


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
