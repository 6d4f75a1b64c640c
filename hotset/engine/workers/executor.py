"""What the step loop needs of whoever computes: few verbs, so that processes on a cluster can stand beside ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotset.engine.runner import Runner, SubmittedStep
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import KvMemory, Traffic
from hotset.transfer.api import DeviceEvent

Step = Sequence[Plan | None]  # a plan for each replica; None: it has nothing to do in this step


class StepFuture(Protocol):
    """A step that was submitted."""

    def results(self) -> Sequence[StepResult | None]:
        """Waits for this step, by all that take part in it. EngineStopped if a worker died."""


@dataclass(frozen=True, slots=True)
class HostShard:
    """The home of some layers' rows, of some heads, in memory that the controller can reach."""

    replica: int
    first_layer: int  # of the whole model
    shape: KvShape  # of what is here
    kv_heads: int  # of the whole model, where ranks divide rows by them
    store: HostStore


def whole(memory: KvMemory) -> list[HostShard]:
    """The one home of a worker that holds everything; none without tiers."""
    return [] if memory.host is None else [HostShard(0, 0, memory.pool.shape, 1, memory.host)]


class Executor(Protocol):
    """Carries out steps in the order they come. Not thread-safe, but for `stored` and what it returned."""

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compiles and captures ahead what steps will need. `progress(done, total)`."""

    def check(self) -> None:
        """EngineStopped if a worker died, though nothing was asked of it."""

    def submit(self, step: Step) -> StepFuture:
        """Begins a step. Waits for none, unless this one reads what others may still be writing."""

    def stored(self) -> DeviceEvent | None:
        """Happens when all that steps submitted so far were to copy to the host is there; None: it is."""

    def hosts(self) -> Sequence[HostShard]:
        """The host stores of all workers; none without tiers."""

    @property
    def pool(self) -> DevicePool | None:
        """Device memory that is this process's own."""

    def traffic(self) -> Traffic:
        """What moved between host and device since start, in all workers."""

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        """Proves of the tiered seats of each replica, whose contexts have so many rows, that their maps agree."""

    @property
    def pinned_bytes(self) -> int:
        """Of host memory that `close` gives back."""

    def close(self) -> None:
        """Ends workers, and gives their memory back. Idempotent."""


class _Done:
    def __init__(self, ticket: SubmittedStep) -> None:
        self._ticket = ticket

    def results(self) -> Sequence[StepResult]:
        return (self._ticket.result(),)


class InProcessExecutor:
    """One worker, in this process."""

    def __init__(self, runner: Runner, memory: KvMemory) -> None:
        self.runner, self.memory = runner, memory

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        self.runner.warm_up(progress)

    def check(self) -> None:
        pass

    def submit(self, step: Step) -> StepFuture:
        (plan,) = step
        assert plan is not None, "a step without a plan"
        return _Done(self.runner.submit(plan))

    def stored(self) -> DeviceEvent | None:
        return self.memory.mirrored_event()

    def hosts(self) -> Sequence[HostShard]:
        return whole(self.memory)

    @property
    def pool(self) -> DevicePool:
        return self.memory.pool

    def traffic(self) -> Traffic:
        return self.memory.traffic()

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        self.memory.audit(tiered[0])

    @property
    def pinned_bytes(self) -> int:
        host = self.memory.host
        tensors = () if host is None else (host.rows, host.keys)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def close(self) -> None:
        self.memory.close()
