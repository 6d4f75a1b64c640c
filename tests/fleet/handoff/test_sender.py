"""Tests of the sender's state machine: one rule at a time, then random orders of events.

Each file in scripts/sabotage.d describes the defect whose number begins the file's name.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import ManualEvent

from hotset.base.paged_span import PagedSpan
from hotset.base.processes import ProcessIdentity
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import MAX_LISTS_IN_FLIGHT, Sources
from hotset.fleet.handoff.layout import plan_writes, whole_rows
from hotset.fleet.handoff.outgoing import SENDER_TIMEOUTS, SenderPhase
from hotset.fleet.handoff.sender import TOMBSTONE_LIMIT, Sender
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import FirstTokenSampled, HandoffKey, PrefillFailed, RowsComputed

PEER, OTHER_PEER = "10.0.0.1:7000", "10.0.0.2:7000"
KEY = HandoffKey("r", 1)
ROWS = 10
STORE = msg.Store(whole_rows(PagedSpan(((1 << 20,), (1 << 21,)), 32, 4, 8)), PagedSpan(((1 << 22,),), 16, 4, 4))
TARGET = msg.Store(
    whole_rows(PagedSpan(((1 << 30,), (1 << 31,)), 64, 8, 8)), PagedSpan(((1 << 32, 1 << 33),), 12, 3, 4)
)
HELLO = msg.Hello(PEER, msg.ModelIdentity("m", 2, "8 bytes", "4 bytes", 1, ""), {"host": TARGET}, "loopback", b"first")
PAGES = (7, 3, 5)


def hello_of(process: int, endpoint: int = 0) -> msg.Hello:
    """Returns the Hello of another process, or of an endpoint that a process has opened later."""
    identity = ProcessIdentity("boot", "namespace", process, start_time=5)
    return replace(HELLO, process=identity, endpoint=endpoint, description=b"%d %d" % (process, endpoint))


def prompt(rows: int) -> PromptSpec:
    return PromptSpec(tuple(range(rows)), SamplingParams(), frozenset({3}))


def request(key: HandoffKey = KEY, rows: int = ROWS) -> msg.HandoffRequest:
    return msg.HandoffRequest(key, prompt(rows), "host", (2, 9), (4, 1))


def expected_writes(first: int, last: int) -> list[list[int]]:
    """Returns the writes for rows [first, last) and their index keys."""
    assert STORE.keys is not None and TARGET.keys is not None
    rows = plan_writes(STORE.shards[0].span, PAGES, TARGET.shards[0].span, (2, 9), first, last)
    keys = plan_writes(STORE.keys, PAGES, TARGET.keys, (4, 1), first, last)
    return [*rows.tolist(), *keys.tolist()]


class Bench:
    """A sender with two peers, and its clock."""

    def __init__(self, **limits: Any) -> None:
        self.sender, self.now, self.list_numbers = Sender(Sources(STORE), **limits), 0.0, itertools.count()
        self.sender.add_peer(PEER, HELLO)
        self.sender.add_peer(OTHER_PEER, HELLO)

    def receive(self, message: msg.Message, peer: str = PEER) -> None:
        self.sender.handle_message(peer, message, self.now)

    def command(self, command: msg.SenderCommand) -> None:
        self.sender.handle_command(command, self.now)

    def announce_rows(
        self, first: int, last: int, key: HandoffKey = KEY, peer: str = PEER, after: ManualEvent | None = None
    ) -> None:
        self.command(RowsComputed(peer, key, first, last, PAGES, after))

    def sample(self, key: HandoffKey = KEY, peer: str = PEER) -> None:
        self.command(FirstTokenSampled(peer, key, 42, {42: (-1.0, 1)}))

    def next_list(self) -> int:
        """Returns the number of the next list of writes: the sender numbers them from 0 on."""
        return next(self.list_numbers)

    def end_write(
        self, number: int, state: WriteState = WriteState.DONE, key: HandoffKey = KEY, peer: str = PEER
    ) -> None:
        self.sender.on_write_ended(peer, key, number, state, self.now)

    def start_handoff(self, key: HandoffKey = KEY, peer: str = PEER) -> "Bench":
        """Brings a handoff into phase WRITING."""
        self.receive(request(key), peer)
        self.receive(msg.StartWrites(key), peer)
        self.actions()
        return self

    def start_writes(self, *ends: int) -> list[int]:
        """Starts a handoff, announces chunks of rows that end at `ends`, and returns the number of the list of each."""
        self.start_handoff()
        for first, last in zip((0, *ends), ends, strict=False):
            self.announce_rows(first, last)
        self.actions()
        return [self.next_list() for _ in ends]

    def pass_time(self, seconds: float) -> None:
        """Advances the clock and ticks the sender at each of its deadlines, as an agent does."""
        end = self.now + seconds
        while (deadline := self.sender.next_deadline()) <= end:
            self.now = max(self.now, deadline)
            self.sender.tick(self.now)
        self.now = end
        self.sender.tick(end)

    def actions(self) -> list[Any]:
        """Audits the sender, and returns its actions since `actions` or `sent` was last called."""
        self.sender.audit()
        return list(self.sender.take_actions())

    def sent(self) -> list[msg.Message]:
        """Returns only the messages among `actions`, and discards the other actions."""
        return [action.message for action in self.actions() if isinstance(action, msg.SendMessage)]

    @property
    def phase(self) -> SenderPhase | None:
        return self.sender.phases().get((PEER, KEY))


def test_a_retransmitted_request_is_accepted_again_and_computed_once() -> None:
    bench = Bench()
    bench.receive(request())
    assert bench.actions() == [
        msg.SendMessage(PEER, msg.HandoffAccepted(KEY)),
        msg.StartPrefill(PEER, KEY, prompt(ROWS)),
    ]
    bench.receive(request())
    assert bench.actions() == [msg.SendMessage(PEER, msg.HandoffAccepted(KEY))]
    bench.pass_time(1.2)
    assert bench.sent() == [msg.HandoffAccepted(KEY)] * 2 and bench.sender.num_retransmits == 2


def test_writes_go_from_source_pages_to_target_pages_and_wait_for_the_forward_pass() -> None:
    """Defects 7 and 16: each side has its own page numbers and page sizes, and a write waits for its forward pass."""
    bench, event = Bench().start_handoff(), ManualEvent()
    bench.announce_rows(0, 6, after=event)
    (submit,) = bench.actions()
    assert submit.writes.tolist() == expected_writes(0, 6)
    assert submit.after is event and (submit.peer, submit.key) == (PEER, KEY)


def test_rows_announced_while_lists_are_in_flight_are_merged_into_the_next_list() -> None:
    """One list costs less than several. It waits only for the newest event, because events of one stream happen in
    order."""
    bench = Bench()
    first, second = bench.start_writes(2, 4)
    events = [ManualEvent() for _ in range(3)]
    for row, event in zip((4, 6, 8), events, strict=True):
        bench.announce_rows(row, row + 2, after=event)
    bench.sample()
    assert bench.actions() == []
    bench.end_write(second)
    submit, progress = bench.actions()
    assert submit.writes.tolist() == expected_writes(4, 10) and submit.after is events[-1]
    assert progress == msg.SendMessage(PEER, msg.Progress(KEY, 0))
    third = bench.next_list()
    bench.end_write(first)
    assert bench.sent() == [msg.Progress(KEY, 4)]
    bench.end_write(third)
    assert bench.sent() == [msg.Progress(KEY, 10), msg.HandoffDone(KEY, 42, {42: (-1.0, 1)})]


def test_rows_announced_before_a_write_failed_and_not_yet_submitted_are_never_written() -> None:
    bench = Bench()
    first, second = bench.start_writes(2, 4)
    bench.announce_rows(4, 10)
    bench.end_write(first, WriteState.FAILED_QUIESCED)
    bench.end_write(second)
    assert (
        not [action for action in bench.actions() if isinstance(action, msg.SubmitWrites)]
        and bench.phase is SenderPhase.NOTIFYING
    )


def test_announcing_other_pages_for_rows_that_wait_raises_an_assertion() -> None:
    bench = Bench()
    bench.start_writes(2, 4)
    bench.announce_rows(4, 6)
    with pytest.raises(AssertionError, match="announced rows have moved"):
        bench.command(RowsComputed(PEER, KEY, 6, 8, (7, 4, 5), None))


def test_writes_of_chunks_may_end_in_any_order() -> None:
    """Defect 11: while the writes of a chunk are in flight, Progress counts only the rows before that chunk, even if
    writes of later chunks have ended."""
    bench = Bench()
    tickets = bench.start_writes(4, 8)
    bench.announce_rows(8, 10)
    bench.sample()
    bench.end_write(tickets[1])
    tickets.append(bench.next_list())
    bench.end_write(tickets[2])
    assert bench.sent() == [msg.Progress(KEY, 0)] * 2
    bench.end_write(tickets[0])
    assert bench.sent() == [msg.Progress(KEY, 10), msg.HandoffDone(KEY, 42, {42: (-1.0, 1)})]


def test_a_late_copy_of_a_finished_request_is_answered_and_not_computed_again() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.sample()
    bench.end_write(ticket)
    bench.receive(msg.HandoffAck(KEY))
    bench.actions()
    bench.receive(request())
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancelled(KEY, True))]


def test_progress_is_sent_every_second_while_a_request_is_queued() -> None:
    bench = Bench().start_handoff()
    bench.pass_time(5.5)
    assert bench.sent() == [msg.Progress(KEY, 0)] * 5


def test_a_cancelled_handoff_submits_no_further_write() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(6)
    bench.receive(msg.Cancel(KEY))
    bench.announce_rows(6, 10)
    assert bench.actions() == []
    bench.end_write(ticket)
    bench.announce_rows(6, 10)
    assert bench.actions() == [msg.ReleasePages(PEER, KEY), msg.SendMessage(PEER, msg.Cancelled(KEY, True))]


def test_a_request_that_arrives_after_its_cancel_is_not_computed() -> None:
    bench = Bench()
    bench.receive(msg.Cancel(KEY))
    bench.receive(request())
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancelled(KEY, False))] * 2
    bench.receive(request(), OTHER_PEER)
    assert msg.SendMessage(OTHER_PEER, msg.HandoffAccepted(KEY)) in bench.actions(), (
        "a request of another peer with the same key must be accepted"
    )


@pytest.mark.parametrize(
    ("state", "quiesced"), [(WriteState.FAILED_QUIESCED, True), (WriteState.FAILED_UNKNOWN, False)]
)
def test_a_failed_write_is_reported_when_the_other_writes_have_ended(state: WriteState, quiesced: bool) -> None:
    """Defect 13: after a write has ended in an unknown state, its bytes may still arrive."""
    bench = Bench()
    first, second = bench.start_writes(6, 10)
    bench.end_write(second, state)
    assert bench.phase is SenderPhase.DRAINING and not [
        action for action in bench.actions() if isinstance(action, msg.ReleasePages)
    ]
    bench.end_write(first)
    release, send = bench.actions()
    assert release == msg.ReleasePages(PEER, KEY) and isinstance(send.message, msg.HandoffFailed)
    assert (send.message.quiesced, send.message.retry) == (quiesced, True)
    assert "the writes of rows [6, 10) ended as 'failed" in send.message.reason
    bench.pass_time(0.6)
    assert bench.sent() == [send.message]
    bench.receive(msg.HandoffAck(KEY))
    bench.receive(msg.Cancel(KEY))
    assert bench.sent() == [msg.Cancelled(KEY, quiesced)]


def test_a_failed_handoff_does_not_affect_other_handoffs_of_the_same_peer() -> None:
    """Defect 12: one failure must not exclude the peer."""
    bench, other = Bench(), HandoffKey("s", 1)
    (ticket,) = bench.start_writes(10)
    bench.start_handoff(other)
    bench.announce_rows(0, 10, other)
    bench.sample(other)
    second = bench.next_list()
    bench.end_write(ticket, WriteState.FAILED_UNKNOWN)
    bench.actions()
    bench.end_write(second, key=other)
    assert msg.HandoffDone(other, 42, {42: (-1.0, 1)}) in bench.sent()
    bench.receive(request(HandoffKey("t", 1)))
    assert msg.HandoffAccepted(HandoffKey("t", 1)) in bench.sent()


def test_a_hung_write_is_reported_as_not_quiesced_and_as_quiesced_when_it_ends() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.pass_time(40)
    assert bench.phase is SenderPhase.DRAINING and msg.ReleasePages(PEER, KEY) not in bench.actions()
    bench.pass_time(10)
    failed = msg.HandoffFailed(KEY, False, True, "a list of writes has not ended within 40 s")
    actions = bench.actions()
    assert msg.ReleasePages(PEER, KEY) in actions and msg.SendMessage(PEER, failed) in actions
    bench.receive(msg.HandoffAck(KEY))
    bench.pass_time(5)
    assert bench.actions() == []
    bench.receive(msg.Cancel(KEY))
    assert bench.sent() == [msg.Cancelled(KEY, False)]
    bench.end_write(ticket)
    assert bench.sent() == [msg.Cancelled(KEY, True)]
    bench.receive(msg.Cancel(KEY))
    assert bench.sent() == [msg.Cancelled(KEY, True)]


def test_a_hung_write_that_ends_before_the_ack_is_reported_as_quiesced() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.pass_time(50)
    bench.actions()
    bench.end_write(ticket)
    assert bench.sent() == [msg.HandoffFailed(KEY, True, True, "a list of writes has not ended within 40 s")]
    assert bench.phase is SenderPhase.NOTIFYING


def test_cancel_is_answered_within_its_timeout_although_a_write_does_not_end() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.receive(msg.Cancel(KEY))
    bench.pass_time(10)
    assert bench.actions() == [msg.ReleasePages(PEER, KEY), msg.SendMessage(PEER, msg.Cancelled(KEY, False))]
    bench.end_write(ticket, WriteState.FAILED_UNKNOWN)
    assert bench.sent() == [msg.Cancelled(KEY, False)] and bench.phase is None


def test_a_prompt_that_fails_midway_is_reported_after_its_writes_have_ended() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(6)
    bench.command(PrefillFailed(PEER, KEY, False, "out of memory"))
    assert bench.sent() == [msg.Progress(KEY, 0)]
    bench.end_write(ticket)
    assert bench.actions() == [
        msg.ReleasePages(PEER, KEY),
        msg.SendMessage(PEER, msg.HandoffFailed(KEY, True, False, "out of memory")),
    ]


def test_a_handoff_fails_if_the_engine_announces_no_rows_for_600_seconds() -> None:
    bench = Bench().start_handoff()
    bench.pass_time(599)
    bench.announce_rows(0, 10)
    bench.end_write(bench.next_list())
    assert bench.phase is SenderPhase.WRITING
    bench.pass_time(600)
    assert bench.sent()[-1] == msg.HandoffFailed(KEY, True, True, "no rows were computed or written for 600 s")


def test_a_restarted_receiver_may_use_its_keys_again() -> None:
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.sender.peer_lost(PEER, "the process was restarted", bench.now)
    bench.sender.add_peer(PEER, hello_of(process=2))
    bench.receive(request())
    assert bench.actions() == [], "the request must wait until the write of the old incarnation has ended"
    bench.end_write(ticket, WriteState.FAILED_QUIESCED)
    bench.sender.peer_lost(PEER, "the process was restarted again", bench.now)
    bench.sender.add_peer(PEER, hello_of(process=3))
    bench.receive(request())
    release, accepted, prefill = bench.actions()
    assert (
        release == msg.ReleasePages(PEER, KEY)
        and accepted == msg.SendMessage(PEER, msg.HandoffAccepted(KEY))
        and isinstance(prefill, msg.StartPrefill)
    )


def test_a_receiver_that_was_only_slow_gets_no_second_handoff_of_the_same_key() -> None:
    """The receiver would take HandoffAccepted as an answer to its first request, while writes of the first handoff may
    still arrive."""
    bench = Bench()
    (ticket,) = bench.start_writes(10)
    bench.sender.peer_lost(PEER, "silent", bench.now)
    bench.end_write(ticket, WriteState.FAILED_UNKNOWN)
    bench.receive(request())
    bench.sender.add_peer(PEER, HELLO)
    bench.receive(request())
    assert bench.actions() == [msg.ReleasePages(PEER, KEY), *[msg.SendMessage(PEER, msg.Cancelled(KEY, False))] * 2]


@pytest.mark.parametrize("state", [WriteState.DONE, WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])
def test_the_sender_can_confirm_to_a_lost_peer_that_a_write_has_ended_after_the_handoff(state: WriteState) -> None:
    """Defect 23: a peer that was silent returns with another endpoint, and asks whether its pages are free."""
    bench = Bench()
    bench.sender.add_peer(PEER, hello_of(process=1))
    (ticket,) = bench.start_writes(10)
    bench.sender.peer_lost(PEER, "silent", bench.now)
    bench.pass_time(11)
    assert bench.actions() == [msg.ReleasePages(PEER, KEY)] and bench.phase is None, (
        "the handoff must not wait for ever"
    )
    bench.receive(msg.Cancel(KEY))
    assert bench.sent() == [msg.Cancelled(KEY, False)], "the write has not ended"
    bench.sender.add_peer(PEER, hello_of(process=1, endpoint=2))
    bench.end_write(ticket, state)
    bench.receive(msg.Cancel(KEY))
    assert bench.sent() == [msg.Cancelled(KEY, state is not WriteState.FAILED_UNKNOWN)]


def test_the_highest_attempt_is_remembered_as_long_as_it_has_a_tombstone() -> None:
    """An older attempt may end after a newer one, so its tombstone may outlive that of the newer one."""
    bench, attempts = Bench(tombstone_limit=10.0), [HandoffKey("r", number) for number in range(4)]
    for key in (attempts[3], attempts[2]):
        bench.receive(msg.Cancel(key))
        bench.pass_time(6)
    bench.actions()
    bench.receive(request(attempts[1]))
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancelled(attempts[1], False))], (
        "attempt 2 still has a tombstone"
    )


def test_only_the_highest_attempt_of_a_request_counts() -> None:
    bench, newer = Bench().start_handoff(), HandoffKey("r", 2)
    bench.receive(request(newer))
    actions = bench.actions()
    assert actions[:2] == [msg.ReleasePages(PEER, KEY), msg.SendMessage(PEER, msg.Cancelled(KEY, True))]
    assert actions[2] == msg.SendMessage(PEER, msg.HandoffAccepted(newer))
    for stale in (HandoffKey("r", 0), KEY):
        bench.receive(request(stale))
        assert bench.actions() == [msg.SendMessage(PEER, msg.Cancelled(stale, stale == KEY))]
    bench.receive(msg.Cancel(newer))
    bench.actions()
    bench.receive(request(HandoffKey("r", 0)))
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancelled(HandoffKey("r", 0), False))]


@pytest.mark.parametrize(
    ("invalid_request", "error"),
    [
        (replace(request(), landing="device"), "landing 'device' is not one of the stores in Hello"),
        (replace(request(), row_pages=(2,)), "1 pages are too few for rows [0, 10), which need 2 pages"),
        (replace(request(), key_pages=(2,)), "1 pages are too few for keys [0, 10), which need 2 pages"),
        (replace(request(), prompt=prompt(0)), "the prompt has no tokens"),
        (replace(request(), first=4), "row 4 of 10 is not the first row of a page of 8 rows"),
        (replace(request(), first=16), "row 16 of 10 is not the first row of a page of 8 rows"),
        (replace(request(), first=-8), "row -8 of 10 is not the first row of a page of 8 rows"),
        (replace(request(), first=8, key_pages=()), "0 pages are too few for keys [8, 10), which need 1 pages"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(invalid_request: msg.HandoffRequest, error: str) -> None:
    bench = Bench()
    bench.receive(invalid_request)
    (message,) = bench.sent()
    assert isinstance(message, msg.HandoffFailed) and error in message.reason
    assert not message.retry and not message.quiesced and bench.phase is None


def test_only_rows_that_the_receiver_lacks_are_written() -> None:
    """The receiver has rows [0, 8), and lists no page that holds only these."""
    bench = Bench()
    bench.receive(replace(request(), row_pages=(9,), key_pages=(1,), first=8))
    bench.receive(msg.StartWrites(KEY))
    bench.actions()
    bench.announce_rows(0, 6)
    assert not [action for action in bench.actions() if isinstance(action, msg.SubmitWrites)]
    bench.announce_rows(6, 10)
    bench.sample()
    (submit,) = [action for action in bench.actions() if isinstance(action, msg.SubmitWrites)]
    assert submit.writes.tolist() == expected_writes(8, 10)
    bench.end_write(bench.next_list())
    assert msg.HandoffDone(KEY, 42, {42: (-1.0, 1)}) in bench.sent()


def test_a_request_of_an_unknown_peer_fails_with_a_request_for_hello() -> None:
    bench = Bench()
    bench.receive(request(), "10.0.0.3:7000")
    (message,) = bench.sent()
    assert isinstance(message, msg.HandoffFailed) and message.retry and "Hello" in message.reason


def test_skipping_rows_or_sampling_before_all_rows_raises_an_assertion() -> None:
    bench = Bench().start_handoff()
    with pytest.raises(AssertionError, match="0 rows are announced"):
        bench.announce_rows(2, 10)
    with pytest.raises(AssertionError, match="sampled after 0 of 10 rows"):
        bench.sample()


def test_tombstones_are_bounded_in_number_and_time() -> None:
    """Defect 14: ids of handoffs that never begin must not accumulate."""
    bench = Bench(max_tombstones=3, tombstone_limit=10.0)
    keys = [HandoffKey(str(number), 0) for number in range(5)]
    for key in keys:
        bench.receive(msg.Cancel(key))
        bench.pass_time(1)
    bench.actions()
    computed = []
    for key in keys:
        bench.receive(request(key))
        computed += [action.key for action in bench.actions() if isinstance(action, msg.StartPrefill)]
    assert computed == keys[:2], "the two oldest tombstones must have been removed"
    bench.pass_time(11)
    bench.actions()
    bench.receive(request(keys[4]))
    assert msg.HandoffAccepted(keys[4]) in bench.sent()


KEYS = st.builds(HandoffKey, st.sampled_from("ab"), st.integers(1, 3))
PEERS = st.sampled_from([PEER, OTHER_PEER])
END_STATES = st.sampled_from([WriteState.DONE, WriteState.DONE, WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN])
CHUNK = 2


class Prefill:
    """The engine's record of one `StartPrefill`."""

    def __init__(self, process: int, began_at: float) -> None:
        self.process, self.began_at = process, began_at
        self.announced = 0  # rows
        self.sampled = self.may_write = self.released = False
        self.tickets: dict[int, WriteState] = {}
        self.nbytes = 0  # bytes of all submitted writes
        self.may_hang = False  # a write was pending when a `wait` began that lasts at least the timeout of DRAINING

    @property
    def quiesced(self) -> bool:
        return all(state in (WriteState.DONE, WriteState.FAILED_QUIESCED) for state in self.tickets.values())


class AnyOrder(RuleBasedStateMachine):
    """In any order of events, pages are released once, pages are not released while a write that is not hung reads
    them, and `quiesced` is reported only if no write can still be running."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.prefills: dict[tuple[str, HandoffKey], Prefill] = {}
        self.processes = {PEER: 1, OTHER_PEER: 1}  # number of each peer's process
        self.endpoints = 0
        for peer in self.processes:
            self.bench.sender.add_peer(peer, hello_of(process=1))

    def check_actions(self) -> list[Any]:
        """Runs and checks the actions of the sender, and returns them."""
        actions = self.bench.actions()
        for action in actions:
            match action:
                case msg.StartPrefill(peer, key):
                    before = self.prefills.get((peer, key))
                    assert before is None or before.released, f"{key} is computed twice at the same time"
                    self.prefills[peer, key] = Prefill(self.processes[peer], self.bench.now)
                case msg.ReleasePages(peer, key):
                    self.check_release(self.prefills[peer, key])
                case msg.SubmitWrites(peer, key, number, writes):
                    prefill = self.prefills[peer, key]
                    assert prefill.may_write, "a write was submitted before StartWrites"
                    prefill.tickets[number] = WriteState.PENDING
                    prefill.nbytes += int(writes[:, 2].sum())
                    assert list(prefill.tickets.values()).count(WriteState.PENDING) <= MAX_LISTS_IN_FLIGHT, (
                        f"more than {MAX_LISTS_IN_FLIGHT} lists of one handoff are in flight"
                    )
                case msg.SendMessage(peer, message):
                    self.check_message(peer, message)
        return actions

    def check_release(self, prefill: Prefill) -> None:
        assert not prefill.released, "pages were released twice"
        prefill.released = True
        pending = WriteState.PENDING in prefill.tickets.values()
        assert prefill.may_hang or not pending, "pages were released while a write could read them"

    def check_message(self, peer: str, message: Any) -> None:
        if isinstance(message, msg.HandoffDone):
            prefill = self.prefills[peer, message.key]
            assert prefill.sampled and prefill.announced == ROWS and set(prefill.tickets.values()) == {WriteState.DONE}
            assert prefill.nbytes == sum(nbytes for _, _, nbytes in expected_writes(0, ROWS)), (
                "rows were skipped, or written twice"
            )
        if isinstance(message, msg.HandoffFailed | msg.Cancelled) and message.quiesced:
            assert self.prefills[peer, message.key].quiesced, "reported as quiesced, but a write may still be running"

    @rule(key=KEYS, peer=PEERS)
    def request(self, key: HandoffKey, peer: str) -> None:
        self.bench.receive(request(key), peer)
        self.check_actions()

    @rule(key=KEYS, peer=PEERS)
    def start_writes(self, key: HandoffKey, peer: str) -> None:
        if self.bench.sender.phases().get((peer, key)) is SenderPhase.ACCEPTED:
            self.prefills[peer, key].may_write = True
        self.bench.receive(msg.StartWrites(key), peer)
        self.check_actions()

    @rule(key=KEYS, peer=PEERS, message_type=st.sampled_from([msg.Cancel, msg.HandoffAck]))
    def cancel_or_acknowledge(self, key: HandoffKey, peer: str, message_type: Any) -> None:
        self.bench.receive(message_type(key), peer)
        self.check_actions()

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        unfinished = [handoff for handoff, prefill in self.prefills.items() if not prefill.sampled]
        if not unfinished:
            return
        peer, key = data.draw(st.sampled_from(unfinished))
        prefill = self.prefills[peer, key]
        if prefill.announced == ROWS:
            prefill.sampled = True
            self.bench.sample(key, peer)
        else:
            prefill.announced += CHUNK
            self.bench.announce_rows(prefill.announced - CHUNK, prefill.announced, key, peer)
        self.check_actions()

    @rule(data=st.data(), state=END_STATES)
    def end_write(self, data: st.DataObject, state: WriteState) -> None:
        pending = [
            (handoff, number)
            for handoff, prefill in self.prefills.items()
            for number, current in prefill.tickets.items()
            if current is WriteState.PENDING
        ]
        if pending:
            (peer, key), number = data.draw(st.sampled_from(pending))
            self.prefills[peer, key].tickets[number] = state
            self.bench.end_write(number, state, key, peer)
            self.check_actions()

    @rule(key=KEYS, peer=PEERS)
    def ask_whether_a_handoff_has_ended(self, key: HandoffKey, peer: str) -> None:
        """The sender must confirm what it knows, also about a handoff that ended because the peer was lost."""
        prefill = self.prefills.get((peer, key))
        is_open = (peer, key) in self.bench.sender.phases()
        self.bench.receive(msg.Cancel(key), peer)
        confirmed = msg.SendMessage(peer, msg.Cancelled(key, True)) in self.check_actions()
        if prefill is not None and not is_open and prefill.process == self.processes[peer]:
            assert confirmed == prefill.quiesced or self.bench.now - prefill.began_at > TOMBSTONE_LIMIT

    @rule(peer=PEERS, restarted=st.booleans(), returns=st.booleans())
    def lose_peer(self, peer: str, restarted: bool, returns: bool) -> None:
        """The peer was restarted, or was only silent. It may return with a new endpoint, or without Hello."""
        self.bench.sender.peer_lost(peer, "silent", self.bench.now)
        self.processes[peer] += restarted
        self.endpoints += 1
        if restarted or returns:
            self.bench.sender.add_peer(peer, hello_of(self.processes[peer], self.endpoints))
        self.check_actions()

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        for prefill in self.prefills.values():
            prefill.may_hang |= (
                seconds >= SENDER_TIMEOUTS[SenderPhase.DRAINING].limit
                and WriteState.PENDING in prefill.tickets.values()
            )
        self.bench.pass_time(seconds)
        self.check_actions()

    @invariant()
    def pages_are_held_exactly_until_they_are_released(self) -> None:
        phases = self.bench.sender.phases()
        held = {
            handoff
            for handoff, phase in phases.items()
            if phase in (SenderPhase.ACCEPTED, SenderPhase.WRITING, SenderPhase.DRAINING)
        }
        assert held == {handoff for handoff, prefill in self.prefills.items() if not prefill.released}

    def teardown(self) -> None:
        self.wait(2000.0)
        assert self.bench.sender.phases() == {} and all(prefill.released for prefill in self.prefills.values())
        assert self.bench.sender.next_deadline() == float("inf")


AnyOrder.TestCase.settings = examples(50, stateful_step_count=50)
TestAnyOrder = AnyOrder.TestCase
