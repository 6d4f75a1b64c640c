"""The engine's end of handoffs: names, events, what registration failed for, and the order in which things close."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine.handed_over import decoder_of
from harness import CPU

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine import core
from hotset.engine.build import assemble, in_process_executor, model_card
from hotset.engine.core import Engine
from hotset.engine.handoffs import DecodeEndpoint, PrefillEndpoint
from hotset.engine.input_processor import InputProcessor
from hotset.engine.process import AddRequests, EngineProcess, EngineReady, StopEngine, _stop_requested
from hotset.engine.sizing import kv_budget
from hotset.handoff.agent import NOTIFY_SECONDS, STOP_SECONDS
from hotset.handoff.messages import Fetch, HandoffKey, PrefillFailed, ReleasePages, RowsComputed, StartPrefill
from hotset.transfer.api import Region
from hotset.transfer.lanes import CLOSE_S
from hotset.transfer.loopback import Hub, Loopback

SIZES: dict[str, Any] = {"max_model_len": 144, "max_num_batched_tokens": 16, "page_rows": 16, "device_kv_tokens": 800}
PEER, KEY, SEEDED = "127.0.0.1:1", HandoffKey("r", 0), SamplingParams(seed=1)


class Watched(Loopback):
    """Says when it is closed."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.order: list[str] = []
        self.agent: threading.Thread | None = None

    def close(self) -> None:
        if self.agent is not None and self.agent.is_alive():
            self.order.append("the transfer, before the agent")
        self.order.append("transfer")
        super().close()


class Refusing(Watched):
    def register(self, region: Region) -> None:
        raise StartupError("no locked memory is left")


def make(role: Any, transfer: Loopback | None = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"max_num_seqs": 4, "host_kv_tokens": 1024, "role": role, **SIZES, **settings})
    decoder = decoder_of("dsa")
    budget = kv_budget(config, decoder.kv_shape, decoder.spec.context, CPU)
    card = model_card(config, decoder.spec, budget, CPU, torch.float64)
    executor = in_process_executor(config, decoder, budget, CPU, card.vocab)
    return assemble(config, card, decoder.kv_shape, budget, executor, transfer=transfer or Watched(Hub()))


class Dictated:
    """Stands in an agent's place: what peers want is said by the test."""

    def __init__(self) -> None:
        self.coming: list[Any] = []
        self.told: list[Any] = []

    def take_events(self) -> list[Any]:
        events, self.coming = self.coming, []
        return events

    def put(self, command: Any) -> None:
        self.told.append(command)


@pytest.fixture
def prefill() -> Iterator[Engine]:
    engine = make("prefill", plans_in_flight=2)
    yield engine
    engine.close()


@pytest.fixture
def decode() -> Iterator[Engine]:
    engine = make("decode")
    yield engine
    engine.close()


def dictated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Dictated:
    agent = Dictated()
    assert isinstance(engine._endpoint, PrefillEndpoint | DecodeEndpoint)
    monkeypatch.setattr(engine._endpoint, "_agent", agent)
    return agent


def test_defect_14_one_key_asked_again_while_its_plan_is_in_flight_is_another_request(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        agent = dictated(prefill, patch)
        agent.coming = [StartPrefill(PEER, KEY, PromptSpec((7,) * 64, SEEDED))]
        prefill.step()
        assert prefill._pending, "nothing of it is in flight: the test tests nothing"
        agent.told.clear()
        agent.coming = [ReleasePages(PEER, KEY), StartPrefill(PEER, KEY, PromptSpec((9,) * 32, SEEDED))]
        for _ in range(8):
            prefill.step()
        rows = [(told.first, told.last) for told in agent.told if isinstance(told, RowsComputed)]
        assert rows == [(0, 16), (16, 32)], "rows of both were told under one key"
        agent.coming = [ReleasePages(PEER, KEY), ReleasePages(PEER, KEY)]
        prefill.step()
        assert prefill.idle
    assert not prefill.stats().host_pages_held
    prefill.audit()


@pytest.mark.parametrize(
    ("token_ids", "params"),
    [((10**6,), SEEDED), ((), SEEDED), ((7,) * 144, SEEDED), ((7,), SamplingParams())],
    ids=["unknown token", "empty", "too long", "no seed"],
)
def test_a_prompt_that_cannot_be_computed_is_refused_and_dropped_like_any_other(
    prefill: Engine, monkeypatch: pytest.MonkeyPatch, token_ids: tuple[int, ...], params: SamplingParams
) -> None:
    with monkeypatch.context() as patch:
        agent = dictated(prefill, patch)
        agent.coming = [StartPrefill(PEER, KEY, PromptSpec(token_ids, params)), ReleasePages(PEER, KEY)]
        prefill.step()
        assert [type(told) for told in agent.told] == [PrefillFailed] and prefill.idle


class Later:
    happened = False

    def query(self) -> bool:
        return self.happened


def test_pages_are_offered_to_a_peer_after_the_copies_that_may_still_write_them(
    decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        agent, copies = dictated(decode, patch), Later()
        patch.setattr(decode.executor, "mirrored_event", lambda: copies)
        for name in ("given up", "kept"):
            (choice,) = InputProcessor(decode.card, seed=0).accept(name, [1, 2, 3], SamplingParams(), prefill_at=PEER)
            decode.add(choice)
        for _ in range(3):
            decode.step()
        assert not agent.told, "a peer may write to pages that a copy still writes to"
        decode.abort("given up/0")
        decode.step()
        copies.happened = True
        decode.step()
        assert [type(told) for told in agent.told] == [Fetch] and "kept" in agent.told[0].request.key.request_id
        decode.abort("kept/0")
        decode.step()
        assert len(agent.told) == 2, "it was given to a peer, who must be told"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_registration_that_fails_is_fatal_and_leaves_no_engine_open(role: str) -> None:
    transfer = Refusing(Hub())
    with pytest.raises(StartupError, match="no locked memory"):
        make(role, transfer)
    assert transfer.order == ["transfer"]


def test_a_control_port_that_cannot_be_had_leaves_no_engine_open(decode: Engine) -> None:
    transfer = Watched(Hub())
    with pytest.raises(StartupError, match="cannot listen"):
        make("decode", transfer, control=decode.card.control)
    assert transfer.order == ["transfer"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("broken", [False, True])
def test_defect_18_peers_are_told_before_the_transfer_closes_and_that_before_memory_goes(
    role: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Watched(Hub())
    engine = make(role, transfer)
    assert isinstance(engine._endpoint, PrefillEndpoint | DecodeEndpoint)
    transfer.agent, engine._broken = engine._endpoint._agent._thread, broken
    monkeypatch.setattr(engine.executor, "close", lambda: transfer.order.append("memory"))
    engine.close()
    assert transfer.order == ["transfer", "memory"]


def test_a_step_that_fails_at_the_end_does_not_keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Watched(Hub())
    engine = make("prefill", transfer)
    monkeypatch.setattr(engine.executor, "close", lambda: transfer.order.append("memory"))
    monkeypatch.setattr(engine.replicas[0].scheduler, "plan", lambda: 1 // 0)
    engine.close()
    assert transfer.order == ["transfer", "memory"]


class _Port:
    def __init__(self) -> None:
        self.given: list[float] = []
        self.over = threading.Event()

    def poll(self) -> None: ...

    def close(self, drain_seconds: float) -> None:
        self.given.append(drain_seconds)
        if len(self.given) > 1:
            self.over.set()
        self.over.wait(10.0)


def test_what_peers_wait_for_gets_the_time_that_is_given_until_somebody_will_not_wait() -> None:
    engine, port = make("both"), _Port()
    engine._endpoint = port  # type: ignore[assignment]
    asked = iter([False, True])
    engine.close(30.0, lambda: next(asked))
    assert port.given == [30.0, core.HURRIED_SECONDS]


def test_a_child_is_killed_only_after_all_that_it_may_need_to_close() -> None:
    small, large = make("decode"), make("decode", host_kv_tokens=8192)
    try:
        least = core.DRAIN_SECONDS + NOTIFY_SECONDS + STOP_SECONDS + CLOSE_S
        assert least < small.closing_seconds < large.closing_seconds
        process = EngineProcess.__new__(EngineProcess)
        process.pipe = type("Pipe", (), {"recv": lambda _: EngineReady(large.card, large.closing_seconds)})()
        assert process.wait_ready() is large.card
        assert process.stop_seconds > large.closing_seconds
    finally:
        small.close()
        large.close()


def test_only_a_second_order_to_stop_hurries() -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    assert not _stop_requested(inbox)
    inbox.put(AddRequests(()))
    assert not _stop_requested(inbox)
    inbox.put(StopEngine())
    assert _stop_requested(inbox)
