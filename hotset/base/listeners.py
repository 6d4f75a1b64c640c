"""Network interfaces of this machine, and the sockets on which this process listens.

Libraries open ports of their own. Some of these ports, like those of UCX over TCP, let anyone who can reach them write
to the memory of the process without a secret. Every process therefore checks its listening sockets before it serves.
"""

import ctypes
import errno
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from hotset.base.address import Address, ControlPort, is_loopback, normalized_host
from hotset.base.errors import ConfigError, StartupError
from hotset.base.rdma import rdma_devices

LOOPBACK_INTERFACE = "lo"
MAX_INTERFACE_NAME = 16  # IFNAMSIZ of Linux


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket of this process."""

    address: Address
    interface: str  # the interface to which the socket is bound; empty if it accepts connections from all

    def __str__(self) -> str:
        return f"{self.address}%{self.interface}" if self.interface else str(self.address)


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen: clients cannot connect before the server is ready.

    Raises ConfigError if another socket listens on the port or the host is not an address of this machine. Other
    sockets with SO_REUSEADDR may still bind the port, as the router of `--disaggregate` does.
    """
    try:
        return _bound(host, port)
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        raise ConfigError(message) from error


def check_free(address: Address, flag: str) -> None:
    """Raises ConfigError, which names `flag`, if this process cannot listen at an address at present."""
    try:
        reserve_port(address).close()
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror}; choose another {flag}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening_address(bound: socket.socket) -> Address:
    """Returns the address to which a TCP socket is bound."""
    host, port = bound.getsockname()[:2]
    return Address(normalized_host(host), port)


def reserve_port(address: Address) -> socket.socket:
    """Reserves the port of an address, or a free port for port 0, until the returned socket is closed.

    The socket does not listen. A library that sets SO_REUSEADDR can listen on the port, stop, and listen again. Other
    programs do not get the port meanwhile, unless they ask for exactly this port with SO_REUSEADDR. Raises OSError.
    """
    return _bound("0.0.0.0" if address.host == "*" else address.host.strip("[]"), address.port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # the text cannot be a host name
        raise OSError(errno.EINVAL, str(error)) from error
    with ExitStack() as undo:
        bound = undo.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        undo.pop_all()
    return bound


def check_listeners(process: str, *, addresses: Collection[Address] = (), interfaces: Collection[str] = ()) -> None:
    """Raises StartupError if this process listens on anything else than `addresses` and the addresses of `interfaces`.

    `process` names the process in the error.
    """
    hosts = {host for name in interfaces for host in interface_addresses().get(name, ())}
    for listener in listeners():
        allowed = listener.address in addresses or listener.address.host in hosts or listener.interface in interfaces
        if not allowed:
            asked = [*map(str, addresses), *(f"interface {name}" for name in interfaces)]
            raise StartupError(
                f"{process} (process {os.getpid()}) listens on {listener}, but was asked to listen on "
                f"{' and '.join(asked) or 'no port'} only; it does not serve, because others could use that port. Find "
                "what opened it (an environment variable of UCX, Mooncake, gloo or NCCL, or a plugin) and remove that"
            )


def listeners() -> list[Listener]:
    """Returns the listening TCP sockets of this process."""
    return [Listener(listening_address(opened), _interface(opened)) for opened in _tcp_sockets() if _listens(opened)]


@contextmanager
def confined_to(interface: str) -> Iterator[None]:
    """At the end of the block, confines all sockets on which this process began to listen in the block to `interface`.

    They then accept only connections that arrive through this interface. Earlier connections to them are closed: they
    cannot come from peers, which do not know the ports yet. This is for libraries that listen on all addresses and
    cannot be configured. Raises StartupError if the system does not allow it.
    """
    known = {_inode(opened) for opened in _tcp_sockets()}
    yield
    ports = set()
    for opened in _tcp_sockets():
        if _inode(opened) in known or not _listens(opened) or _interface(opened):
            continue
        address = listening_address(opened)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        except OSError as error:
            raise StartupError(f"{address} cannot be confined to interface {interface}: {error.strerror}") from error
        ports.add(address.port)
    for opened in _tcp_sockets():
        if not _listens(opened) and opened.getsockname()[1] in ports:
            with suppress(OSError):  # the connection has ended meanwhile
                opened.shutdown(socket.SHUT_RDWR)


def transfer_interface(control: ControlPort, interface: str | None, secret: str | None) -> str:
    """Returns the interface on which a transfer engine listens: `interface`, or the loopback interface by default.

    `interface` names network interfaces or RDMA devices, separated by commas. Raises ConfigError if this machine lacks
    one of them, if other machines can reach one of them and no secret is given, or if other machines can reach the
    control port and no interface is given.
    """
    found = interface_addresses()
    listed = ", ".join(f"{name} ({', '.join(hosts) or 'no address'})" for name, hosts in found.items())
    if interface is None:
        if is_loopback(control.listen.host):
            return LOOPBACK_INTERFACE
        raise ConfigError(
            f"a control port at {control.listen.host} can be reached from other machines, so --transfer-interface must "
            "name the interface on which the transfer engine listens; choose one of a network in which you trust every "
            f"machine: {listed}"
        )
    names, devices = interface.split(","), rdma_devices()
    for name in names:
        if name not in found and name.partition(":")[0] not in devices:
            raise ConfigError(f"--transfer-interface: this machine has no interface {name!r}; it has {listed}")
    on_loopback = all(found.get(name) and all(map(is_loopback, found[name])) for name in names)
    if secret is None and not on_loopback:
        raise ConfigError(
            f"--transfer-interface {interface} can be reached from other machines and needs a shared secret; give "
            "every worker the same handoff secret, or leave the interface out"
        )
    return interface


class _InterfaceAddress(ctypes.Structure):
    """The C library's `struct ifaddrs`."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]
# Where the IP address lies in the C library's `struct sockaddr` of each family: offset and length.
_IP_BYTES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Returns the IP addresses of every network interface of this machine, IPv6 addresses in brackets."""
    found: dict[str, tuple[str, ...]] = {name: () for _, name in socket.if_nameindex()}
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "the network interfaces of this machine cannot be listed")
    try:
        entry = first
        while bool(entry):  # False for NULL
            name, address = entry.contents.name.decode(), entry.contents.address
            family = ctypes.c_ushort.from_address(address).value if address else socket.AF_UNSPEC
            if family in _IP_BYTES:
                offset, length = _IP_BYTES[socket.AddressFamily(family)]
                host = socket.inet_ntop(family, ctypes.string_at(address + offset, length))
                found[name] = (*found.get(name, ()), normalized_host(host))
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return found


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of every TCP socket of this process, which stays valid until the next one is requested."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            opened = socket.socket(fileno=duplicate)
        except OSError:  # not a socket
            os.close(duplicate)
            continue
        with opened:
            if opened.family in _IP_BYTES and opened.type == socket.SOCK_STREAM:
                yield opened


def _inode(opened: socket.socket) -> int:
    return os.fstat(opened.fileno()).st_ino


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _interface(opened: socket.socket) -> str:
    """Returns the interface to which a socket is bound, or an empty string."""
    name = opened.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, MAX_INTERFACE_NAME)
    return name.partition(b"\0")[0].decode()
