"""Opens a transfer engine by its name."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hotset.base.errors import ConfigError
from hotset.base.listeners import LOOPBACK_INTERFACE
from hotset.fleet.transfer.api import Transfer
from hotset.fleet.transfer.lanes import Backend, Lanes
from hotset.fleet.transfer.mooncake_backend import MooncakeBackend
from hotset.fleet.transfer.nixl_backend import NixlBackend

log = logging.getLogger(__name__)

LANES = 4
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The settings with which every process of an engine opens its endpoint of a transfer engine."""

    name: str  # a key of BACKENDS
    host: str = "127.0.0.1"  # the address at which peers reach this machine
    interface: str = LOOPBACK_INTERFACE  # the network interface to listen on; NIXL also takes RDMA devices
    protocol: Literal["tcp", "rdma"] = "tcp"  # only for Mooncake; NIXL chooses its transports itself
    lanes: int = LANES
    deadline_s: float = DEADLINE_S  # a list of writes fails if it has not ended this long after its submission
    device: str = "cpu"  # the GPU whose memory this process registers

    def open(self) -> Transfer:
        """Opens this process's endpoint. The caller closes it. Raises StartupError if the engine cannot be used on this
        machine (MissingDependency if a package is not installed, ConfigError if a setting is invalid)."""
        if self.lanes < 1 or self.deadline_s <= 0:
            raise ConfigError(
                f"a transfer engine needs at least one lane and a positive deadline, got {self.lanes} lanes and "
                f"{self.deadline_s} s"
            )
        if self.name not in BACKENDS:
            raise ConfigError(f"there is no transfer engine {self.name!r}; choose one of {', '.join(BACKENDS)}")
        self._use_device()
        transfer = Lanes(BACKENDS[self.name](self), self.lanes, self.deadline_s, self._use_device)
        where = (self.name, self.host, self.interface, transfer.transport())
        log.info("transfer engine %s on %s, interface %s, %s", *where)
        return transfer

    def _use_device(self) -> None:
        """Makes the GPU the current one of this thread. Without it, UCX does not know to which device memory belongs,
        and chooses network devices without regard to it."""
        if self.device != "cpu":
            import torch

            from hotset.engine.loading import use_device

            use_device(torch.device(self.device))


BACKENDS: dict[str, Callable[[TransferSettings], Backend]] = {
    "nixl": lambda settings: NixlBackend(settings.interface, settings.lanes),
    "mooncake": lambda settings: MooncakeBackend(settings.host, settings.interface, settings.protocol),
}
