"""Jobs have limits on time and memory, find what was prepared, and leave no process behind."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from processes import is_running, state_of, wait_until_ended

from hotset.base.fork_server import ForkServer, JobFailed, Worker
from hotset.base.job_pool import JobPool
from hotset.base.units import MIB

WORKER_BYTES = 32 * MIB
ALLOCATE, LOOP, NAMES = "base.small_jobs:allocate", "base.small_jobs:loop", "base.small_jobs:names"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with closing(ForkServer()) as server:
        yield server


@pytest.fixture
def worker(server: ForkServer) -> Worker:
    return server.fork(WORKER_BYTES)


def kill(pid: int | None, *others: int) -> None:
    """Kills a process, and waits until it and `others` have ended."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_ended([pid, *others])


def prepare(target: ForkServer | JobPool, name: str) -> None:
    target.prepare(name, "builtins:dict", {}, cpu_seconds=5.0, memory_bytes=1024 * MIB)


def test_a_job_without_end_is_killed_at_its_limit_of_cpu_time(worker: Worker) -> None:
    with pytest.raises(JobFailed, match=r"did not finish within 0\.05 s of CPU time"):
        worker.run(LOOP, {}, cpu_seconds=0.05, wall_seconds=20.0)  # the machine may be busy
    assert not worker.alive and not is_running(worker.pid)


def test_a_job_fails_at_its_limit_of_memory(worker: Worker) -> None:
    assert worker.run(ALLOCATE, {"length": WORKER_BYTES // 2}, cpu_seconds=5.0) == WORKER_BYTES // 2
    with pytest.raises(JobFailed, match=r"needs more than 32\.0 MiB of memory"):
        worker.run(ALLOCATE, {"length": 2 * WORKER_BYTES}, cpu_seconds=5.0)  # it may have freed a little before
    assert not worker.alive and not is_running(worker.pid)


def test_no_worker_outlives_its_server_and_the_next_server_has_what_was_prepared() -> None:
    with closing(ForkServer()) as server:
        prepare(server, "table")
        worker = server.fork(WORKER_BYTES)
        try:
            kill(server.pid, worker.pid)
        finally:
            worker.end()
        assert server.fork(WORKER_BYTES).run(NAMES, {}, cpu_seconds=5.0) == ["fds", "table"]


def test_ending_a_worker_of_a_server_that_has_died_does_no_harm_to_its_successor() -> None:
    with closing(ForkServer()) as server:
        before = server.fork(WORKER_BYTES)
        kill(server.pid, before.pid)
        after = server.fork(WORKER_BYTES)
        before.end()
        assert after.run(NAMES, {}, cpu_seconds=5.0) == ["fds"]


def test_a_worker_that_has_died_leaves_no_zombie(server: ForkServer, worker: Worker) -> None:
    kill(worker.pid)
    assert state_of(worker.pid) == "Z" and not worker.alive
    assert worker.end() == -signal.SIGKILL and state_of(worker.pid) is None


def test_jobs_of_a_pool_find_everything_that_was_prepared_before_them() -> None:
    with closing(JobPool(WORKER_BYTES)) as pool:
        assert pool.run(NAMES, {}, cpu_seconds=5.0) == ["fds"]
        for names in (["first"], ["first", "second"]):
            prepare(pool, names[-1])
            assert pool.run(NAMES, {}, cpu_seconds=5.0) == ["fds", *names]
