"""What the controller and its workers say to each other, over a pipe to each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.engine.sizing import KvBudget
from hotset.memory.device_pool import KvShape
from hotset.models.split import Split
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import Traffic


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Where one worker stands among all."""

    number: int  # of `workers`
    workers: int
    stage: int
    stages: int
    split: Split
    rendezvous: str  # host:port where all workers meet
    device: str

    @property
    def name(self) -> str:
        """For people."""
        if self.split.dp_size > 1:
            return f"worker {self.number} (data parallel rank {self.split.rank} of {self.split.size})"
        rank = f"rank {self.split.rank} of {self.split.size}"
        return f"worker {self.number} (stage {self.stage} of {self.stages}, {rank})"

    @property
    def replica(self) -> int:
        return self.split.dp_rank


@dataclass(frozen=True, slots=True)
class InitWorker:
    config: EngineConfig
    place: WorkerRank


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of weights."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights are there; what is left on the worker's device is free for KV."""

    shape: KvShape
    free: int


@dataclass(frozen=True, slots=True)
class InitCache:
    """What the engine runs with. If there are host pages, the memory for them follows."""

    budget: KvBudget
    writer: int  # the host store is shared with others if there are several
    writers: int


@dataclass(frozen=True, slots=True)
class CacheReady:
    pass


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker does not start, or cannot go on. `trace` is set where it is a bug of ours."""

    error: StartupError
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What was sampled at another stage."""

    seat: int
    position: int
    token_id: int


@dataclass(frozen=True, slots=True)
class ExecuteStep:
    """A step to be carried out, after all before it."""

    number: int
    plan: Plan | None
    tokens: Sequence[SampledToken]
    rows: Sequence[int]  # that each replica computes in it


@dataclass(frozen=True, slots=True)
class StepDone:
    """The step has been carried out, and what it was to copy to the host is there."""

    number: int
    result: StepResult | None  # of whoever sampled; None of all others


@dataclass(frozen=True, slots=True)
class GetTraffic:
    pass


@dataclass(frozen=True, slots=True)
class TrafficReport:
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class RunAudit:
    tiered: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class AuditReport:
    flaw: str | None


@dataclass(frozen=True, slots=True)
class StopWorker:
    pass


WorkerCommand = InitWorker | InitCache | ExecuteStep | GetTraffic | RunAudit | StopWorker
WorkerReport = LoadProgress | Loaded | CacheReady | WorkerFailed | StepDone | TrafficReport | AuditReport
