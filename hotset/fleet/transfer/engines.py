"""Opens a transfer engine by its name."""

import logging
from dataclasses import dataclass
from typing import Literal

from hotset.base.errors import ConfigError
from hotset.base.listeners import LOOPBACK_INTERFACE
from hotset.fleet.transfer.api import Transfer
from hotset.fleet.transfer.lanes import Lanes
from hotset.fleet.transfer.mooncake_backend import MooncakeBackend
from hotset.fleet.transfer.nixl_backend import NixlBackend

log = logging.getLogger(__name__)

NAMES = ("nixl", "mooncake")
LANES = 4
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The arguments of `open_transfer`, for every process of an engine."""

    name: str
    host: str
    interface: str
    protocol: Literal["tcp", "rdma"]
    lanes: int

    def open(self) -> Transfer:
        return open_transfer(
            self.name, host=self.host, interface=self.interface, protocol=self.protocol, lanes=self.lanes
        )


def open_transfer(
    name: str,
    *,
    host: str = "127.0.0.1",
    interface: str = LOOPBACK_INTERFACE,
    protocol: Literal["tcp", "rdma"] = "tcp",
    lanes: int = LANES,
    deadline_s: float = DEADLINE_S,
) -> Transfer:
    """Opens this process's endpoint of the transfer engine `name`. The caller closes it.

    `host` is the address at which peers reach this machine, and `interface` the network interface on which the engine
    listens; NIXL also takes RDMA devices. `protocol` applies only to Mooncake, because NIXL chooses its transports
    itself. A list of writes fails if it has not ended `deadline_s` seconds after its submission. Raises StartupError if
    the engine cannot be used on this machine (MissingDependency if a package is not installed, ConfigError if an
    argument is invalid).
    """
    if lanes < 1 or deadline_s <= 0:
        raise ConfigError(
            f"a transfer engine needs at least one lane and a positive deadline, got {lanes} lanes and {deadline_s} s"
        )
    transfer: Transfer
    if name == "nixl":
        transfer = Lanes(NixlBackend(interface, lanes), lanes, deadline_s)
    elif name == "mooncake":
        transfer = Lanes(MooncakeBackend(host, interface, protocol), lanes, deadline_s)
    else:
        raise ConfigError(f"there is no transfer engine {name!r}; choose one of {', '.join(NAMES)}")
    log.info("transfer engine %s on %s, interface %s, %s", name, host, interface, transfer.transport())
    return transfer
