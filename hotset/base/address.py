"""Control addresses, at which workers talk to each other: `host:port`, with IPv6 addresses in brackets."""

import ipaddress
import re
from dataclasses import dataclass

from hotset.base.errors import ConfigError

# An address may come from strangers, and goes to logs and to ZeroMQ: one host or bracketed IPv6 address, and a port.
FORM = re.compile(r"([A-Za-z0-9._-]{1,250}|\*|\[[0-9A-Fa-f:.%a-z]{2,60}\]):([0-9]{1,5})")
EVERYWHERE = ("*", "0.0.0.0", "[::]")
SECRET_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Address:
    """One host has one spelling here, since peers are known by their addresses."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address | None":
        """None where it is no address. Port 0 and hosts that stand for every address are understood."""
        found = FORM.fullmatch(text)
        if found is None or int(found[2]) >= 1 << 16:
            return None
        return cls(_spelt(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def reachable(self) -> bool:
        """It is one that a peer could connect to."""
        return self.port > 0 and self.host not in EVERYWHERE


@dataclass(frozen=True, slots=True)
class ControlPort:
    """Where a worker listens for its peers, and where they find it; port 0 of either stands for a free one."""

    listen: Address
    peers: Address


def control_port(control: str, advertise: str | None, secret: str | None) -> ControlPort:
    """ConfigError where an address is none, or would let other machines in without a secret."""
    listen = _parsed(control)
    peers = Address(listen.host, 0) if advertise is None else _parsed(advertise)
    if peers.host in EVERYWHERE:
        raise ConfigError(
            f"peers cannot connect to {peers.host}: say at which address this machine is reached, as in --advertise "
            "10.0.0.1:0"
        )
    if secret is not None and len(secret) < SECRET_CHARACTERS:
        raise ConfigError(f"the handoff secret must have at least {SECRET_CHARACTERS} characters")
    if secret is None and not is_loopback(listen.host):
        raise ConfigError(
            f"a control port at {listen.host} can be reached from other machines and needs a shared secret: give every "
            "worker the same handoff secret, or listen at 127.0.0.1"
        )
    return ControlPort(listen, peers)


def is_loopback(host: str) -> bool:
    """Nobody outside this machine reaches it. Of a name other than localhost that is not known."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _spelt(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower()
    return f"[{found}]" if found.version == 6 else str(found)


def _parsed(text: str) -> Address:
    found = Address.parse(text)
    if found is None:
        raise ConfigError(f"{text!r} is no control address: it takes the form host:port, as 127.0.0.1:9000")
    return found
