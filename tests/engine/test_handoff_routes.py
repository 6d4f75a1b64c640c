"""Where contexts land depends on the measured routes. The GPU is simulated: its memory is that of the CPU, and the
loopback transfer engine gives each pair of memories a speed."""

from typing import Any

import pytest
import torch
from engine.handoff_pair import SAMPLED, Prompts, answers_alone, decoder_of, pair, simulated_routes
from loopback import Hub

from hotset.base.config import EngineConfig
from hotset.engine.build import unmeasured_landing_policy
from hotset.engine.ports import Route
from hotset.fleet.handoff import delivery_choice
from hotset.fleet.handoff.routes import EXPENSIVE_WRITE_SECONDS
from hotset.fleet.handoff.stores import landing_policy
from hotset.fleet.transfer.api import MemoryKind
from hotset.tiers.ledger import LAND_ANYWHERE, LandingPolicy

HOST, DEVICE = MemoryKind.HOST, MemoryKind.DEVICE
SIZES: dict[str, Any] = {"max_model_len": 144, "max_num_batched_tokens": 96, "device_kv_tokens": 800}
SIZES |= {"host_kv_tokens": 4096, "prefix_cache": False}
PROMPTS = Prompts((17, 64, 97))
UNMEASURED_GPU = unmeasured_landing_policy(EngineConfig(role="decode"), torch.device("cuda"))
ON_HOST, ON_DEVICE = LandingPolicy(keys_on_host=True, prefer_host=True), LandingPolicy()


def routes(
    host: float, device: float | None, per_write: float = 0.0, device_to_device: float | None = None
) -> tuple[Route, ...]:
    speeds = {("host", "host"): host, ("host", "device"): device, ("device", "device"): device_to_device}
    return tuple(Route(*ends, speed, per_write) for ends, speed in speeds.items() if speed is not None)


@pytest.mark.parametrize(
    ("measured", "default", "expected"),
    [
        (routes(4.4, 0.4), UNMEASURED_GPU, ON_HOST),
        (routes(4.4, None), UNMEASURED_GPU, ON_HOST),
        (routes(4.4, 0.4, device_to_device=815.0), UNMEASURED_GPU, LandingPolicy(keys_on_host=True)),  # of one GPU
        (routes(4.4, 0.4, device_to_device=3.0), UNMEASURED_GPU, ON_HOST),
        (routes(20.0, 19.0), UNMEASURED_GPU, ON_DEVICE),
        (routes(20.0, 19.0, 2 * EXPENSIVE_WRITE_SECONDS), UNMEASURED_GPU, LandingPolicy(keys_on_host=True)),
        ((), UNMEASURED_GPU, UNMEASURED_GPU),
        # Several workers never let contexts land on the device, and a CPU has no other memory.
        (routes(20.0, 19.0), LandingPolicy(False, keys_on_host=True), LandingPolicy(False, keys_on_host=True)),
        (routes(2.0, None), LAND_ANYWHERE, LAND_ANYWHERE),
        (routes(2.0, None, 2 * EXPENSIVE_WRITE_SECONDS), LAND_ANYWHERE, LandingPolicy(keys_on_host=True)),
    ],
)
def test_contexts_land_on_the_device_only_if_its_route_is_as_fast_as_that_to_the_host(
    measured: tuple[Route, ...], default: LandingPolicy, expected: LandingPolicy
) -> None:
    assert landing_policy(measured, default) == expected


@pytest.mark.parametrize(
    ("into_device", "between_devices", "landings", "routes_used", "staging_mib"),
    [
        (0.05e9, 0.05e9, {"host"}, {(HOST, HOST)}, 0),
        (2e9, 0.05e9, {"device", "host, keys on device"}, {(HOST, DEVICE), (HOST, HOST)}, 0),
        (0.05e9, 4e9, {"device", "host"}, {(DEVICE, DEVICE), (HOST, HOST)}, 0),
        (0.05e9, 4e9, {"device", "host"}, {(DEVICE, DEVICE), (HOST, HOST)}, 1),
    ],
    ids=["host", "host to device", "device to device", "device to device, staged"],
)
def test_index_keys_and_rows_follow_the_faster_route_and_the_tokens_are_those_of_one_engine(
    simulated_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    into_device: float,
    between_devices: float,
    landings: set[str],
    routes_used: set[tuple[MemoryKind, MemoryKind]],
    staging_mib: int,
) -> None:
    """The first contexts land on the host, because nothing is measured yet. `landing="host"` applies to the rows of a
    request only: its index keys follow the faster route. Over a fast route between devices, contexts are read from the
    device."""
    monkeypatch.setattr(delivery_choice, "should_stage", lambda *_, **__: True)  # if there is staging memory
    speeds = {(HOST, HOST): 1e9, (HOST, DEVICE): into_device, (DEVICE, HOST): 0.05e9}
    speeds[DEVICE, DEVICE] = between_devices
    hub = simulated_routes(monkeypatch, speeds)
    token_ids, expected = PROMPTS.token_ids(decoder_of("dsa")), answers_alone("dsa", PROMPTS, SAMPLED, **SIZES)
    with pair("dsa", hub=hub, staging_mib=staging_mib, **SIZES) as workers:
        assert workers.answers(token_ids, SAMPLED, "auto") == expected
        assert {request.landing for request in workers.comparer.requests.values()} == {"host"}
        workers.comparer.requests.clear()
        hub.route_bytes.clear()
        assert workers.answers(token_ids, SAMPLED, "auto") == expected
        assert workers.answers(token_ids, SAMPLED, "host") == expected
        assert {request.landing for request in workers.comparer.requests.values()} == landings
        assert {*hub.route_bytes} == routes_used
        assert workers.comparer.num_compared == 3 * len(token_ids), "landed bytes were not compared"
        for engine, peer in ((workers.prefill, workers.decode), (workers.decode, workers.prefill)):
            handoff = engine.stats().handoff
            assert handoff is not None and peer.card.control is not None
            ends = {(route.source, route.target) for route in handoff.routes[peer.card.control]}
            assert ends == {(source.value, target.value) for source, target in speeds}
            assert (handoff.num_pieces > 0) == bool(staging_mib)


def test_a_peer_without_any_route_is_refused_with_what_to_check(simulated_gpu: None, caplog: Any) -> None:
    hub = Hub(threaded=True)
    hub.speeds = {(DEVICE, DEVICE): 0.0001}  # so slow that no probe ends in time
    with pair("dsa", hub=hub, **SIZES) as workers:
        assert workers.answers(PROMPTS.token_ids(decoder_of("dsa"))[:1], SAMPLED, "auto") == [[]]
        assert "can be written from here over loopback" in caplog.text and "--transfer-interface" in caplog.text
