"""Routes: measured between kinds of memory, within a time limit, and refused if there is none."""

import itertools
import logging
import time
from pathlib import Path

import numpy as np
import pytest
from fake_sysfs import fake_sysfs
from loopback import Hub, Loopback

from hotset.base.errors import TransferError
from hotset.engine.ports import Route
from hotset.fleet.handoff.messages import MemoryRange
from hotset.fleet.handoff.routes import PROBE_BYTES, ROUTE_SECONDS, Probes, find_route, measure_routes
from hotset.fleet.transfer.api import MemoryKind, Region

HOST, DEVICE = MemoryKind.HOST, MemoryKind.DEVICE
SPEEDS = {(HOST, HOST): 4e9, (HOST, DEVICE): 0.4e9, (DEVICE, HOST): 0.3e9, (DEVICE, DEVICE): 40e9}


class Side:
    """An endpoint with probe memory of both kinds, all of which is memory of the CPU."""

    def __init__(self, hub: Hub) -> None:
        self.memory = {kind: np.full(PROBE_BYTES, number, np.uint8) for number, kind in enumerate(MemoryKind)}
        self.transfer = Loopback(hub)
        for kind, memory in self.memory.items():
            self.transfer.register(Region(memory.ctypes.data, memory.nbytes, kind))

    @property
    def probes(self) -> Probes:
        return {kind.value: MemoryRange(memory.ctypes.data, memory.nbytes) for kind, memory in self.memory.items()}


def sides(speeds: dict[tuple[MemoryKind, MemoryKind], float], *, threaded: bool = True) -> tuple[Hub, Side, Side]:
    hub = Hub(threaded=threaded)
    hub.speeds = speeds
    near, far = Side(hub), Side(hub)
    near.transfer.connect("far", far.transfer.describe())
    return hub, near, far


def measured(routes: tuple[Route, ...], source: MemoryKind, target: MemoryKind) -> float:
    route = find_route(routes, source.value, target.value)
    assert route is not None
    return route.gb_per_s


def test_every_pair_of_memories_is_measured_and_the_slow_ones_are_found() -> None:
    hub, near, far = sides(SPEEDS)
    routes = measure_routes(near.transfer, "far", near.probes, far.probes)
    hub.close()
    assert {(route.source, route.target) for route in routes} == set(itertools.product(("host", "device"), repeat=2))
    speeds = {ends: measured(routes, *ends) * 1e9 for ends in SPEEDS}
    assert all(speed <= SPEEDS[ends] * 1.01 for ends, speed in speeds.items()), "faster than the bytes can travel"
    assert speeds[HOST, HOST] > 2 * speeds[HOST, DEVICE] and speeds[DEVICE, DEVICE] > 2 * speeds[DEVICE, HOST]


def test_a_pair_that_cannot_write_has_no_route_and_the_others_are_measured() -> None:
    hub, near, far = sides({(HOST, HOST): 4e9})
    routes = measure_routes(near.transfer, "far", near.probes, far.probes)
    hub.close()
    assert [(route.source, route.target) for route in routes] == [("host", "host")]


def test_a_peer_without_any_route_is_an_error_that_says_what_to_check() -> None:
    hub, near, far = sides({(HOST, HOST): 4e9})
    remote = {"device": far.probes["device"]}
    with pytest.raises(TransferError, match=r"none of its memory \(device\) can be written.*--transfer-interface"):
        measure_routes(near.transfer, "far", near.probes, remote)
    assert measure_routes(near.transfer, "far", {}, remote) == (), "without probes nothing is measured"
    hub.close()


def test_a_transfer_engine_that_hangs_does_not_hang_the_measurement() -> None:
    hub, near, far = sides(SPEEDS, threaded=False)  # nobody moves the clock of the hub: no write ever ends
    ticks = itertools.count()
    began = time.monotonic()
    with pytest.raises(TransferError, match="none of its memory"):
        measure_routes(near.transfer, "far", near.probes, far.probes, clock=lambda: next(ticks) * ROUTE_SECONDS / 10)
    assert time.monotonic() - began < 5.0
    hub.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("UCX (tcp/eth0)", True),
        ("UCX (inter-node rc_mlx5/mlx5_0:1, tcp/eth0; inter-node tcp/eth0)", True),
        ("UCX (inter-node rc_mlx5/mlx5_0:1, tcp/eth0)", False),
        ("UCX (intra-node cma/memory, tcp/eth0)", False),
        ("UCX (tcp/lo)", False),
        ("UCX (transports not known yet)", False),
        ("Mooncake (tcp/eth0)", True),
        ("Mooncake (rdma/eth0)", False),
    ],
)
def test_routes_over_tcp_are_a_warning_if_the_machine_has_active_rdma_ports(
    transport: str, expected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, near, far = sides(SPEEDS)
    monkeypatch.setattr(near.transfer, "transport", lambda: transport)
    measure_routes(near.transfer, "far", near.probes, far.probes, sysfs=tmp_path)
    assert not warnings_of(caplog), "a machine without RDMA"
    fake_sysfs(tmp_path, {"mlx5_0": "4: ACTIVE"}, {"mlx5_0": "pci0000:15/0000:15:01.0"})
    measure_routes(near.transfer, "far", near.probes, far.probes, sysfs=tmp_path)
    hub.close()
    assert bool(warnings_of(caplog)) == expected
    if expected:
        assert "over TCP" in caplog.text and "give --transfer-interface mlx5_0:1, on both sides" in caplog.text


def test_a_slow_link_has_a_route() -> None:
    """The large probe would take 13 s."""
    hub, near, far = sides({(HOST, HOST): 1.25e6})
    routes = measure_routes(near.transfer, "far", {"host": near.probes["host"]}, {"host": far.probes["host"]})
    hub.close()
    assert measured(routes, HOST, HOST) * 1e9 == pytest.approx(1.25e6, rel=0.2)
