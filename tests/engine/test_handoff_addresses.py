"""Control addresses of prefill and decode workers: where workers listen, which address they advertise, and which
addresses are refused."""

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from engine.test_invariance import MODELS
from harness import make_engine, tiny_directory
from loopback import Hub, Loopback

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import DEFAULT_STAGING_MIB
from hotset.base.errors import HandoffLost, RequestError
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.units import MIB
from hotset.engine.client import EngineClient
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.process import EngineProcess
from hotset.fleet.connections import FleetConnections
from hotset.fleet.handoff.routes import PROBE_BYTES
from hotset.fleet.handoff.stores import regions
from hotset.fleet.transfer.api import Region, Transfer
from hotset.fleet.transfer.engines import TransferSettings

SECRET = "a secret that both workers share"
SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 256, "page_rows": 4}
SCENARIO_S = 200.0
FOUR_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class RecordingLoopback(Loopback):
    def __init__(self) -> None:
        super().__init__(Hub())
        self.registered: list[Region] = []

    def register(self, region: Region) -> None:
        self.registered.append(region)
        super().register(region)


def make(open_transfer: Callable[[TransferSettings], Transfer] = TransferSettings.open, **settings: Any) -> Engine:
    spec, decoder = MODELS["dsa"]
    connections = FleetConnections(open_transfer)
    return make_engine(
        decoder, spec, connections=lambda: connections, max_model_len=96, device_kv_tokens=400, **settings
    )


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"control": "127.0.0.2:0"}, "127.0.0.2"),
        ({"control": "localhost:0"}, "127.0.0.1"),
        (
            {"control": "0.0.0.0:0", "advertise": "127.0.0.3:0", "handoff_secret": SECRET, "transfer_interface": "lo"},
            "127.0.0.3",
        ),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_transfer_engine_is_opened_at_the_advertised_host_and_registers_the_kv_memory(
    role: Literal["prefill", "decode"], settings: dict[str, str], address: str
) -> None:
    opened: list[TransferSettings] = []
    transfer = RecordingLoopback()

    def open_transfer(settings: TransferSettings) -> Loopback:
        opened.append(settings)
        return transfer

    with closing(make(open_transfer, role=role, transfer="mooncake", transfer_protocol="rdma", **settings)) as engine:
        lanes = 4 if role == "prefill" else 1  # a decode worker writes nothing
        assert opened == [TransferSettings("mooncake", address, "lo", "rdma", lanes)]
        assert engine.card.control is not None and engine.card.control.rpartition(":")[0] == address
        assert engine.executor.pool is not None
        pool = engine.executor.pool.bytes
        on_device = Region(pool.data_ptr(), pool.nbytes)
        *stores, probe, staging = transfer.registered
        assert probe.nbytes == PROBE_BYTES, "routes are measured with memory that nothing else uses"
        hosts = [shard.store for shard in engine.executor.hosts()]
        assert stores == regions(hosts, engine.executor.pool if role == "decode" else None)
        assert staging.nbytes == DEFAULT_STAGING_MIB * MIB
        assert (on_device in transfer.registered) == (role == "decode"), "only decode workers register the device pool"


@pytest.mark.parametrize("aborted", [False, True])
def test_the_reason_of_a_lost_handoff_is_logged_unless_aborted(aborted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The peer refuses the request, because the peer is a decode worker too."""

    def open_transfer(_settings: TransferSettings) -> Loopback:
        return Loopback(Hub())

    with closing(make(open_transfer, role="decode")) as decode, closing(make(open_transfer, role="decode")) as peer:
        (choice,) = InputProcessor(decode.card, 0).accept(
            "r", [5] * 9, FOUR_TOKENS, RequestOptions(prefill_at=peer.card.control)
        )
        decode.add(choice)
        decode.step()
        decode.step()  # passes the request to the agent, which sends it to the peer
        if aborted:
            decode.abort(choice.request_id)
        finished, errors = {}, {}
        deadline = time.monotonic() + 60.0
        while not decode.idle and time.monotonic() < deadline:
            outputs = decode.step()
            finished |= outputs.finished
            errors |= outputs.errors
        warned = [record.getMessage() for record in caplog.records if "did not arrive" in record.getMessage()]
        assert finished == {"r/0": "abort" if aborted else "lost"}
        assert bool(warned) == bool(errors) == (not aborted)
        assert aborted or (errors["r/0"] in warned[0] and "is a decode worker" in errors["r/0"])


CARD = ModelCard("m", "a", 100, 50, (), True, 100, "cpu", "float32", role="decode", host_store=True)


@pytest.mark.parametrize(
    ("address", "normalized"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("localhost:07", "127.0.0.1:7"),
        ("Worker-1:7", "worker-1:7"),
        ("[0::1]:7", "[::1]:7"),
    ],
)
def test_the_address_of_a_prefill_worker_is_normalized(address: str, normalized: str) -> None:
    (choice,) = InputProcessor(CARD, 0).accept("r", [1], FOUR_TOKENS, RequestOptions(prefill_at=address))
    assert choice.options.prefill_at == normalized


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://127.0.0.1:7", "127.0.0.1:0", "0.0.0.0:7", "*:7", "h:70000", "h:7\n"]
)
def test_an_address_that_no_peer_can_have_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="control address"):
        InputProcessor(CARD, 0).accept("r", [1], FOUR_TOKENS, RequestOptions(prefill_at=address))


@pytest.mark.parametrize("landing", ["host", "device"])
def test_a_landing_without_a_prefill_worker_is_refused(landing: Literal["host", "device"]) -> None:
    with pytest.raises(RequestError, match="computed here; leave it out"):
        InputProcessor(CARD, 0).accept("r", [1], FOUR_TOKENS, RequestOptions(landing=landing))


async def hand_over(model: str, prefill_host: str, decode_host: str, interface: str) -> None:
    """Hands a prompt over from a worker at `prefill_host` to one that listens on all addresses and advertises
    `decode_host`. Checks that the tokens are those of one engine, and that a prompt that is too long is refused."""
    common = SETTINGS | {"model": model, "handoff_secret": SECRET, "prefix_cache": False}
    common["transfer_interface"] = interface
    configs = [
        EngineConfig(role="prefill", control=f"{prefill_host}:0", max_model_len=64, **common),
        EngineConfig(role="decode", control="0.0.0.0:0", advertise=f"{decode_host}:0", **common),
    ]
    processes = [EngineProcess(config) for config in configs]
    prefill, decode = (EngineClient.start(*started) for started in zip(configs, processes, strict=True))
    try:
        async with asyncio.timeout(SCENARIO_S):
            assert prefill.control is not None and prefill.control.startswith(f"{prefill_host}:")
            prompt = list(range(3, 40))
            local, handed_off = [
                [
                    token
                    async for delta in decode.generate(name, prompt, FOUR_TOKENS, RequestOptions(prefill_at=prefill_at))
                    for token in delta.token_ids
                ]
                for name, prefill_at in (("local", None), ("handed off", prefill.control))
            ]
            assert local == handed_off
            with pytest.raises(HandoffLost, match="the prompt has 80 tokens, but this worker computes 1 to 63"):
                await anext(decode.generate("long", [5] * 80, FOUR_TOKENS, RequestOptions(prefill_at=prefill.control)))
            assert (await decode.stats()).landed == 1
    finally:
        await asyncio.gather(prefill.close(0.0), decode.close(0.0))


def test_workers_hand_over_through_other_addresses_and_report_why_a_prompt_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    asyncio.run(hand_over(tiny_directory(tmp_path), "127.0.0.2", "127.0.0.3", "lo"))
