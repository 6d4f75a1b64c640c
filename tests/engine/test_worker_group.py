"""If a worker dies, is stopped or hangs, the others are aborted, all processes end, and the error names the cause.

The processes only wait until their abort flag is set, like kernels that wait for another rank.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

import pytest
import torch
from engine.threaded import split_engine
from models.split_workers import SPECS
from processes import pause

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, StartupError
from hotset.engine.progress import Progress
from hotset.engine.workers import group as group_module
from hotset.engine.workers.group import WorkerGroup
from hotset.engine.workers.messages import TaskProgress, WorkerFailed, WorkerRank, WorkerReport
from hotset.engine.workers.symmetric import AbortFlag
from hotset.engine.workers.worker import Inbox, Worker
from hotset.models.split import Split
from hotset.schedule.plan import Plan

DEADLINE_S = 30.0
STEP = 7
Behaviour = Callable[[Connection, Progress], None]


def wait_for_flag(flag: AbortFlag) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not flag.is_set:
        assert time.monotonic() < deadline, "the flag was not set"
        time.sleep(0.001)


def wait_in_step(pipe: Connection, progress: Progress, *reports: WorkerReport) -> None:
    """A worker whose main thread sends reports, and then waits for another worker."""
    inbox, flag = Inbox(pipe, on_abort=lambda: None), AbortFlag(torch.device("cpu"))
    inbox.set_on_abort(flag)
    with progress.beating():
        for report in (TaskProgress(0, 0), *reports):
            pipe.send(report)
        wait_for_flag(flag)
    os._exit(0)


def hang(pipe: Connection, progress: Progress) -> None:
    """A worker that reads no command, and never ends by itself."""
    with progress.beating():
        pipe.send(TaskProgress(0, 0))
        time.sleep(DEADLINE_S)


def fail(pipe: Connection, _progress: Progress) -> None:
    pipe.recv()  # the first command
    pipe.send(TaskProgress(0, 0))
    pipe.send(WorkerFailed(StartupError("tensor x is missing")))
    os._exit(1)


def die(pipe: Connection, _progress: Progress) -> None:
    """A worker that ends like `fail`, but reports nothing, like a process that aborts."""
    pipe.recv()
    os._exit(1)


def fail_and_wait(pipe: Connection, progress: Progress) -> None:
    """A worker that has failed, for example in its warm-up, and whose end waits for the others."""
    wait_in_step(pipe, progress, WorkerFailed(StartupError("out of memory")))


def exit_at_once(_pipe: Connection, _progress: Progress) -> None:
    """A worker that has died before the first command is sent."""
    os._exit(3)


def free_memory_slowly(pipe: Connection, _progress: Progress) -> None:
    """A worker that closes its pipes at SIGUSR1, and ends at SIGUSR2. In between, it stands for one that was killed and
    whose memory the system frees."""
    signal.signal(signal.SIGUSR1, lambda *_: os.closerange(3, 1024))
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    pipe.send(TaskProgress(0, 0))
    while True:
        signal.pause()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers ample time to end by themselves, so that tests do not depend on the machine's speed."""
    monkeypatch.setattr(group_module, "ABORT_SECONDS", DEADLINE_S)


def start_group(
    *behaviours: Behaviour, wake: Callable[[], None] = lambda: None, step_timeout: float = DEADLINE_S
) -> WorkerGroup:
    """Starts one process per behaviour, and waits until all of them have reached it."""
    context, workers = get_context("fork"), len(behaviours)

    def start(rank: WorkerRank, progress: Progress) -> tuple[Connection, SpawnProcess]:
        pipe, worker_end = context.Pipe()
        process = context.Process(target=behaviours[rank.number], args=(worker_end, progress))
        process.start()
        worker_end.close()
        if behaviours[rank.number] is free_memory_slowly:
            process.kill = lambda: None  # type: ignore[method-assign]  # it has been killed
        if behaviours[rank.number] is exit_at_once:
            process.join(DEADLINE_S)
        return pipe, cast(SpawnProcess, process)

    splits = [Split(tp_rank=rank, tp_size=workers) for rank in range(workers)]
    ranks = [WorkerRank(number, workers, 0, 1, split, "", "cpu") for number, split in enumerate(splits)]
    config = EngineConfig(step_timeout=step_timeout)
    group = WorkerGroup(config, ranks, start, wake, advance=lambda: None, oldest_step=lambda: STEP)
    for number, behaviour in enumerate(behaviours):
        if behaviour not in (fail, die):
            group.receive({number}, DEADLINE_S, "start-up")
    group.serving = True
    return group


def exit_codes(group: WorkerGroup) -> list[int | None]:
    """Waits until all processes have ended, without ending them."""
    for worker in group.workers:
        worker.process.join(DEADLINE_S)
    return [worker.process.exitcode for worker in group.workers]


def pid_of(group: WorkerGroup, number: int) -> int:
    pid = group.workers[number].process.pid
    assert pid is not None
    return pid


def test_if_a_worker_is_killed_the_others_are_aborted_and_end_by_themselves() -> None:
    woken = threading.Event()
    group = start_group(wait_in_step, wait_in_step, wait_in_step, wake=woken.set)
    os.kill(pid_of(group, 1), signal.SIGKILL)
    with pytest.raises(EngineStopped, match=r"^worker 1 \(stage 0 of 1, rank 1 of 3\) died \(exit code -9\)$"):
        group.receive({0, 1, 2}, DEADLINE_S, "a step")
    assert exit_codes(group) == [0, -9, 0], "nobody has closed the group yet"
    assert woken.is_set()
    with pytest.raises(EngineStopped, match=r"^worker 1 .* died"):
        group.check()
    group.close(DEADLINE_S)


def test_a_stopped_worker_is_named_and_resumed_so_that_it_can_end_by_itself() -> None:
    group = start_group(wait_in_step, wait_in_step, step_timeout=3.0)
    pause(pid_of(group, 1))
    message = rf"^worker 1 \(.*\) has shown no sign of life for 3 s \(--step-timeout\), in step {STEP}$"
    with pytest.raises(EngineStopped, match=message):
        group.receive({0, 1}, DEADLINE_S, "a step")
    assert exit_codes(group) == [0, 0]
    with pytest.raises(EngineStopped, match=message):
        group.check()
    group.close(DEADLINE_S)


def test_a_worker_that_does_not_end_is_killed_and_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "ABORT_SECONDS", 0.2)
    group = start_group(hang, fail)
    assert exit_codes(group) == [-signal.SIGKILL, 1]
    with pytest.raises(StartupError, match=r"^tensor x is missing$"):
        group.check()
    group.close(DEADLINE_S)


def test_if_a_worker_reports_a_failure_the_others_are_aborted_before_it_has_ended() -> None:
    group = start_group(fail_and_wait, wait_in_step)
    with pytest.raises(StartupError, match=r"^out of memory$"):
        group.receive({0, 1}, DEADLINE_S, "warm-up")
    assert exit_codes(group) == [0, 0], "nobody has closed the group yet"
    group.close(DEADLINE_S)


@pytest.mark.parametrize("silent", [(), (1,), (0,)])
def test_a_worker_that_died_without_a_report_is_named_before_reported_errors(silent: tuple[int, ...]) -> None:
    group = start_group(*(die if number in silent else fail for number in range(2)))
    with pytest.raises((StartupError, EngineStopped)) as raised:
        while True:
            group.receive({0, 1}, DEADLINE_S, "start-up")
    group.close(DEADLINE_S)
    names = [f"worker {number} (stage 0 of 1, rank {number} of 2) died (exit code 1)" for number in silent]
    assert str(raised.value) == (names[0] if names else "tensor x is missing")


def test_a_worker_that_dies_at_once_is_named() -> None:
    with pytest.raises(EngineStopped, match=r"^worker 0 \(stage 0 of 1, rank 0 of 2\) died \(exit code 3\)$"):
        start_group(exit_at_once, wait_in_step)


def test_a_worker_that_cannot_read_a_command_ends() -> None:
    """Otherwise it would wait for ever, even after its controller has died."""
    group = start_group(wait_in_step)
    group.workers[0].pipe.send_bytes(b"not a pickled command")
    assert exit_codes(group) == [0]
    group.close(DEADLINE_S)


def test_closing_a_group_aborts_a_step_that_does_not_end() -> None:
    group = start_group(wait_in_step, wait_in_step)
    processes = [worker.process for worker in group.workers]
    group.close(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0, 0], "a worker was killed while it could end by itself"


def test_closing_a_group_ends_stopped_workers_even_if_their_pipes_are_full() -> None:
    group = start_group(hang, wait_in_step)
    pause(pid_of(group, 0))
    worker = group.workers[0]
    os.set_blocking(worker.pipe.fileno(), False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(worker.pipe.fileno(), bytes(1 << 16))
    os.set_blocking(worker.pipe.fileno(), True)
    processes = [worker.process for worker in group.workers]
    group.abort()
    processes[1].join(DEADLINE_S)
    group.close(0.1)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0]
    assert group.workers == []


def test_an_abort_reaches_workers_whose_main_thread_waits_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: dict[int, AbortFlag] = {}  # by the thread of the worker
    set_on_abort = Inbox.set_on_abort

    def remember(inbox: Inbox, flag: AbortFlag) -> None:
        flags[threading.get_ident()] = flag
        set_on_abort(inbox, flag)

    waiting = threading.Barrier(3)

    def wait_for_abort(_worker: Worker, _step: object) -> None:
        waiting.wait(DEADLINE_S)
        flag = flags[threading.get_ident()]
        wait_for_flag(flag)
        flag.check()

    monkeypatch.setattr(Inbox, "set_on_abort", remember)
    monkeypatch.setattr(Worker, "_execute", wait_for_abort)
    with closing(split_engine(SPECS["qwen3"], 5, tensor_parallel_size=2, device_kv_tokens=400, tiers="off")) as engine:
        workers = list(engine.executor.workers)  # type: ignore[attr-defined]
        engine.executor.submit([Plan(0, (), (), (), (), ())])
        engine.executor.submit([Plan(1, (), (), (), (), ())])  # is never executed
        waiting.wait(DEADLINE_S)
        for worker in workers:
            worker.abort()
        for worker in workers:
            worker.process.join(DEADLINE_S)
            assert not worker.process.is_alive()
            assert worker.reported_failure() is None, "an aborted worker is not the cause"


def begin_to_free_memory(group: WorkerGroup) -> SpawnProcess:
    """Makes the first worker close its pipes, and returns its process, which runs on."""
    os.kill(pid_of(group, 0), signal.SIGUSR1)
    process = group.workers[0].process
    assert wait([process.sentinel], DEADLINE_S)
    return cast(SpawnProcess, process)


def test_a_group_is_closed_when_the_memory_of_all_workers_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(group_module, "SayWaiting", lambda _: lambda _names: waiting.set())
    group = start_group(free_memory_slowly, wait_in_step)
    process, others = begin_to_free_memory(group), [worker.process for worker in group.workers[1:]]
    closing_group = threading.Thread(target=group.close, args=(DEADLINE_S, DEADLINE_S))
    closing_group.start()
    assert waiting.wait(DEADLINE_S) and closing_group.is_alive() and process.exitcode is None
    os.kill(process.pid or 0, signal.SIGUSR2)
    closing_group.join(DEADLINE_S)
    assert not closing_group.is_alive() and [each.exitcode for each in (process, *others)] == [0, 0]


def test_the_error_does_not_wait_for_the_memory_of_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "CAUSE_SECONDS", 0.1)
    group = start_group(free_memory_slowly, wait_in_step)
    process = begin_to_free_memory(group)
    with pytest.raises(EngineStopped, match=r"^worker 0 \(.*\) died \(it was killed or stopped"):
        while True:
            group.receive({0, 1}, DEADLINE_S, "a step")
    assert process.exitcode is None
    os.kill(process.pid or 0, signal.SIGUSR2)
    group.close(DEADLINE_S)


def test_a_worker_that_holds_memory_after_the_deadline_is_named(caplog: pytest.LogCaptureFixture) -> None:
    group = start_group(free_memory_slowly, wait_in_step)
    process = begin_to_free_memory(group)
    group.close(DEADLINE_S, release_seconds=0.0)
    assert re.search(r"worker 0 \(.*\) \(process \d+\) has not ended and may hold memory", caplog.text)
    os.kill(process.pid or 0, signal.SIGUSR2)
    process.join(DEADLINE_S)
