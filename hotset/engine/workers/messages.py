"""Messages between the controller (the engine process) and its workers. Each worker has one connection to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.base.listeners import LOOPBACK_INTERFACE
from hotset.engine.decode_graphs import StepGraph
from hotset.engine.ports import Messages
from hotset.engine.runner import SampledToken
from hotset.engine.sizing import KvBudget, WorkerMemory
from hotset.engine.start_plan import WorkerPlan
from hotset.engine.workers.shared_memory import SharedName
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.models.split import Split
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import Traffic

Description = TypeVar("Description")
THIS_MACHINE = ""  # the node of workers that are child processes of the controller


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Identifies one worker among all workers of the engine."""

    number: int  # in [0, workers)
    workers: int
    stage: int  # in [0, stages)
    stages: int
    split: Split
    rendezvous: str  # path of the file through which the workers exchange their addresses, or tcp://host:port
    device: str
    ranks_on_gpu: int = 1  # number of workers that share this worker's GPU, including itself
    node: str = THIS_MACHINE  # name of the worker's node; workers of one node can share memory
    interface: str = LOOPBACK_INTERFACE  # the network interface through which the other workers reach this one

    @property
    def name(self) -> str:
        """The name of the worker in error messages."""
        node = "" if self.node == THIS_MACHINE else f", node {self.node}"
        if self.split.dp_size > 1:
            return f"worker {self.number} (data parallel rank {self.split.rank} of {self.split.size}{node})"
        rank = f"rank {self.split.rank} of {self.split.size}"
        return f"worker {self.number} (stage {self.stage} of {self.stages}, {rank}{node})"

    @property
    def replica(self) -> int:
        return self.split.dp_rank


@dataclass(frozen=True, slots=True)
class InitWorker:
    """Commands a worker to open the model's files and to plan its part, without reading weights. This is always the
    first command. The worker reports its `WorkerPlan`."""

    config: EngineConfig
    rank: WorkerRank


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Commands a worker to load the weights that it has planned, unless they are loaded. The worker reports its
    `WorkerMemory`."""


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Reports how far the worker is with a command that takes long: bytes of weights that it has read, bytes of its
    host store that it has pinned, or graphs that it has captured."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class CreateStore:
    """Commands a worker to create memory for the host store that it shares with other workers of its node. The worker
    reports its `SharedName`."""

    nbytes: int
    gpus: Sequence[int]  # the GPUs of all workers that use the store; empty on a CPU


@dataclass(frozen=True, slots=True)
class InitCache:
    """Commands a worker to allocate its KV memory."""

    budget: KvBudget
    store: SharedName | None  # the memory of its host store; None if the budget has no host pages
    writer: int  # in [0, writers): this worker's index among the workers that write to the same host store
    writers: int


@dataclass(frozen=True, slots=True)
class CacheReady:
    """Reports that the KV memory is allocated."""


@dataclass(frozen=True, slots=True)
class DropMtp:
    """Commands a worker to release its KV memory and its MTP layer. The worker then plans again for this `config`,
    which has no drafts, and waits for `LoadWeights`. It reads no weights again."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Reports that the worker cannot start or cannot continue. `trace` is the traceback of an unexpected exception,
    which `error` wraps. It is None if the cause was a StartupError."""

    error: StartupError
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Commands a worker to compile kernels and to capture the graphs of decode steps. The graphs contain collectives,
    so all workers receive this command while no step is in flight."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """Reports that the worker has finished `WarmUp`."""

    has_graphs: bool  # whether it can replay decode steps as graphs


class ConnectionAddress(Protocol):
    """The address at which the controller waits for a further connection of a worker on another node."""

    def open(self) -> Messages:
        """Connects to the controller."""


@dataclass(frozen=True, slots=True)
class RunningService(Generic[Description]):
    """A service that a worker has started."""

    description: Description  # for the controller
    memory: object  # the worker must keep this until it has released its KV memory


class WorkerService(Protocol[Description]):
    """A service that a worker process runs for the controller beside its steps, in separate threads. Can be pickled."""

    def start(
        self, rank: WorkerRank, pool: DevicePool, host: HostStore | None, connection: Messages
    ) -> RunningService[Description]:
        """Starts the service, which the controller directs over `connection` until that is closed.

        `pool` and `host` are the memory of the worker. `host` is None if the controller has mapped the worker's host
        store, or if another worker has created it.
        """


@dataclass(frozen=True, slots=True)
class StartService:
    """Commands a worker to start a service, and passes it the worker's end of the service's connection."""

    service: WorkerService[Any]
    connection: Connection | ConnectionAddress


@dataclass(frozen=True, slots=True)
class ServiceStarted:
    """Answers `StartService` with the description of the running service."""

    description: Any


@dataclass(frozen=True, slots=True)
class ExecuteStep:
    """Commands a worker to execute a step, after all earlier ones."""

    number: int
    plan: Plan | None  # None if the worker's replica computes nothing in this step
    graph: StepGraph | None  # the graph that all workers replay, even without a plan; None: the step uses no graph
    sampled: Sequence[SampledToken]  # for the first stage of a pipeline: tokens that the last stage sampled; else ()
    tokens_per_rank: Sequence[int]  # number of tokens, with padding, that each data parallel rank computes in this step


@dataclass(frozen=True, slots=True)
class StepDone:
    """Reports that the step has been executed and that all its copies to the host have finished."""

    number: int
    result: StepResult | None  # set by one worker of each replica (see `Worker._reports_samples`); None from the others
    traffic: Traffic  # of this worker since start, including this step


@dataclass(frozen=True, slots=True)
class RunAudit:
    """Requests an `AuditReport`."""

    tiered: Mapping[int, int]  # tiered seat -> number of rows of its context


@dataclass(frozen=True, slots=True)
class AuditReport:
    flaw: str | None  # a description of what is inconsistent; None if the audit passed


@dataclass(frozen=True, slots=True)
class AbortSteps:
    """Commands a worker to end all waits for other workers and to exit: another worker has died or hangs.

    The thread that reads commands executes it at once, even while the main thread waits in a step."""


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Commands a worker to release its memory and exit."""


WorkerCommand = (
    InitWorker
    | LoadWeights
    | CreateStore
    | InitCache
    | StartService
    | WarmUp
    | ExecuteStep
    | RunAudit
    | DropMtp
    | AbortSteps
    | StopWorker
)
WorkerReport = (
    WorkerPlan
    | TaskProgress
    | WorkerMemory
    | SharedName
    | CacheReady
    | ServiceStarted
    | WarmedUp
    | WorkerFailed
    | StepDone
    | AuditReport
)
