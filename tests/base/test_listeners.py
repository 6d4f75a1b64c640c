"""Which listening sockets a process may have, and which interfaces a transfer engine may use."""

import os
import socket
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from hotset.base import listeners as module
from hotset.base.address import Address, control_port
from hotset.base.errors import ConfigError, StartupError
from hotset.base.listeners import (
    Listener,
    check_listeners,
    confined_to,
    interface_addresses,
    listeners,
    transfer_interface,
)

SECRET = "at least sixteen characters"
INTERFACES = {"lo": ("127.0.0.1", "[::1]"), "eth0": ("10.0.0.1", "[fd00::1]"), "down0": ()}


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Sockets that a test opens. They are closed at its end."""
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def listen(host: str, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen()
    return listener


def test_only_listening_tcp_sockets_are_found_and_they_stay_open(opened: list[socket.socket]) -> None:
    before = set(listeners())
    ipv4, ipv6 = listen("127.0.0.2"), listen("::1", socket.AF_INET6)
    bound, datagrams = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    datagrams.bind(("127.0.0.1", 0))
    opened += [ipv4, ipv6, bound, datagrams, *socket.socketpair()]
    expected = {
        Listener(Address("127.0.0.2", ipv4.getsockname()[1]), ""),
        Listener(Address("[::1]", ipv6.getsockname()[1]), ""),
    }
    assert set(listeners()) - before == expected
    socket.create_connection(ipv4.getsockname()).close()


def test_only_sockets_opened_in_a_confined_block_are_bound_to_the_interface(opened: list[socket.socket]) -> None:
    opened.append(listen("0.0.0.0"))
    with confined_to("lo"):
        opened.append(listen("0.0.0.0"))
    ports = [each.getsockname()[1] for each in opened]
    found = {listener.address.port: listener.interface for listener in listeners() if listener.address.port in ports}
    assert found == dict(zip(ports, ["", "lo"], strict=True))
    socket.create_connection(("127.0.0.1", ports[1])).close()


def test_connections_that_were_accepted_before_a_socket_was_confined_are_ended(opened: list[socket.socket]) -> None:
    with confined_to("lo"):
        listener, other = listen("0.0.0.0"), listen("127.0.0.1")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")  # by another thread, for example
        early, kept = (socket.create_connection(("127.0.0.1", each.getsockname()[1]), 10) for each in (listener, other))
        opened += [listener, other, early, kept, listener.accept()[0], other.accept()[0]]
    assert early.recv(1) == b""
    opened[-1].send(b"x")
    assert kept.recv(1) == b"x", "connections to other sockets stay open"


def test_sockets_that_cannot_be_confined_are_an_error_with_their_address(opened: list[socket.socket]) -> None:
    message = r"0\.0\.0\.0:\d+ cannot be confined to interface missing0: No such device"
    with pytest.raises(StartupError, match=message), confined_to("missing0"):
        opened.append(listen("0.0.0.0"))


CONTROL = Address("127.0.0.1", 7000)
ANYWHERE = Address("0.0.0.0", 7000)


@pytest.mark.parametrize(
    ("listener", "addresses", "interfaces"),
    [
        (Listener(CONTROL, ""), [CONTROL], []),
        (Listener(ANYWHERE, ""), [ANYWHERE], []),
        (Listener(Address("127.0.0.1", 40000), ""), [ANYWHERE], ["lo"]),
        (Listener(Address("[fd00::1]", 40000), ""), [CONTROL], ["lo", "eth0"]),
        (Listener(Address("0.0.0.0", 40000), "eth0"), [CONTROL], ["eth0"]),
    ],
)
def test_listeners_that_were_asked_for_are_allowed(
    monkeypatch: pytest.MonkeyPatch, listener: Listener, addresses: Collection[Address], interfaces: Collection[str]
) -> None:
    monkeypatch.setattr(module, "interface_addresses", lambda: INTERFACES)
    monkeypatch.setattr(module, "listeners", lambda: [listener])
    check_listeners("the engine", addresses=addresses, interfaces=interfaces)


@pytest.mark.parametrize(
    ("listener", "addresses", "interfaces", "asked"),
    [
        (Listener(CONTROL, ""), [], [], "no port"),
        (Listener(Address("127.0.0.1", 7001), ""), [CONTROL], [], "127.0.0.1:7000"),
        (Listener(Address("0.0.0.0", 40000), ""), [ANYWHERE], ["lo"], "0.0.0.0:7000 and interface lo"),
        (Listener(Address("10.0.0.1", 40000), ""), [CONTROL], ["lo"], "127.0.0.1:7000 and interface lo"),
        (Listener(Address("0.0.0.0", 40000), "eth0"), [CONTROL], ["lo"], "127.0.0.1:7000 and interface lo"),
        (Listener(Address("127.0.0.2", 40000), ""), [CONTROL], ["lo"], "127.0.0.1:7000 and interface lo"),
    ],
)
def test_defect_21_a_listener_elsewhere_is_refused_with_its_address_and_process(
    monkeypatch: pytest.MonkeyPatch,
    listener: Listener,
    addresses: Collection[Address],
    interfaces: Collection[str],
    asked: str,
) -> None:
    monkeypatch.setattr(module, "interface_addresses", lambda: INTERFACES)
    monkeypatch.setattr(module, "listeners", lambda: [listener])
    with pytest.raises(StartupError) as refused:
        check_listeners("the engine", addresses=addresses, interfaces=interfaces)
    expected = f"the engine (process {os.getpid()}) listens on {listener}, but was asked to listen on {asked} only;"
    assert str(refused.value).startswith(expected)


def test_the_addresses_of_the_loopback_interface_are_found() -> None:
    found = interface_addresses()
    assert "127.0.0.1" in found["lo"]
    assert set(found) == {name for _, name in socket.if_nameindex()}


REACHABLE = {"control": "10.0.0.1:0", "secret": SECRET}


@pytest.mark.parametrize(
    ("settings", "interface", "expected"),
    [
        ({}, None, "lo"),
        ({"control": "127.0.0.2:0"}, None, "lo"),
        ({}, "lo", "lo"),
        ({"secret": SECRET}, "eth0", "eth0"),
        (REACHABLE, "eth0", "eth0"),
        (REACHABLE, "mlx5_0:1,eth0", "mlx5_0:1,eth0"),
        ({"control": "0.0.0.0:0", "advertise": "10.0.0.1:0", "secret": SECRET}, "lo", "lo"),
    ],
)
def test_the_interface_of_a_transfer_engine_is_loopback_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], interface: str | None, expected: str
) -> None:
    assert interface_chosen(monkeypatch, settings, interface) == expected


@pytest.mark.parametrize(
    ("settings", "interface", "message"),
    [
        (
            REACHABLE,
            None,
            r"must name the interface .*: lo \(127.0.0.1, \[::1\]\), eth0 \(10.*\), down0 \(no address\)",
        ),
        ({"control": "*:0", "advertise": "10.0.0.1:0", "secret": SECRET}, None, "must name the interface"),
        (REACHABLE, "eth1", r"no interface 'eth1'; it has lo \(127"),
        (REACHABLE, "eth0,", "no interface ''"),
        (REACHABLE, "mlx5_1:1", "no interface 'mlx5_1:1'"),
        ({}, "eth0", "--transfer-interface eth0 can be reached from other machines and needs a shared secret"),
        ({}, "lo,eth0", "needs a shared secret"),
        ({}, "mlx5_0:1", "needs a shared secret"),
        ({}, "down0", "needs a shared secret"),
    ],
)
def test_defect_21_a_worker_beyond_loopback_needs_an_interface_of_this_machine_and_a_secret(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], interface: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        interface_chosen(monkeypatch, settings, interface)


def interface_chosen(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], interface: str | None) -> str:
    """Returns what `transfer_interface` chooses on a machine with the interfaces INTERFACES and RDMA device mlx5_0."""
    monkeypatch.setattr(module, "interface_addresses", lambda: INTERFACES)
    monkeypatch.setattr(module, "rdma_devices", lambda: ["mlx5_0"])
    values = {"control": "127.0.0.1:0", "advertise": None, "secret": None} | settings
    return transfer_interface(control_port(**values), interface, values["secret"])
