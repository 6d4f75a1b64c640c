"""Lists the listening sockets of other processes, as the kernel reports them (sock_diag(7)).

Run as a program, it prints those of all processes of this pid and network namespace, one in a line of JSON.
"""

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
# States of sockets that receive from anyone. A UDP socket without a peer has the state of a closed TCP socket.
RECEIVES = {socket.IPPROTO_TCP: 1 << 10, socket.IPPROTO_UDP: 1 << 7}
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, set of states, an empty socket id
# Family, local port, local address, interface, inode.
ANSWER = struct.Struct("=B3x2s2x16s16xI8x16xI")


@dataclass(frozen=True, order=True)
class Listening:
    """A listening socket of process `pid`. `interface` is empty if the socket is not bound to an interface."""

    pid: int
    host: str
    port: int
    interface: str


def listening(pids: Iterable[int], protocol: int = socket.IPPROTO_TCP) -> list[Listening]:
    """Returns the listening sockets of these processes, which must be in the network namespace of the caller."""
    by_inode = {inode: (host, port, interface) for inode, host, port, interface in _listening_sockets(protocol)}
    return sorted(Listening(pid, *by_inode[inode]) for pid in pids for inode in _inodes(pid) & by_inode.keys())


def _inodes(pid: int) -> set[int]:
    """Returns the inodes of the sockets that a process holds. Returns none if the process has ended."""
    links = []
    with suppress(OSError):  # ended in the meantime
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed in the meantime
                links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {int(link[len("socket:[") : -1]) for link in links if link.startswith("socket:[")}


def _listening_sockets(protocol: int) -> Iterator[tuple[int, str, int, str]]:
    """Yields inode, host, port and interface of every listening socket in this network namespace."""
    for family in (socket.AF_INET, socket.AF_INET6):
        request = REQUEST.pack(family, protocol, 0, RECEIVES[protocol])
        for message in _dump(request):
            _, port, address, interface, inode = ANSWER.unpack_from(message)
            # ZeroMQ uses IPv4-mapped IPv6 addresses, like ::ffff:127.0.0.1.
            host = socket.inet_ntop(family, address[: 4 if family == socket.AF_INET else 16]).removeprefix("::ffff:")
            yield inode, host, int.from_bytes(port), socket.if_indextoname(interface) if interface else ""


def _dump(request: bytes) -> Iterator[bytes]:
    """Sends a request to the kernel and yields the messages of its answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # 4: NETLINK_SOCK_DIAG
        netlink.send(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            received = netlink.recv(1 << 20)
            while received:
                length, kind, *_ = HEADER.unpack_from(received)
                assert kind != NLMSG_ERROR, "the kernel refused to list its sockets"
                if kind == NLMSG_DONE:
                    return
                yield received[HEADER.size : length]
                received = received[(length + 3) & ~3 :]


def main() -> None:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for protocol in RECEIVES:
        for found in listening(pids, protocol):
            with suppress(OSError):  # ended in the meantime
                command = Path(f"/proc/{found.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                print(json.dumps({**asdict(found), "protocol": protocol, "command": command}))


if __name__ == "__main__":
    main()
