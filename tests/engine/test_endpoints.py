"""The engine's side of handoffs: reused keys, refused prompts, failed registrations, and the order of closing."""

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from engine.handoff_pair import decoder_of
from harness import make_engine
from loopback import Hub, Loopback
from waiting import ManualEvent

from hotset.base.errors import StartupError
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine import core
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.process import AddRequests, EngineProcess, EngineReady, StopEngine, _stop_requested
from hotset.fleet.connections import FleetConnections
from hotset.fleet.handoff.agent import NOTIFY_SECONDS, STOP_SECONDS
from hotset.fleet.handoff.endpoints import DecodeEndpoint, PrefillEndpoint
from hotset.fleet.handoff.messages import Fetch, ReleasePages, StartPrefill
from hotset.fleet.transfer.api import Region
from hotset.fleet.transfer.lanes import CLOSE_S
from hotset.memory.host_store import HostStore
from hotset.schedule.handoffs import HandoffKey, PrefillFailed, RowsComputed

SIZES: dict[str, Any] = {"max_model_len": 144, "max_num_batched_tokens": 16, "page_rows": 16, "device_kv_tokens": 800}
PEER, KEY, SEEDED = "127.0.0.1:1", HandoffKey("r", 0), SamplingParams(seed=1)


class RecordingTransfer(Loopback):
    """Records in `order` that it was closed, and whether the thread `agent` was still running then. Tests add other
    events to `order`."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.order: list[str] = []
        self.agent: threading.Thread | None = None

    def close(self) -> bool:
        if self.agent is not None and self.agent.is_alive():
            self.order.append("the agent was still running")
        self.order.append("transfer")
        return super().close()


class FailingTransfer(RecordingTransfer):
    def register(self, region: Region) -> None:
        raise StartupError("no locked memory is left")


def make(role: Any, transfer: Loopback | None = None, **settings: Any) -> Engine:
    decoder, opened = decoder_of("dsa"), transfer or RecordingTransfer(Hub())
    settings = {"max_num_seqs": 4, "host_kv_tokens": 1024, "role": role, **SIZES, **settings}
    connections = FleetConnections(lambda _settings: opened)
    return make_engine(decoder, decoder.spec, connections=lambda: connections, **settings)


class FakeAgent:
    """Replaces a handoff agent. The test sets the events that it returns and reads the commands that it received."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.commands: list[Any] = []

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def put(self, command: Any) -> None:
        self.commands.append(command)


@pytest.fixture
def prefill() -> Iterator[Engine]:
    with closing(make("prefill", plans_in_flight=2)) as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[Engine]:
    with closing(make("decode")) as engine:
        yield engine


def replace_agent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    agent = FakeAgent()
    assert isinstance(engine._endpoint, PrefillEndpoint | DecodeEndpoint)
    monkeypatch.setattr(engine._endpoint, "_agent", agent)
    return agent


def test_defect_14_a_key_may_be_reused_by_another_request(prefill: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        agent = replace_agent(prefill, patch)
        agent.events = [StartPrefill(PEER, KEY, PromptSpec((7,) * 64, SEEDED))]
        prefill.step()
        assert prefill._pending, "no plan is in flight, so this test checks nothing"
        agent.commands.clear()
        agent.events = [ReleasePages(PEER, KEY), StartPrefill(PEER, KEY, PromptSpec((9,) * 32, SEEDED))]
        for _ in range(8):
            prefill.step()
        rows = [(command.first, command.last) for command in agent.commands if isinstance(command, RowsComputed)]
        assert rows == [(0, 16), (16, 32)], "rows of the released request were reported as rows of the second"
        agent.events = [ReleasePages(PEER, KEY), ReleasePages(PEER, KEY)]
        prefill.step()
        assert prefill.idle
    assert not prefill.stats().host_pages_held
    prefill.audit()


@pytest.mark.parametrize(
    ("token_ids", "params"),
    [((10**6,), SEEDED), ((), SEEDED), ((7,) * 144, SEEDED), ((7,), SamplingParams())],
    ids=["unknown token", "empty", "too long", "no seed"],
)
def test_a_prompt_that_cannot_be_computed_is_refused(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch, token_ids: tuple[int, ...], params: SamplingParams
) -> None:
    with monkeypatch.context() as patch:
        agent = replace_agent(prefill, patch)
        agent.events = [StartPrefill(PEER, KEY, PromptSpec(token_ids, params)), ReleasePages(PEER, KEY)]
        prefill.step()
        assert [type(command) for command in agent.commands] == [PrefillFailed] and prefill.idle


def test_pages_are_announced_after_copies_to_them_have_ended(decode: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        agent, copies = replace_agent(decode, patch), ManualEvent()
        patch.setattr(decode.executor, "mirrored_event", lambda: copies)
        for name in ("aborted", "kept"):
            (choice,) = InputProcessor(decode.card, seed=0).accept(
                name, [1, 2, 3], SamplingParams(), RequestOptions(prefill_at=PEER)
            )
            decode.add(choice)
        for _ in range(3):
            decode.step()
        assert not agent.commands, "pages that a copy may still write to were announced to a peer"
        decode.abort("aborted/0")
        decode.step()
        copies.happened = True
        decode.step()
        (command,) = agent.commands
        assert isinstance(command, Fetch) and "kept" in command.request.key.request_id
        decode.abort("kept/0")
        decode.step()
        assert len(agent.commands) == 2, "the handoff of an aborted request was not cancelled"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_failed_registration_is_fatal_and_closes_the_transfer_engine(role: str) -> None:
    transfer = FailingTransfer(Hub())
    with pytest.raises(StartupError, match="no locked memory"):
        make(role, transfer)
    assert transfer.order == ["transfer"]


def test_a_control_port_in_use_is_fatal_and_closes_the_transfer_engine(decode: Engine) -> None:
    transfer = RecordingTransfer(Hub())
    with pytest.raises(StartupError, match="cannot listen"):
        make("decode", transfer, control=decode.card.control)
    assert transfer.order == ["transfer"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("broken", [False, True])
def test_defect_18_the_agent_closes_first_then_the_transfer_engine_then_memory_is_released(
    role: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = RecordingTransfer(Hub())
    engine = make(role, transfer)
    assert isinstance(engine._endpoint, PrefillEndpoint | DecodeEndpoint)
    transfer.agent, engine._broken = engine._endpoint._agent._thread, broken
    monkeypatch.setattr(engine.executor, "close", lambda: transfer.order.append("memory"))
    engine.close()
    assert transfer.order == ["transfer", "memory"]


def test_memory_is_released_even_if_a_step_fails_during_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = RecordingTransfer(Hub())
    engine = make("prefill", transfer)
    monkeypatch.setattr(engine.executor, "close", lambda: transfer.order.append("memory"))
    monkeypatch.setattr(engine.schedulers[0], "plan", lambda: 1 // 0)
    engine.close()
    assert transfer.order == ["transfer", "memory"]


class FakeEndpoint:
    """An endpoint whose first `close` waits, at most 10 s, until `close` is called again."""

    def __init__(self) -> None:
        self.drains: list[float] = []
        self.drained = threading.Event()

    def poll(self) -> None: ...

    def close(self, drain_seconds: float) -> None:
        self.drains.append(drain_seconds)
        if len(self.drains) > 1:
            self.drained.set()
        self.drained.wait(10.0)


def test_a_hurried_close_cuts_the_drain_of_handoffs_short() -> None:
    engine, endpoint = make("both"), FakeEndpoint()
    engine._endpoint = endpoint  # type: ignore[assignment]
    hurried = iter([False, True])
    engine.close(30.0, lambda: next(hurried))
    assert endpoint.drains == [30.0, core.HURRIED_SECONDS]


def test_a_child_is_killed_only_after_the_time_it_may_need_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make("decode")) as small, closing(make("decode", host_kv_tokens=8192)) as large:
        without_memory = core.DRAIN_SECONDS + NOTIFY_SECONDS + 2 * STOP_SECONDS + CLOSE_S
        assert large.closing_seconds == without_memory, "without a GPU no memory is pinned"
        monkeypatch.setattr(HostStore, "pinned_bytes", property(lambda store: store.rows.nbytes))
        assert without_memory < small.closing_seconds < large.closing_seconds
        process = EngineProcess.__new__(EngineProcess)
        process._process, process._descendants = multiprocessing.current_process(), []  # this process is the child
        process.pipe = type("Pipe", (), {"recv": lambda _: EngineReady(large.card, large.closing_seconds)})()
        assert process.wait_ready() is large.card
        assert process.stop_seconds > large.closing_seconds


def test_only_a_stop_command_counts_as_a_request_to_stop() -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    assert not _stop_requested(inbox)
    inbox.put(AddRequests(()))
    assert not _stop_requested(inbox)
    inbox.put(StopEngine())
    assert _stop_requested(inbox)
