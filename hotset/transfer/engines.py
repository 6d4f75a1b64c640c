"""Opens a transfer engine by name."""

import logging
from typing import Literal

from hotset.base.errors import ConfigError
from hotset.transfer.api import Transfer
from hotset.transfer.lanes import Lanes
from hotset.transfer.loopback import Hub, Loopback
from hotset.transfer.mooncake_engine import MooncakeBackend
from hotset.transfer.nixl_engine import NixlBackend

log = logging.getLogger(__name__)

NAMES = ("nixl", "mooncake", "loopback")
LANES = 4
DEADLINE_S = 30.0


def open_transfer(
    name: str,
    *,
    host: str = "127.0.0.1",
    protocol: Literal["tcp", "rdma"] = "tcp",
    lanes: int = LANES,
    deadline_s: float = DEADLINE_S,
    hub: Hub | None = None,
) -> Transfer:
    """One process's end of engine `name`. The caller closes it.

    `host` is this machine's address as peers reach it; given a loopback address, NIXL listens nowhere else (Mooncake
    listens everywhere). `protocol` is Mooncake's, while NIXL chooses by itself. `hub` is where ends of loopback meet. A
    list of writes that has not ended `deadline_s` after its submission has failed. StartupError if the engine cannot be
    used here, MissingDependency among them.
    """
    if lanes < 1 or deadline_s <= 0:
        raise ConfigError(f"a transfer needs at least one lane and some time, not {lanes} and {deadline_s} s")
    transfer: Transfer
    if name == "nixl":
        transfer = Lanes(NixlBackend(host, lanes), lanes, deadline_s)
    elif name == "mooncake":
        transfer = Lanes(MooncakeBackend(host, protocol), lanes, deadline_s)
    elif name == "loopback" and hub is not None:
        transfer = Loopback(hub, deadline_s=deadline_s)
    elif name == "loopback":
        raise ConfigError("transfer engine loopback works within one process only; between processes take nixl")
    else:
        raise ConfigError(f"there is no transfer engine {name!r}; there are {', '.join(NAMES)}")
    log.info("transfer engine %s on %s, %s", name, host, transfer.transport())
    return transfer


def prefer_few_writes(name: str, protocol: str | None) -> bool:
    """One write costs as much as some hundred kilobytes: whoever can should ask for few, if for a copy more of a part.
    Mooncake takes 0.1 ms for one over TCP (benchmarks/landing.py)."""
    return name == "mooncake" and protocol in (None, "tcp")
