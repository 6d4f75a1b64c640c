"""The interface between the step loop and the workers, and its implementation with one worker in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from hotset.base.address import Address
from hotset.engine.decode_graphs import choose_graph
from hotset.engine.ports import Messages
from hotset.engine.runner import Runner, SubmittedStep
from hotset.engine.workers.messages import Description, WorkerService
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.schedule.handoffs import DeviceEvent
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import NO_TRAFFIC, Traffic, TrafficCopy

Step = Sequence[Plan | None]  # one plan per replica; None for a replica that computes nothing in this step


class StepFuture(Protocol):
    """The future results of a submitted step."""

    def results(self) -> Sequence[StepResult | None]:
        """Waits until the results of this step are known, and returns one per replica.

        The result of a replica that computed nothing is None.

        Raises EngineStopped if a worker died.
        """


@dataclass(frozen=True, slots=True)
class HostShard:
    """A host store, or one worker's part of it, mapped into the memory of the engine process."""

    replica: int
    first_layer: int  # index of its first layer in the whole model
    shape: KvShape  # the KV shape of this part of the model
    kv_heads: int  # number of KV heads of the whole model; used only if ranks divide rows by heads
    store: HostStore


@dataclass(frozen=True, slots=True)
class ServingWorker(Generic[Description]):
    """A worker process that runs a service, with what the service has described, and the connection to it."""

    replica: int
    first_layer: int  # as in HostShard, like the next two
    kv_heads: int
    shape: KvShape
    described: Description
    connection: Messages


class Executor(Protocol):
    """Executes steps in the order of submission. Only `mirrored_event` and its result may be used from any thread."""

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles kernels and captures graphs before the first request. `progress(done, total)` counts graphs."""

    def check(self) -> None:
        """Raises EngineStopped if a worker has died."""

    def submit(self, step: Step) -> StepFuture:
        """Starts a step. Waits for earlier steps only if this one reads host pages that they may still write."""

    def mirrored_event(self) -> DeviceEvent | None:
        """Returns an event that occurs when the steps submitted so far have finished all their copies to the host.

        Returns None if they have already finished.
        """

    def hosts(self) -> Sequence[HostShard]:
        """Returns the host stores that this process has mapped: all except those of other nodes."""

    @property
    def pool(self) -> DevicePool | None:
        """The device pool if it belongs to this process, else None."""

    @property
    def maps_all_hosts(self) -> bool:
        """Whether `hosts` returns all host stores of the engine."""

    def start_service(self, service: WorkerService[Description]) -> Sequence[ServingWorker[Description]]:
        """Starts a service in every worker process. Returns nothing if this process is the only worker. Call it once,
        while no step is in flight."""

    def traffic(self) -> Traffic:
        """Returns the traffic between host and device, over all workers, from the start to the last step whose results
        were returned. Does not wait for steps."""

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        """Asserts that the maps of all hot buffers are consistent.

        `tiered[replica]` maps each tiered seat to the number of rows of its context.
        """

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned, 0 without a GPU. Releasing pinned memory makes `close` slow."""

    @property
    def addresses(self) -> Sequence[Address]:
        """The addresses on which this process listens for its workers."""

    def close(self) -> None:
        """Stops the workers and releases their memory. Idempotent."""


class _SubmittedInProcess:
    def __init__(self, executor: "InProcessExecutor", submitted: SubmittedStep, traffic: TrafficCopy) -> None:
        self._executor, self._submitted, self._traffic = executor, submitted, traffic

    def results(self) -> Sequence[StepResult]:
        result = self._submitted.result()
        self._executor.newest_traffic = self._traffic
        return (result,)


class InProcessExecutor:
    """Implements `Executor` with one worker, in this process."""

    addresses: Sequence[Address] = ()
    maps_all_hosts = True

    def __init__(self, runner: Runner) -> None:
        self.runner, self.memory = runner, runner.memory
        self.newest_traffic: TrafficCopy | None = None  # as of the last step whose results were returned

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        self.runner.warm_up(progress)

    def check(self) -> None:
        pass

    def submit(self, step: Step) -> StepFuture:
        (plan,) = step
        assert plan is not None, "an engine with one replica submits no step without a plan"
        graph = choose_graph(step, self.runner.max_decoded) if self.runner.has_graphs else None
        submitted = self.runner.submit(plan, graph)
        return _SubmittedInProcess(self, submitted, self.memory.copy_traffic())

    def mirrored_event(self) -> DeviceEvent | None:
        return self.memory.mirrored_event()

    def hosts(self) -> Sequence[HostShard]:
        return [] if self.memory.host is None else [HostShard(0, 0, self.memory.pool.shape, 1, self.memory.host)]

    @property
    def pool(self) -> DevicePool:
        return self.memory.pool

    def start_service(self, service: WorkerService[Description]) -> Sequence[ServingWorker[Description]]:
        return ()

    def traffic(self) -> Traffic:
        return NO_TRAFFIC if self.newest_traffic is None else self.newest_traffic.result()

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        self.memory.audit(tiered[0])

    @property
    def pinned_bytes(self) -> int:
        host = self.memory.host
        return 0 if host is None else host.pinned_bytes

    def close(self) -> None:
        self.runner.close()
