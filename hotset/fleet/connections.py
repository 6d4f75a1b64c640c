"""Connects an engine with others: opens its handoff endpoint and its KV events, and launches workers on other nodes.

`hotset/engine/connections.py` loads this module. Modules that need an optional package are imported inside functions.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hotset.base.address import is_loopback
from hotset.base.config import EngineConfig
from hotset.base.errors import MissingDependency, StartupError
from hotset.engine.connections import Connections
from hotset.engine.input_processor import ModelCard
from hotset.engine.ports import CachePublisher, HandoffEndpoint
from hotset.engine.workers.executor import Executor
from hotset.engine.workers.launcher import Launcher
from hotset.engine.workers.placement import WorkerDevice
from hotset.fleet.handoff.endpoints import open_endpoint
from hotset.fleet.handoff.messages import ModelIdentity
from hotset.fleet.transfer.api import Transfer
from hotset.fleet.transfer.engines import TransferSettings
from hotset.memory.device_pool import KvShape
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger

LOGGER = logging.getLogger("hotset.engine")


@dataclass(frozen=True, slots=True)
class FleetConnections(Connections):
    """Implements `Connections`. `open_transfer` opens a transfer endpoint, in this process or in one of its workers."""

    open_transfer: Callable[[TransferSettings], Transfer] = TransferSettings.open

    def cluster_launcher(self, config: EngineConfig, devices: Sequence[WorkerDevice]) -> Launcher:
        from hotset.fleet.ray.launcher import RayLauncher  # `check_model` has found Ray

        return RayLauncher(config.ray_address, "GPU" if devices[0].is_gpu else "CPU")

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
        key = None if kv_shape.key is None else kv_shape.key.description
        model = ModelIdentity(card.name, kv_shape.layers, kv_shape.row.description, key, kv_shape.groups, weights)
        return open_endpoint(config, model, schedulers, executor, card, self.open_transfer, wake)

    def open_publishers(self, config: EngineConfig, ledgers: Sequence[Ledger]) -> Sequence[CachePublisher]:
        try:
            from hotset.fleet.kv_events.publisher import KvEventPublisher
        except ModuleNotFoundError as error:
            raise MissingDependency(f"--kv-events needs {error.name}: pip install 'hotset[serve]'") from error
        publishers = []
        with ExitStack() as undo:
            for rank, (endpoint, ledger) in enumerate(zip(config.events_endpoints, ledgers, strict=True)):
                if ledger.host is None:
                    raise StartupError("--kv-events publishes the prefix cache, but this engine has no host store")
                publisher = KvEventPublisher(endpoint, topic=config.kv_events_topic, rank=rank)
                undo.callback(publisher.close)
                ledger.host.on_change = publisher.on_change
                publishers.append(publisher)
                level = logging.INFO if is_loopback(endpoint.live.host) else logging.WARNING
                LOGGER.log(level, "KV events, which contain the tokens of all prompts, are at %s", publisher.endpoint)
            undo.pop_all()
        return publishers
