"""Addresses on which an engine listens, for control messages of its peers and for subscribers of its KV events.

They have the form `host:port`, with IPv6 addresses in brackets.
"""

import ipaddress
import re
from dataclasses import dataclass

from hotset.base.errors import ConfigError

# Addresses come from the network and are passed to logs and to ZeroMQ, so the pattern accepts only the characters of a
# host name or of an IP address (IPv6 in brackets), or `*`, and a port.
ADDRESS_FORM = re.compile(r"([A-Za-z0-9._-]{1,250}|\*|\[[0-9A-Fa-f:.%a-z]{2,60}\]):([0-9]{1,5})")
WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")
MIN_SECRET_CHARACTERS = 16
EVENTS_SCHEME = "tcp://"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `parse` normalizes the host, because peers are identified by their addresses."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address | None":
        """Returns None if `text` is not an address. Port 0 and wildcard hosts are accepted."""
        match = ADDRESS_FORM.fullmatch(text)
        if match is None or int(match[2]) >= 1 << 16:
            return None
        return cls(normalized_host(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def overlaps(self, other: "Address") -> bool:
        """Returns True if only one of the two addresses can be listened on at a time. Port 0 never overlaps."""
        same_host = self.host == other.host or self.host in WILDCARD_HOSTS or other.host in WILDCARD_HOSTS
        return 0 < self.port == other.port and same_host

    @property
    def reachable(self) -> bool:
        """False if no peer can connect to this address, because its host is a wildcard or its port is 0."""
        return self.port > 0 and self.host not in WILDCARD_HOSTS


@dataclass(frozen=True, slots=True)
class ControlPort:
    """The address on which a worker listens, and the address at which its peers reach it.

    Port 0 in `listen` means any free port. Port 0 in `peers` means the port on which the worker listens.
    """

    listen: Address
    peers: Address


def control_port(control: str, advertise: str | None, secret: str | None) -> ControlPort:
    """Reads the settings of a control port: the addresses `control` and `advertise`, and the shared secret.

    Raises ConfigError if an address is malformed, if peers would get a wildcard host, if the secret is too short, or if
    other machines could connect without a secret.
    """
    listen = _parsed(control)
    peers = Address(listen.host, 0) if advertise is None else _parsed(advertise)
    if peers.host in WILDCARD_HOSTS:
        raise ConfigError(
            f"peers cannot connect to {peers.host}; give the address at which they reach this machine, as in "
            "--advertise 10.0.0.1:0"
        )
    if secret is not None and len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(f"the handoff secret must have at least {MIN_SECRET_CHARACTERS} characters")
    if secret is None and not is_loopback(listen.host):
        raise ConfigError(
            f"a control port at {listen.host} can be reached from other machines and needs a shared secret; give every "
            "worker the same handoff secret, or listen on 127.0.0.1"
        )
    return ControlPort(listen, peers)


@dataclass(frozen=True, slots=True)
class EventsEndpoint:
    """The addresses of one publisher of KV events. Port 0 means any free port."""

    live: Address
    replay: Address | None  # where subscribers request batches that they have missed

    @property
    def addresses(self) -> list[Address]:
        return [self.live] if self.replay is None else [self.live, self.replay]

    def __str__(self) -> str:
        return " and ".join(f"{EVENTS_SCHEME}{address}" for address in self.addresses)

    def check_other(self, other: Address, flag: str) -> None:
        """Raises ConfigError if an address overlaps `other`, the address of another server, which `flag` sets."""
        for address, own_flag in zip(self.addresses, ("--kv-events", "--kv-events-replay"), strict=False):
            if address.overlaps(other):
                raise ConfigError(
                    f"{own_flag} {EVENTS_SCHEME}{address} uses the port of {flag} {other}; choose another port for one "
                    "of the two"
                )


def events_endpoints(events: str | None, replay: str | None, *, public: bool, ranks: int) -> list[EventsEndpoint]:
    """Returns the addresses of each data parallel rank, read from --kv-events and --kv-events-replay.

    Rank n listens on the given ports plus n. The list is empty if `events` is None.

    Raises ConfigError if an address is malformed, if the ports of the two addresses overlap, or if other machines
    could connect and `public` is not set.
    """
    if events is None:
        return []
    live = _events_address("--kv-events", events, public, ranks)
    replay_address = None if replay is None else _events_address("--kv-events-replay", replay, public, ranks)
    ports = [address.port for address in (live, replay_address) if address is not None and address.port]
    if len(ports) == 2 and abs(ports[0] - ports[1]) < ranks:
        each = "" if ranks == 1 else f" (there are {ranks} data parallel ranks, with one port each)"
        raise ConfigError(
            f"--kv-events {events} and --kv-events-replay {replay} use the same port{each}; choose ports that are at "
            f"least {ranks} apart"
        )
    return [
        EventsEndpoint(_of_rank(live, rank), None if replay_address is None else _of_rank(replay_address, rank))
        for rank in range(ranks)
    ]


def _events_address(flag: str, text: str, public: bool, ranks: int) -> Address:
    address = Address.parse(text.removeprefix(EVENTS_SCHEME)) if text.startswith(EVENTS_SCHEME) else None
    if address is None or not (address.host in WILDCARD_HOSTS or _is_ip_address(address.host)):
        raise ConfigError(
            f"{flag} must be tcp://, an IP address of this machine and a port, like tcp://127.0.0.1:5557, got {text!r}"
        )
    if address.port + ranks > 1 << 16:
        raise ConfigError(f"{flag} {text} needs {ranks} ports, one for each data parallel rank; choose a lower port")
    if not public and not is_loopback(address.host):
        raise ConfigError(
            f"{flag} {text} can be reached from other machines, and KV events contain the tokens of all prompts; use "
            "127.0.0.1, or add --kv-events-public if you trust every machine that can connect"
        )
    return address


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _of_rank(address: Address, rank: int) -> Address:
    return Address(address.host, address.port and address.port + rank)


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the host. Returns False for host names other than localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def normalized_host(host: str) -> str:
    """Returns the canonical spelling of a host: IPv6 addresses in brackets, IPv4-mapped ones as IPv4, `localhost`
    as 127.0.0.1, names in lower case."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower()
    if isinstance(address, ipaddress.IPv6Address):
        return f"[{address}]" if address.ipv4_mapped is None else str(address.ipv4_mapped)
    return str(address)


def _parsed(text: str) -> Address:
    address = Address.parse(text)
    if address is None:
        raise ConfigError(f"{text!r} is not a control address, which takes the form host:port, like 127.0.0.1:9000")
    return address
