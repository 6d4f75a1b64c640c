"""An executor whose workers are threads of the test's process. The threads run the code of worker processes."""

import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar
from unittest import mock

import torch
from harness import CPU, RandomWeights
from models.split_workers import ThreadCollectives, ThreadGroup
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.engine.build import assemble, model_card
from hotset.engine.core import Engine
from hotset.engine.model_checks import kv_storage, model_splits
from hotset.engine.progress import Progress
from hotset.engine.sizing import device_memory, shared_budget
from hotset.engine.start_plan import WorkerPlan
from hotset.engine.workers import worker as worker_module
from hotset.engine.workers.group import StartProcess
from hotset.engine.workers.launcher import LocalLauncher
from hotset.engine.workers.messages import WorkerRank
from hotset.engine.workers.placement import WorkerDevice
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.engine.workers.symmetric import AbortFlag
from hotset.fleet.connections import FleetConnections
from hotset.fleet.transfer.api import Transfer
from hotset.fleet.transfer.engines import TransferSettings
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder, worker_kv_shape
from hotset.models.spec import ModelSpec
from hotset.models.split import Split
from hotset.models.weight_plan import plan_weights

WAIT_S = 300.0  # only a rank that hangs takes so long, even on a busy machine


class ThreadWorld:
    """Implements `World` with queues between threads."""

    def __init__(
        self, collectives: Collectives, number: int, queues: "defaultdict[tuple[int, int], queue.Queue[Tensor]]"
    ) -> None:
        self.collectives, self._number, self.abort = collectives, number, AbortFlag(CPU)
        self._queues = queues  # (sender, receiver) -> tensors

    def send(self, x: Tensor, to: int) -> None:
        self._queues[self._number, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self._queues[source, self._number].get(timeout=WAIT_S))


class ThreadProcess:
    """A thread with the interface of a process. A thread cannot be killed, so `kill` only calls `on_kill`, which should
    make the thread exit."""

    def __init__(self, target: Callable[[], None], on_kill: Callable[[], None]) -> None:
        self.sentinel, self._open_while_running = os.pipe()
        self._target, self._on_kill = target, on_kill
        self.exitcode: int | None = None
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._target()
        self.exitcode = 0
        os.close(self._open_while_running)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def kill(self) -> None:
        self._on_kill()


class NodesLauncher(LocalLauncher):
    """Divides the workers evenly over `nodes` nodes, so that the controller maps none of their host stores."""

    def __init__(self, nodes: int, devices: Sequence[WorkerDevice], start: StartProcess) -> None:
        super().__init__(devices, start)
        self._nodes = nodes

    def place(self, splits: Sequence[Split]) -> list[WorkerRank]:
        ranks = super().place(splits)
        return [replace(rank, node=f"node {rank.number * self._nodes // len(ranks)}") for rank in ranks]


class ThreadOpener:
    """Opens transfer endpoints with a function of this process. When workers that are threads receive a copy of this
    object, it calls the same function."""

    openers: ClassVar[list[Callable[[], Transfer]]] = []

    def __init__(self, opener: Callable[[], Transfer]) -> None:
        self._number = len(self.openers)
        self.openers.append(opener)

    def __call__(self, _settings: TransferSettings) -> Transfer:
        return self.openers[self._number]()


class ThreadWorkers(MultiprocessExecutor):
    """Implements `Executor` with workers that are threads of this process."""

    def __init__(self, config: EngineConfig, splits: Sequence[Split], kv_heads: int, nodes: int = 0) -> None:
        """If `nodes` is not 0, the workers act as if they were on this number of other nodes."""
        stages = len(splits) // splits[0].size
        self._groups = [ThreadGroup(splits[0].size) for _ in range(stages)]
        devices = [WorkerDevice("cpu")] * len(splits)
        self._queues: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        launcher = NodesLauncher(nodes, devices, self._start) if nodes else LocalLauncher(devices, self._start)
        super().__init__(config, splits, launcher, kv_heads)

    def _start(self, rank: WorkerRank, progress: Progress) -> tuple[Connection, Any]:
        pipe, worker_end = Pipe()

        def join_world(rank: WorkerRank, _device: torch.device, _collectives: str) -> ThreadWorld:
            collectives: Collectives = SINGLE_RANK
            if rank.split.size > 1:
                collectives = ThreadCollectives(rank.split.rank, self._groups[rank.stage])
            return ThreadWorld(collectives, rank.number, self._queues)

        def serve() -> None:
            worker_module.serve(worker_end, progress, join_world, lambda: None)
            worker_end.close()

        return pipe, ThreadProcess(serve, self._abort_barriers)

    def _abort_barriers(self) -> None:
        """Aborts the barriers of all groups, so that threads that wait in a collective fail and exit. A thread that
        waits for another pipeline stage fails after at most WAIT_S seconds."""
        for group in self._groups:
            group.barrier.abort()


def split_engine(
    spec: ModelSpec,
    seed: int,
    opener: Callable[[], Transfer] | None = None,
    on_load: Callable[[Decoder, Split], None] = lambda decoder, split: None,
    on_pinned: Callable[[int, int], None] = lambda done, total: None,
    nodes: int = 0,
    **settings: Any,
) -> Engine:
    """Returns an engine with several workers and random weights in float64. `settings` are fields of EngineConfig.

    `on_load` is called with each worker's decoder, in the worker's thread. `on_pinned` is the argument of `init_cache`.
    `nodes` is the argument of `ThreadWorkers`.
    """
    config = EngineConfig(**settings)
    connections = FleetConnections() if opener is None else FleetConnections(ThreadOpener(opener))
    kv_heads = spec.attention.divided_kv_heads

    class RandomModelLoader:
        """Replaces `ModelLoader`."""

        def __init__(
            self, _config: EngineConfig, device: torch.device, split: Split, collectives: Collectives, _ranks: int
        ) -> None:
            self._weights, self._split, self._collectives = RandomWeights(torch.float64, seed), split, collectives
            storage, memory = kv_storage(config, spec), device_memory(device)
            weights = plan_weights(spec, self._weights, storage, split)
            self.plan = WorkerPlan(weights, memory, memory.free, steps=0)

        def load(self, _progress: Callable[[int, int], None]) -> Decoder:
            decoder = Decoder(spec, self._weights, kv_storage(config, spec), self._split, self._collectives)
            on_load(decoder, self._split)
            return decoder

        def free_for_kv(self) -> int:
            return device_memory(CPU).free

    with mock.patch.object(worker_module, "ModelLoader", RandomModelLoader):
        workers = ThreadWorkers(config, model_splits(config, spec), kv_heads, nodes)
        workers.plan()
        loaded = workers.load(lambda done, total: None)
    budget = shared_budget(config, loaded, spec.context, CPU)
    workers.init_cache(budget, on_pinned)
    card = model_card(config, spec, budget, CPU, torch.float64)
    shape = worker_kv_shape(spec, torch.float64, kv_storage(config, spec))
    return assemble(config, card, shape, budget, workers, weights=f"random {seed}", connections=lambda: connections)
