"""The place where an engine loads `hotset/fleet`, which connects it with other engines and with other machines.

Nothing else in the core imports or names a module of `hotset/fleet`.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

from hotset.base.config import EngineConfig
from hotset.engine.input_processor import ModelCard
from hotset.engine.ports import CachePublisher, HandoffEndpoint
from hotset.engine.workers.executor import Executor
from hotset.engine.workers.launcher import Launcher
from hotset.engine.workers.placement import WorkerDevice
from hotset.memory.device_pool import KvShape
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger


class Connections(Protocol):
    """The interface of `hotset/fleet` to an engine. Each method is called only if the configuration asks for it."""

    def cluster_launcher(self, config: EngineConfig, devices: Sequence[WorkerDevice]) -> Launcher:
        """Returns the launcher of workers on other nodes that `config.executor` names."""

    def open_endpoint(
        self,
        config: EngineConfig,
        card: ModelCard,
        kv_shape: KvShape,
        weights: str,
        schedulers: Sequence[Scheduler],
        executor: Executor,
        wake: Callable[[], None],
    ) -> HandoffEndpoint:
        """Opens the handoff endpoint of a prefill or decode worker.

        `kv_shape` is that of the whole model, and `weights` identifies its weights. `wake` is called from another
        thread when the endpoint has an event for the step loop. Raises StartupError if the endpoint cannot be opened.
        """

    def open_publishers(self, config: EngineConfig, ledgers: Sequence[Ledger]) -> Sequence[CachePublisher]:
        """Opens a publisher of KV events for the prefix cache of each replica. Raises StartupError if that fails."""


def load_connections() -> Connections:
    """Imports `hotset/fleet`, by name, and returns its implementation of `Connections`."""
    connections: Connections = importlib.import_module("hotset.fleet.connections").FleetConnections()
    return connections
