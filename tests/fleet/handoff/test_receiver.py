"""Tests of the receiver's state machine: one rule at a time, then random orders of events.

Each file in scripts/sabotage.d describes the defect whose number begins the file's name.
"""

from typing import Any

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.receiver import RECEIVER_TIMEOUTS, UNREPORTED_PHASES, Receiver, ReceiverPhase
from hotset.schedule.handoffs import HandoffKey

PEER, OTHER_PEER = "10.0.0.1:7000", "10.0.0.2:7000"
KEY = HandoffKey("r", 1)
DONE = msg.HandoffDone(KEY, 7, {7: (-0.1, 1)})
SUM_OF_LIMITS = sum(timeout.limit for timeout in RECEIVER_TIMEOUTS.values() if timeout.limit < float("inf"))


def request(key: HandoffKey) -> msg.HandoffRequest:
    return msg.HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (4,), (5,))


class Bench:
    """A receiver, and its clock."""

    def __init__(self) -> None:
        self.receiver, self.now = Receiver(), 0.0

    def fetch(self, key: HandoffKey = KEY, peer: str = PEER) -> None:
        self.receiver.fetch(msg.Fetch(peer, request(key)), self.now)

    def start_landing(self, key: HandoffKey = KEY, peer: str = PEER) -> "Bench":
        """Brings a handoff into phase LANDING."""
        self.fetch(key, peer)
        self.receive(msg.HandoffAccepted(key), peer)
        self.actions()
        return self

    def receive(self, message: msg.Message, peer: str = PEER) -> None:
        self.receiver.handle_message(peer, message, self.now)

    def cancel(self, key: HandoffKey = KEY) -> None:
        self.receiver.cancel(key, self.now)

    def pass_time(self, seconds: float) -> None:
        """Advances the clock and ticks the receiver at each of its deadlines, as an agent does."""
        end = self.now + seconds
        while (deadline := self.receiver.next_deadline()) <= end:
            self.now = max(self.now, deadline)
            self.receiver.tick(self.now)
        self.now = end
        self.receiver.tick(end)

    def actions(self) -> list[msg.SendMessage | msg.ReceiverEvent]:
        """Audits the receiver, and returns its actions since `actions`, `sent` or `events` was last called."""
        self.receiver.audit()
        return self.receiver.take_actions()

    def sent(self) -> list[msg.Message]:
        """Returns only the messages among `actions`, and discards the events."""
        return [action.message for action in self.actions() if isinstance(action, msg.SendMessage)]

    def events(self) -> list[msg.ReceiverEvent]:
        """Returns only the events among `actions`, and discards the messages."""
        return [action for action in self.actions() if not isinstance(action, msg.SendMessage)]

    @property
    def phase(self) -> ReceiverPhase | None:
        return self.receiver.phases().get(KEY)


def test_a_request_is_retransmitted_until_it_is_answered() -> None:
    bench = Bench()
    bench.fetch()
    assert bench.actions() == [msg.SendMessage(PEER, request(KEY))]
    bench.pass_time(2.5)
    assert bench.sent() == [request(KEY), request(KEY)] and bench.receiver.num_retransmits == 2
    bench.receive(msg.HandoffAccepted(KEY))
    assert bench.sent() == [msg.StartWrites(KEY)]
    bench.pass_time(3)
    assert bench.sent() == []


def test_start_writes_answers_every_copy_of_accepted() -> None:
    bench = Bench().start_landing()
    bench.receive(msg.HandoffAccepted(KEY))
    assert bench.actions() == [msg.SendMessage(PEER, msg.StartWrites(KEY))]


def test_a_context_lands_once_and_every_copy_of_done_is_acknowledged() -> None:
    bench = Bench().start_landing()
    bench.receive(msg.Progress(KEY, 2))
    bench.receive(DONE)
    assert bench.actions() == [msg.SendMessage(PEER, msg.HandoffAck(KEY)), msg.Landed(KEY, 7, {7: (-0.1, 1)})]
    bench.receive(DONE)
    assert bench.actions() == [msg.SendMessage(PEER, msg.HandoffAck(KEY))]
    assert bench.receiver.phases() == {} and bench.receiver.next_deadline() == float("inf")


@pytest.mark.parametrize("message", [msg.HandoffDone(KEY, 1, None), msg.HandoffFailed(KEY, True, True, "failed")])
def test_the_outcome_of_an_unknown_handoff_is_acknowledged(message: msg.Message) -> None:
    bench = Bench()
    bench.receive(message)
    assert bench.actions() == [msg.SendMessage(PEER, msg.HandoffAck(KEY))]


@pytest.mark.parametrize("message", [msg.HandoffAccepted(KEY), msg.Progress(KEY, 3)])
def test_messages_of_an_unknown_handoff_are_answered_with_cancel(message: msg.Message) -> None:
    bench = Bench()
    bench.receive(message)
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancel(KEY))]


def test_progress_keeps_a_landing_open_and_silence_cancels_it() -> None:
    bench = Bench().start_landing()
    for _ in range(20):
        bench.pass_time(10)
        bench.receive(msg.Progress(KEY, 0))
    assert bench.phase is ReceiverPhase.LANDING and bench.actions() == []
    bench.pass_time(15)
    assert bench.phase is ReceiverPhase.CANCELLING and bench.actions() == [msg.SendMessage(PEER, msg.Cancel(KEY))]
    bench.receive(msg.Cancelled(KEY, True))
    assert bench.events() == [msg.FetchFailed(KEY, True, True, f"no message from {PEER} for 15 s")]


@pytest.mark.parametrize("lost", [False, True])
def test_pages_are_free_if_the_peer_never_answers_the_request(lost: bool) -> None:
    bench = Bench()
    bench.fetch()
    bench.pass_time(10)
    assert bench.events() == [msg.FetchFailed(KEY, True, True, f"no message from {PEER} for 10 s")]
    bench.receive(msg.HandoffAccepted(KEY))
    assert bench.sent() == [], "StartWrites was sent although the pages are free"
    bench.pass_time(3.5)
    assert bench.sent() == [msg.Cancel(KEY)] * 3
    if lost:
        bench.receiver.peer_lost(PEER, "the process died", bench.now)
    else:
        bench.receive(msg.Cancelled(KEY, False))
    assert bench.actions() == [] and bench.phase is None


def test_pages_are_quarantined_until_the_sender_confirms_that_it_has_stopped() -> None:
    bench = Bench().start_landing()
    bench.cancel()
    bench.pass_time(15)
    assert bench.phase is ReceiverPhase.FENCING and bench.events() == []
    bench.pass_time(5)
    assert bench.events() == [msg.FetchFailed(KEY, False, False, "cancelled")]
    bench.receive(msg.Cancelled(KEY, False))
    assert bench.actions() == []
    bench.pass_time(11)
    assert bench.sent() == [msg.Cancel(KEY)] * 2
    bench.receive(msg.Cancelled(KEY, True))
    bench.receive(msg.Cancelled(KEY, True))
    assert bench.actions() == [msg.Quiesced(KEY)]


@pytest.mark.parametrize("message", [msg.HandoffFailed(KEY, False, True, "write failed"), msg.Cancelled(KEY, False)])
def test_a_write_in_unknown_state_is_reported_once_as_not_quiesced(message: msg.Message) -> None:
    """Defect 13: the sender may still write to the pages."""
    bench = Bench().start_landing()
    bench.receive(message)
    bench.receive(message)
    assert bench.events() == [] and bench.phase is ReceiverPhase.FENCING
    bench.pass_time(5)
    (event,) = bench.events()
    assert isinstance(event, msg.FetchFailed) and not event.quiesced
    bench.receive(message)
    assert bench.events() == []


def test_a_write_that_failed_as_quiesced_frees_the_pages() -> None:
    bench = Bench().start_landing()
    bench.receive(msg.HandoffFailed(KEY, True, True, "write failed"))
    assert bench.actions() == [
        msg.SendMessage(PEER, msg.HandoffAck(KEY)),
        msg.FetchFailed(KEY, True, True, "write failed"),
    ]


@pytest.mark.parametrize("quiesced", [True, False])
def test_the_pages_of_a_refused_request_are_free(quiesced: bool) -> None:
    """StartWrites was not sent, so the pages are free even if `quiesced` is False in the sender's report."""
    bench = Bench()
    bench.fetch()
    bench.receive(msg.HandoffFailed(KEY, quiesced, False, "too long"))
    assert bench.events() == [msg.FetchFailed(KEY, True, False, "too long")] and bench.phase is None


def test_a_failed_handoff_does_not_affect_other_handoffs_of_the_same_peer() -> None:
    """Defect 12: one failure must not exclude the peer."""
    bench, second = Bench().start_landing(), HandoffKey("s", 1)
    bench.start_landing(second)
    bench.receive(msg.HandoffFailed(KEY, False, True, "write failed"))
    bench.actions()
    bench.receive(msg.HandoffDone(second, 3, None))
    assert bench.events() == [msg.Landed(second, 3, None)]
    bench.fetch(HandoffKey("t", 1))
    assert bench.sent() == [request(HandoffKey("t", 1))]


def test_the_loss_of_a_peer_ends_its_handoffs_and_no_others() -> None:
    bench, requested, of_other_peer = Bench().start_landing(), HandoffKey("s", 1), HandoffKey("t", 1)
    bench.fetch(requested)
    bench.start_landing(of_other_peer, OTHER_PEER)
    bench.receiver.peer_lost(PEER, "the process died", bench.now)
    assert bench.events() == [msg.FetchFailed(requested, True, False, "the process died")]
    bench.pass_time(5)
    assert bench.events() == [msg.FetchFailed(KEY, False, False, "the process died")]
    assert bench.receiver.open_keys(PEER) == [] and bench.receiver.open_keys(OTHER_PEER) == [of_other_peer]
    bench.receive(msg.HandoffDone(of_other_peer, 3, None), OTHER_PEER)
    assert bench.events() == [msg.Landed(of_other_peer, 3, None)]


def test_no_page_is_quarantined_if_a_lost_peer_confirms_or_is_cut_off_in_time() -> None:
    """Defect 23: a failure is reported only when the pages are free, if that takes at most 5 s."""
    bench, second = Bench().start_landing(), HandoffKey("s", 1)
    bench.start_landing(second)
    bench.receiver.peer_lost(PEER, "silent", bench.now)
    assert bench.actions() == [msg.SendMessage(PEER, msg.Cancel(KEY)), msg.SendMessage(PEER, msg.Cancel(second))]
    assert bench.receiver.unconfirmed_keys() == bench.receiver.unconfirmed_keys(PEER) == {KEY, second}
    assert bench.receiver.open_keys(PEER) == [], "a lost peer must not be watched"
    bench.receive(msg.Cancelled(KEY, True))
    assert bench.events() == [msg.FetchFailed(KEY, True, False, "silent")]
    bench.receiver.end_writers([KEY, second, HandoffKey("unknown", 1)], bench.now)
    assert bench.events() == [msg.FetchFailed(second, True, False, "silent")]
    assert bench.receiver.phases() == {}


def test_pages_stay_in_quarantine_without_limit_until_their_writer_is_cut_off() -> None:
    """Defect 23: no page is lost for ever."""
    bench, open_key = Bench().start_landing(), HandoffKey("s", 1)
    bench.receiver.peer_lost(PEER, "silent", bench.now)
    bench.start_landing(open_key, OTHER_PEER)
    for _ in range(1000):
        bench.pass_time(10)
        bench.receive(msg.Progress(open_key, 0), OTHER_PEER)
    assert bench.events() == [msg.FetchFailed(KEY, False, False, "silent")]
    assert bench.phase is ReceiverPhase.QUARANTINED
    bench.receiver.end_writers([KEY, open_key], bench.now)
    assert bench.events() == [msg.Quiesced(KEY)]
    assert bench.receiver.phases() == {open_key: ReceiverPhase.LANDING}, "only failed handoffs may be ended"


def test_the_handoffs_of_a_peer_that_has_forgotten_this_worker_can_be_retried() -> None:
    bench, requested = Bench().start_landing(), HandoffKey("s", 1)
    bench.fetch(requested)
    bench.receiver.peer_lost(PEER, "forgotten", bench.now, retry=True)
    bench.receive(msg.Cancelled(KEY, True))
    assert bench.events() == [
        msg.FetchFailed(requested, True, True, "forgotten"),
        msg.FetchFailed(KEY, True, True, "forgotten"),
    ]


def test_a_second_fetch_of_an_open_key_has_no_effect() -> None:
    """Defect 14: two handoffs of one key must not be confused."""
    bench = Bench().start_landing()
    bench.fetch()
    assert bench.actions() == []
    bench.receive(DONE)
    assert len(bench.events()) == 1
    bench.fetch()
    assert bench.sent() == [request(KEY)], "it must be possible to fetch a key again after its handoff has ended"


def test_only_the_highest_attempt_of_a_request_counts() -> None:
    bench = Bench().start_landing(HandoffKey("r", 2))
    bench.fetch(HandoffKey("r", 1))
    assert bench.events() == [
        msg.FetchFailed(HandoffKey("r", 1), True, False, "a newer attempt of the request is in progress")
    ]
    bench.fetch(HandoffKey("r", 3))
    assert bench.sent() == [msg.Cancel(HandoffKey("r", 2)), request(HandoffKey("r", 3))]


def test_only_the_peer_of_a_handoff_can_end_it() -> None:
    bench = Bench().start_landing()
    for message in (DONE, msg.HandoffFailed(KEY, True, True, ""), msg.Cancelled(KEY, True), msg.HandoffAccepted(KEY)):
        bench.receive(message, OTHER_PEER)
    assert bench.events() == [] and bench.phase is ReceiverPhase.LANDING


def test_seconds_in_each_phase_are_counted() -> None:
    bench = Bench()
    bench.fetch()
    bench.pass_time(0.75)
    bench.receive(msg.HandoffAccepted(KEY))
    bench.pass_time(2)
    bench.receive(DONE)
    seconds = {phase: spent for phase, spent in bench.receiver.table.seconds.items() if spent}
    assert seconds == {ReceiverPhase.REQUESTING: 0.75, ReceiverPhase.LANDING: 2.0}


KEYS = st.builds(HandoffKey, st.sampled_from("ab"), st.integers(1, 3))
PEERS = st.sampled_from([PEER, OTHER_PEER])
MESSAGES = st.one_of(
    st.builds(msg.HandoffAccepted, KEYS),
    st.builds(msg.HandoffAccepted, KEYS),
    st.builds(msg.Progress, KEYS, st.just(1)),
    st.builds(msg.HandoffDone, KEYS, st.just(5), st.none()),
    st.builds(msg.HandoffFailed, KEYS, st.booleans(), st.booleans(), st.just("write failed")),
    st.builds(msg.Cancelled, KEYS, st.booleans()),
)


class AnyOrder(RuleBasedStateMachine):
    """In any order of events, each fetch ends once, and pages are never free while the sender may write to them."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.open: dict[HandoffKey, str] = {}  # the peer of each fetch that has no outcome
        self.quarantined: set[HandoffKey] = set()  # handoffs that failed without being quiesced
        self.may_be_written: set[HandoffKey] = set()  # StartWrites was sent
        self.quiesced: set[HandoffKey] = set()  # handoffs that a peer, perhaps the wrong one, has reported as quiesced

    def check_actions(self) -> None:
        """Checks the actions of the receiver."""
        for action in self.bench.actions():
            if isinstance(action, msg.SendMessage):
                if isinstance(action.message, msg.StartWrites):
                    self.may_be_written.add(action.message.key)
                continue
            self.check_event(action)

    def check_event(self, event: Any) -> None:
        if isinstance(event, msg.Quiesced):
            self.quarantined.remove(event.key)
            assert event.key in self.quiesced
            return
        del self.open[event.key]
        if isinstance(event, msg.Landed):
            assert event.key in self.may_be_written
        elif event.quiesced:
            assert event.key in self.quiesced or event.key not in self.may_be_written, (
                "reported as quiesced, but the sender may still write"
            )
        else:
            self.quarantined.add(event.key)

    @rule(key=KEYS, peer=PEERS)
    def fetch(self, key: HandoffKey, peer: str) -> None:
        if key not in self.bench.receiver.phases():
            self.may_be_written.discard(key)
            self.quiesced.discard(key)
            self.quarantined.discard(key)
            self.open[key] = peer
            self.bench.fetch(key, peer)
        else:
            self.bench.fetch(key, peer)
            assert self.bench.receiver.take_actions() == [], "a second fetch of an open key must have no effect"
        self.check_actions()

    @rule(peer=PEERS, message=MESSAGES)
    def receive(self, peer: str, message: Any) -> None:
        if isinstance(message, msg.HandoffDone) or (
            isinstance(message, msg.HandoffFailed | msg.Cancelled) and message.quiesced
        ):
            self.quiesced.add(message.key)
        self.bench.receive(message, peer)
        self.check_actions()

    @rule(key=KEYS)
    def cancel(self, key: HandoffKey) -> None:
        self.bench.cancel(key)
        self.check_actions()

    @rule(peer=PEERS, forgotten=st.booleans())
    def lose_peer(self, peer: str, forgotten: bool) -> None:
        """The peer seems to be dead, or it is alive and has forgotten this worker. In both cases it may send further
        messages, in the same incarnation."""
        self.bench.receiver.peer_lost(peer, "lost", self.bench.now, retry=forgotten)
        assert self.bench.receiver.open_keys(peer) == []
        self.check_actions()

    @rule(peer=PEERS)
    def cut_off_lost_peer(self, peer: str) -> None:
        """The endpoint of the peer is closed, perhaps because its process has ended."""
        keys = self.bench.receiver.unconfirmed_keys(peer)
        self.quiesced |= keys
        self.bench.receiver.end_writers(keys, self.bench.now)
        assert self.bench.receiver.unconfirmed_keys(peer) == set()
        self.check_actions()
        assert self.quarantined.isdisjoint(keys), "pages are in quarantine although nobody can write to them"

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.bench.pass_time(seconds)
        self.check_actions()

    @invariant()
    def open_handoffs_are_the_fetches_without_an_outcome(self) -> None:
        phases = self.bench.receiver.phases()
        assert {key for key, phase in phases.items() if phase in UNREPORTED_PHASES} == self.open.keys()
        assert {key for key, phase in phases.items() if phase is ReceiverPhase.QUARANTINED} == self.quarantined

    def teardown(self) -> None:
        self.bench.pass_time(SUM_OF_LIMITS)
        self.check_actions()
        assert not self.open and set(self.bench.receiver.phases()) == self.quarantined
        for peer in (PEER, OTHER_PEER):
            self.cut_off_lost_peer(peer)
        assert not self.quarantined and self.bench.receiver.phases() == {}
        assert self.bench.receiver.next_deadline() == float("inf")


AnyOrder.TestCase.settings = examples(40, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
