"""Control addresses, at which workers receive messages from peers: `host:port`, with IPv6 addresses in brackets."""

import ipaddress
import re
from dataclasses import dataclass

from hotset.base.errors import ConfigError

# Addresses come from the network and are passed to logs and to ZeroMQ, so the pattern accepts only the characters of a
# host name or of an IP address (IPv6 in brackets), or `*`, and a port.
ADDRESS_FORM = re.compile(r"([A-Za-z0-9._-]{1,250}|\*|\[[0-9A-Fa-f:.%a-z]{2,60}\]):([0-9]{1,5})")
WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")
MIN_SECRET_CHARACTERS = 16


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


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the host. Returns False for host names other than localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def normalized_host(host: str) -> str:
    """Returns the one spelling of a host: IPv6 addresses in brackets, IPv4-mapped ones as IPv4, `localhost` as
    127.0.0.1, names in lower case."""
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
