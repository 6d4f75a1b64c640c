"""The receiver's state machine: one rule at a time, then any order of events."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pace import scaled

from hotset.base.errors import IllegalTransition
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    Fetch,
    FetchFailed,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Landed,
    Message,
    Progress,
    Quiesced,
    ReceiverEvent,
    SendMessage,
    StartWrites,
)
from hotset.handoff.receiver import RECEIVER_TIMEOUTS, RECEIVER_TRANSITIONS, Receiver, ReceiverPhase
from hotset.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer

PEER, OTHER = "10.0.0.1:7000", "10.0.0.2:7000"
KEY = HandoffKey("r", 1)
DONE = HandoffDone(KEY, 7, {7: (-0.1, 1)})


def request(key: HandoffKey) -> HandoffRequest:
    return HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (4,), (5,))


class Desk:
    """A receiver, the time, and its actions since the last check."""

    def __init__(self) -> None:
        self.receiver, self.now = Receiver(), 0.0

    def fetch(self, key: HandoffKey = KEY, peer: str = PEER) -> None:
        self.receiver.fetch(Fetch(peer, request(key)), self.now)

    def landing(self, key: HandoffKey = KEY, peer: str = PEER) -> "Desk":
        self.fetch(key, peer)
        self.take(HandoffAccepted(key), peer)
        self.actions()
        return self

    def take(self, message: Message, peer: str = PEER) -> None:
        self.receiver.handle_message(peer, message, self.now)

    def give_up(self, key: HandoffKey = KEY) -> None:
        self.receiver.cancel(key, self.now)

    def pass_time(self, seconds: float) -> None:
        """Ticks at every deadline on the way, as an agent does."""
        end = self.now + seconds
        while (at := self.receiver.next_deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            self.receiver.tick(self.now)
        self.now = end
        self.receiver.tick(end)

    def actions(self) -> list[SendMessage | ReceiverEvent]:
        self.receiver.audit()
        return self.receiver.take_actions()

    def sent(self) -> list[Message]:
        """Returns the sent messages, and drops the events."""
        return [action.message for action in self.actions() if isinstance(action, SendMessage)]

    def events(self) -> list[ReceiverEvent]:
        """Returns the events, and drops the sent messages."""
        return [action for action in self.actions() if not isinstance(action, SendMessage)]

    @property
    def phase(self) -> ReceiverPhase | None:
        return self.receiver.phases().get(KEY)


def test_a_request_is_retransmitted_until_it_is_answered() -> None:
    desk = Desk()
    desk.fetch()
    assert desk.actions() == [SendMessage(PEER, request(KEY))]
    desk.pass_time(2.5)
    assert desk.sent() == [request(KEY), request(KEY)] and desk.receiver.num_retransmits == 2
    desk.take(HandoffAccepted(KEY))
    assert desk.sent() == [StartWrites(KEY)]
    desk.pass_time(3)
    assert desk.sent() == []


def test_start_writes_answers_every_copy_of_accepted() -> None:
    desk = Desk().landing()
    desk.take(HandoffAccepted(KEY))
    assert desk.actions() == [SendMessage(PEER, StartWrites(KEY))]


def test_a_context_lands_once_and_every_copy_of_done_is_acknowledged() -> None:
    desk = Desk().landing()
    desk.take(Progress(KEY, 2))
    desk.take(DONE)
    assert desk.actions() == [SendMessage(PEER, HandoffAck(KEY)), Landed(KEY, 7, {7: (-0.1, 1)})]
    desk.take(DONE)
    assert desk.actions() == [SendMessage(PEER, HandoffAck(KEY))]
    assert desk.receiver.phases() == {} and desk.receiver.next_deadline() is None


def test_late_progress_does_not_delay_the_request() -> None:
    """Defect 11: the progress of an earlier chunk arrives after the last one."""
    desk = Desk().landing()
    desk.take(DONE)
    desk.take(Progress(KEY, 1))
    assert [event for event in desk.actions() if isinstance(event, Landed)] and desk.phase is None


@pytest.mark.parametrize("message", [HandoffDone(KEY, 1, None), HandoffFailed(KEY, True, True, "no")])
def test_the_end_of_a_forgotten_handoff_is_still_acknowledged(message: Message) -> None:
    desk = Desk()
    desk.take(message)
    assert desk.actions() == [SendMessage(PEER, HandoffAck(KEY))]


@pytest.mark.parametrize("message", [HandoffAccepted(KEY), Progress(KEY, 3)])
def test_a_sender_of_an_unknown_handoff_is_cancelled(message: Message) -> None:
    desk = Desk()
    desk.take(message)
    assert desk.actions() == [SendMessage(PEER, Cancel(KEY))]


def test_signs_of_life_keep_a_landing_open_and_silence_ends_it() -> None:
    desk = Desk().landing()
    for _ in range(20):
        desk.pass_time(10)
        desk.take(Progress(KEY, 0))
    assert desk.phase is ReceiverPhase.LANDING and desk.actions() == []
    desk.pass_time(15)
    assert desk.phase is ReceiverPhase.CANCELLING and desk.actions() == [SendMessage(PEER, Cancel(KEY))]
    desk.take(Cancelled(KEY, True))
    assert desk.events() == [FetchFailed(KEY, True, True, f"no message from {PEER} for 15 s")]


def test_a_peer_that_never_answers_leaves_the_pages_free() -> None:
    desk = Desk()
    desk.fetch()
    desk.pass_time(10)
    assert desk.events() == [FetchFailed(KEY, True, True, f"no message from {PEER} for 10 s")]
    desk.take(HandoffAccepted(KEY))
    assert desk.sent() == [], "no Go after the engine had its pages back"
    desk.pass_time(3.5)
    assert desk.sent() == [Cancel(KEY)] * 3
    desk.take(Cancelled(KEY, False))
    assert desk.actions() == [] and desk.phase is None


def test_cancelling_before_start_writes_is_instant() -> None:
    desk = Desk()
    desk.fetch()
    desk.actions()
    desk.give_up()
    assert desk.actions() == [FetchFailed(KEY, True, False, "cancelled"), SendMessage(PEER, Cancel(KEY))]
    desk.give_up()
    desk.take(HandoffFailed(KEY, False, True, "whatever"))
    assert desk.events() == []


def test_cancelling_while_rows_land_keeps_the_pages_until_the_writer_has_stopped() -> None:
    """Defect 3: pages that a remote writer may still write are not free."""
    desk = Desk().landing()
    desk.give_up()
    assert desk.actions() == [SendMessage(PEER, Cancel(KEY))]
    desk.pass_time(1.0)
    assert desk.actions() == [SendMessage(PEER, Cancel(KEY))] * 2
    desk.take(Cancelled(KEY, True))
    assert desk.actions() == [FetchFailed(KEY, True, False, "cancelled")]
    assert desk.receiver.next_deadline() is None


def test_cancelling_what_has_just_landed_frees_it() -> None:
    desk = Desk().landing()
    desk.give_up()
    desk.take(DONE)
    assert desk.events() == [FetchFailed(KEY, True, False, "cancelled")]


def test_a_sender_that_does_not_confirm_that_it_stopped_leaves_the_pages_in_quarantine() -> None:
    desk = Desk().landing()
    desk.give_up()
    desk.pass_time(15)
    assert desk.events() == [FetchFailed(KEY, False, False, "cancelled")]
    desk.take(Cancelled(KEY, False))
    assert desk.actions() == []
    desk.pass_time(11)
    assert desk.sent() == [Cancel(KEY)] * 2
    desk.take(Cancelled(KEY, True))
    desk.take(Cancelled(KEY, True))
    assert desk.actions() == [Quiesced(KEY)]


@pytest.mark.parametrize("message", [HandoffFailed(KEY, False, True, "broke"), Cancelled(KEY, False)])
def test_an_unknown_write_is_reported_as_not_quiesced(message: Message) -> None:
    """Defect 13."""
    desk = Desk().landing()
    desk.take(message)
    (event,) = desk.events()
    assert isinstance(event, FetchFailed) and not event.quiesced
    desk.take(message)
    assert desk.events() == []


def test_a_write_that_failed_quiesced_frees_the_pages() -> None:
    desk = Desk().landing()
    desk.take(HandoffFailed(KEY, True, True, "broke"))
    assert desk.actions() == [SendMessage(PEER, HandoffAck(KEY)), FetchFailed(KEY, True, True, "broke")]


@pytest.mark.parametrize("quiesced", [True, False])
def test_a_refused_request_was_never_written(quiesced: bool) -> None:
    """A refusal is never quiesced, because it leaves no record. But StartWrites was not sent, so the pages are free."""
    desk = Desk()
    desk.fetch()
    desk.take(HandoffFailed(KEY, quiesced, False, "too long"))
    assert desk.events() == [FetchFailed(KEY, True, False, "too long")] and desk.phase is None


def test_a_failed_handoff_affects_no_other_of_the_same_peer() -> None:
    """Defect 12."""
    desk, second = Desk().landing(), HandoffKey("s", 1)
    desk.landing(second)
    desk.take(HandoffFailed(KEY, False, True, "broke"))
    desk.actions()
    desk.take(HandoffDone(second, 3, None))
    assert desk.events() == [Landed(second, 3, None)]
    desk.fetch(HandoffKey("t", 1))
    assert desk.sent() == [request(HandoffKey("t", 1))]


def test_death_of_a_peer_ends_its_handoffs_and_no_others() -> None:
    desk, asked, elsewhere = Desk().landing(), HandoffKey("s", 1), HandoffKey("t", 1)
    desk.fetch(asked)
    desk.landing(elsewhere, OTHER)
    desk.receiver.peer_lost(PEER, "it died", desk.now)
    assert desk.events() == [FetchFailed(KEY, False, False, "it died"), FetchFailed(asked, True, False, "it died")]
    assert desk.receiver.open_keys(PEER) == [] and desk.receiver.open_keys(OTHER) == [elsewhere]
    desk.take(HandoffDone(elsewhere, 3, None), OTHER)
    assert desk.events() == [Landed(elsewhere, 3, None)]


def test_a_slow_peer_may_still_confirm_that_it_stopped() -> None:
    desk = Desk().landing()
    desk.receiver.peer_lost(PEER, "silent", desk.now)
    desk.receiver.peer_lost(PEER, "silent", desk.now)
    assert len(desk.events()) == 1
    desk.pass_time(5)
    assert desk.sent() == [Cancel(KEY)]
    desk.take(Cancelled(KEY, True))
    assert desk.events() == [Quiesced(KEY)]


def test_death_while_cancelling_leaves_the_pages_in_quarantine() -> None:
    desk = Desk().landing()
    desk.give_up()
    desk.receiver.peer_lost(PEER, "it died", desk.now)
    assert desk.events() == [FetchFailed(KEY, False, False, "cancelled")]


def test_two_handoffs_of_one_key_are_one() -> None:
    """Defect 14."""
    desk = Desk().landing()
    desk.fetch()
    assert desk.actions() == []
    desk.take(DONE)
    assert len(desk.events()) == 1
    desk.fetch()
    assert desk.sent() == [request(KEY)], "and when it is over, the key is free"


def test_of_one_request_only_the_highest_attempt_counts() -> None:
    desk = Desk().landing(HandoffKey("r", 2))
    desk.fetch(HandoffKey("r", 1))
    assert desk.events() == [FetchFailed(HandoffKey("r", 1), True, False, "a later attempt is in progress")]
    desk.fetch(HandoffKey("r", 3))
    assert desk.sent() == [Cancel(HandoffKey("r", 2)), request(HandoffKey("r", 3))]


def test_only_its_own_peer_ends_a_handoff() -> None:
    desk = Desk().landing()
    for message in (DONE, HandoffFailed(KEY, True, True, ""), Cancelled(KEY, True), HandoffAccepted(KEY)):
        desk.take(message, OTHER)
    assert desk.events() == [] and desk.phase is ReceiverPhase.LANDING


def test_messages_for_the_other_role_are_ignored() -> None:
    desk = Desk().landing()
    for message in (request(KEY), StartWrites(KEY), HandoffAck(KEY), Cancel(KEY)):
        desk.take(message)
    assert desk.actions() == [] and desk.phase is ReceiverPhase.LANDING


def test_everything_is_forgotten_in_the_end() -> None:
    """Defect 14: orphaned ids leak nothing."""
    desk = Desk()
    for number in range(40):
        desk.fetch(HandoffKey(str(number), 0))
        if number % 2:
            desk.take(HandoffAccepted(HandoffKey(str(number), 0)))
        desk.pass_time(0.1)
    desk.pass_time(sum(wait.limit for wait in RECEIVER_TIMEOUTS.values()))
    assert desk.receiver.phases() == {} and desk.receiver.next_deadline() is None
    assert len(desk.events()) == 40


def test_seconds_in_each_phase_are_counted() -> None:
    desk = Desk()
    desk.fetch()
    desk.pass_time(0.75)
    desk.take(HandoffAccepted(KEY))
    desk.pass_time(2)
    desk.take(DONE)
    seconds = {phase: spent for phase, spent in desk.receiver.table.seconds.items() if spent}
    assert seconds == {ReceiverPhase.REQUESTING: 0.75, ReceiverPhase.LANDING: 2.0}


def test_every_phase_has_a_limit_and_moves_follow_the_table() -> None:
    with pytest.raises(AssertionError, match="a phase without a timeout"):
        PhaseTable(RECEIVER_TRANSITIONS, {ReceiverPhase.REQUESTING: PhaseTimeout(1.0)})
    timer = PhaseTimer(PhaseTable(RECEIVER_TRANSITIONS, scaled(RECEIVER_TIMEOUTS, 0.1)), ReceiverPhase.REQUESTING, 0.0)
    assert timer.deadline == 1.0 and timer.retransmit_at == 0.1
    with pytest.raises(IllegalTransition):
        timer.move(ReceiverPhase.CANCELLING, 0.0)


KEYS = st.builds(HandoffKey, st.sampled_from("ab"), st.integers(1, 3))
PEERS = st.sampled_from([PEER, OTHER])
SAID = st.one_of(
    st.builds(HandoffAccepted, KEYS),
    st.builds(HandoffAccepted, KEYS),
    st.builds(Progress, KEYS, st.just(1)),
    st.builds(HandoffDone, KEYS, st.just(5), st.none()),
    st.builds(HandoffFailed, KEYS, st.booleans(), st.booleans(), st.just("broke")),
    st.builds(Cancelled, KEYS, st.booleans()),
)


class AnyOrder(RuleBasedStateMachine):
    """For any order of messages: each fetch ends once, and pages are never free while they may be written."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.owners: dict[HandoffKey, str] = {}  # fetched, without an end
        self.quarantined: set[HandoffKey] = set()  # failed, not quiesced
        self.gone: set[HandoffKey] = set()  # StartWrites was sent
        self.quiesced: set[HandoffKey] = set()  # the peer confirmed that nothing more will be written

    def settle(self) -> None:
        for action in self.desk.actions():
            if isinstance(action, SendMessage):
                if isinstance(action.message, StartWrites):
                    self.gone.add(action.message.key)
                continue
            self.told(action)

    def told(self, event: Any) -> None:
        if isinstance(event, Quiesced):
            self.quarantined.remove(event.key)
            assert event.key in self.quiesced
            return
        del self.owners[event.key]
        if isinstance(event, Landed):
            assert event.key in self.gone
        elif event.quiesced:
            assert event.key in self.quiesced or event.key not in self.gone, "called free, and nobody said so"
        else:
            self.quarantined.add(event.key)

    @rule(key=KEYS, peer=PEERS)
    def fetch(self, key: HandoffKey, peer: str) -> None:
        if key not in self.desk.receiver.phases():
            self.gone.discard(key)
            self.quiesced.discard(key)
            self.quarantined.discard(key)
            self.owners[key] = peer
            self.desk.fetch(key, peer)
        else:
            self.desk.fetch(key, peer)
            assert self.desk.receiver.take_actions() == [], "it goes on as if nothing had been said"
        self.settle()

    @rule(peer=PEERS, message=SAID)
    def take(self, peer: str, message: Any) -> None:
        if isinstance(message, HandoffDone) or (isinstance(message, HandoffFailed | Cancelled) and message.quiesced):
            self.quiesced.add(message.key)
        self.desk.take(message, peer)
        self.settle()

    @rule(key=KEYS)
    def give_up(self, key: HandoffKey) -> None:
        self.desk.give_up(key)
        self.settle()

    @rule(peer=PEERS)
    def die(self, peer: str) -> None:
        self.desk.receiver.peer_lost(peer, "it died", self.desk.now)
        assert self.desk.receiver.open_keys(peer) == []
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.desk.pass_time(seconds)
        self.settle()

    @invariant()
    def open_are_those_without_an_end(self) -> None:
        opened = {key for peer in (PEER, OTHER) for key in self.desk.receiver.open_keys(peer)}
        assert opened == self.owners.keys()

    def teardown(self) -> None:
        self.desk.pass_time(2000)
        self.settle()
        assert not self.owners and self.desk.receiver.phases() == {}


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
