"""What the controller knows about one worker process."""

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from hotset.engine.progress import Progress, StallTimer
from hotset.engine.start_plan import WorkerPlan
from hotset.engine.workers.messages import WorkerFailed, WorkerRank, WorkerReport
from hotset.memory.device_pool import KvShape


@dataclass(slots=True)
class WorkerHandle:
    """One worker process, and what it has reported."""

    rank: WorkerRank
    process: SpawnProcess
    pipe: Connection
    progress: Progress
    silence: StallTimer = field(default_factory=StallTimer)
    hung: bool = False  # it has shown no sign of life for the step timeout, and was killed
    plan: WorkerPlan | None = None  # None until the worker has planned what it loads
    free: int | None = None  # bytes of its device that KV may take; None until its weights are loaded
    bytes_read: int = 0
    failure: WorkerFailed | None = None  # the failure that the controller has read

    @property
    def planned(self) -> WorkerPlan:
        assert self.plan is not None, f"{self.rank.name} has not planned what it loads"
        return self.plan

    @property
    def shape(self) -> KvShape:
        return self.planned.weights.kv_shape

    def reported_failure(self) -> WorkerFailed | None:
        """Returns the failure that the worker has reported, also if the controller has not read it yet."""
        try:
            while self.failure is None and self.pipe.poll():
                report: WorkerReport = self.pipe.recv()
                if isinstance(report, WorkerFailed):
                    self.failure = report
        except (EOFError, OSError):  # nothing is left to read
            pass
        return self.failure
