"""A controller and workers on other nodes exchange messages over real sockets, refuse strangers, and notice when the
other side ends."""

import contextlib
import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import zmq
from processes import fork_server, pause
from waiting import wait_until

from hotset.base.errors import StartupError
from hotset.engine.progress import Progress
from hotset.engine.workers.messages import AbortSteps, AuditReport, RunAudit, StopWorker
from hotset.fleet.ray import sockets as sockets_module
from hotset.fleet.ray.sockets import ControllerEndpoint, ControllerSockets, CurveKeys, RemoteWorker, WorkerSockets

WAIT_S = 60.0
REFUSED = 7  # exit code of a process that the controller does not accept
Connect = Callable[[int, CurveKeys], WorkerSockets]


@pytest.fixture
def controller() -> Iterator[ControllerSockets]:
    sockets = ControllerSockets("127.0.0.1")
    yield sockets
    sockets.close()


@pytest.fixture
def connect(controller: ControllerSockets) -> Iterator[Connect]:
    """Returns a function that connects a worker of this process. A real worker ends with its process."""
    opened: list[WorkerSockets] = []

    def connect(number: int, keys: CurveKeys) -> WorkerSockets:
        opened.append(WorkerSockets(controller.endpoint, number, keys))
        return opened[-1]

    yield connect
    for sockets in opened:
        discard(sockets)


def discard(sockets: WorkerSockets) -> None:
    """Closes the sockets of a worker of this process, and all that the end of a process would close."""
    sockets.close(0)
    sockets._commands.disable_monitor()
    sockets._command_context.destroy(linger=0)


def remote_worker(controller: ControllerSockets, number: int, keys: CurveKeys) -> RemoteWorker:
    progress = Progress(multiprocessing.get_context("spawn"))
    worker = RemoteWorker(0, progress, lambda command: controller.send(number, command), kill=lambda: None)
    controller.allow(number, keys.public, worker)
    return worker


def connected(controller: ControllerSockets, connect: Connect, number: int) -> tuple[RemoteWorker, WorkerSockets]:
    keys = CurveKeys.create()
    worker = remote_worker(controller, number, keys)
    sockets = connect(number, keys)
    assert controller.wait_connected(number, WAIT_S)
    return worker, sockets


def test_commands_and_reports_arrive_in_order_at_the_right_worker(
    controller: ControllerSockets, connect: Connect
) -> None:
    pairs = [connected(controller, connect, number) for number in range(3)]
    for index in range(50):
        for number, (worker, _) in enumerate(pairs):
            worker.send(RunAudit({number: index}))
    for number, (worker, sockets) in enumerate(pairs):
        for index in range(50):
            assert sockets.recv() == RunAudit({number: index})
            sockets.send(AuditReport(f"{number} {index}" * (1 + 10_000 * (index == 7))))  # one is larger than a pipe
            assert worker.poll(WAIT_S)
            assert worker.recv() == AuditReport(f"{number} {index}" * (1 + 10_000 * (index == 7)))


def test_signs_of_life_arrive_while_the_controller_reads_no_reports(
    controller: ControllerSockets, connect: Connect
) -> None:
    worker, sockets = connected(controller, connect, 0)
    progress = Progress(multiprocessing.get_context("spawn"), on_beat=sockets.beat)
    progress.advance()
    progress.record_step(7)
    with progress.beating():
        assert wait_until(lambda: worker.progress.beats >= 2)
    assert (worker.progress.advances, worker.progress.steps) == (1, 7)


def test_a_worker_that_ends_has_delivered_its_last_report_and_its_exit_code(
    controller: ControllerSockets, connect: Connect
) -> None:
    (worker, sockets), (other, _) = (connected(controller, connect, number) for number in range(2))
    sockets.send(AuditReport("the last one"))
    sockets.close(1)
    assert wait([worker.sentinel], WAIT_S) and worker.exitcode == 1
    assert worker.recv() == AuditReport("the last one")
    with pytest.raises(EOFError):
        worker.recv()
    assert not wait([other.sentinel], 0), "another worker counts as dead"
    assert other.exitcode is None


def run_until_killed(endpoint: ControllerEndpoint, keys: CurveKeys) -> None:
    WorkerSockets(endpoint, 0, keys).recv()


def test_a_worker_that_is_killed_has_ended_without_an_exit_code(controller: ControllerSockets) -> None:
    keys = CurveKeys.create()
    worker = remote_worker(controller, 0, keys)
    process = fork_server().Process(target=run_until_killed, args=(controller.endpoint, keys))
    process.start()
    assert controller.wait_connected(0, WAIT_S)
    process.kill()
    assert wait([worker.sentinel], WAIT_S) and worker.exitcode is None
    process.join(WAIT_S)

    def cannot_send() -> bool:
        try:
            worker.send(AbortSteps())
        except OSError:
            return True
        return False

    assert wait_until(cannot_send)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sockets of this process treat a peer as dead after 2 s of silence."""
    monkeypatch.setattr(sockets_module, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(sockets_module, "SILENT_MS", 2000)


def block_python_and_report(endpoint: ControllerEndpoint, keys: CurveKeys) -> None:
    """Holds Python's lock for longer than the controller waits for heartbeats, as some long calls do."""
    sockets = WorkerSockets(endpoint, 0, keys)
    sockets.recv()
    ctypes.PyDLL(None).sleep(3)
    sockets.send(AuditReport("awake"))
    sockets.recv()


def test_a_stopped_worker_has_ended_but_a_busy_one_has_not(impatient: None, controller: ControllerSockets) -> None:
    keys = CurveKeys.create()
    worker = remote_worker(controller, 0, keys)
    arguments = (controller.endpoint, keys)
    process = fork_server().Process(target=block_python_and_report, args=arguments)
    process.start()
    try:
        assert controller.wait_connected(0, WAIT_S)
        worker.send(AbortSteps())
        assert worker.poll(WAIT_S) and worker.recv() == AuditReport("awake")
        assert process.pid is not None
        pause(process.pid)
        assert wait([worker.sentinel], WAIT_S) and worker.exitcode is None
    finally:
        process.kill()
        process.join(WAIT_S)


def run_controller(pipe: Connection, key: bytes) -> None:
    controller = ControllerSockets("127.0.0.1")
    worker = RemoteWorker(0, Progress(multiprocessing.get_context("spawn")), lambda command: None, kill=lambda: None)
    controller.allow(0, key, worker)
    pipe.send(controller.endpoint)
    pipe.send(controller.wait_connected(0, WAIT_S))
    pipe.recv()


def test_a_worker_notices_that_its_controller_is_stopped(impatient: None) -> None:
    keys, (ours, theirs) = CurveKeys.create(), multiprocessing.Pipe()
    process = fork_server().Process(target=run_controller, args=(theirs, keys.public))
    process.start()
    sockets = WorkerSockets(ours.recv(), 0, keys)
    assert ours.recv(), "the worker has not connected"
    assert process.pid is not None
    pause(process.pid)
    with pytest.raises(EOFError):
        sockets.recv()
    process.kill()
    process.join(WAIT_S)
    discard(sockets)


def test_a_worker_notices_the_end_of_its_controller_and_obeys_what_came_before(
    controller: ControllerSockets, connect: Connect
) -> None:
    worker, sockets = connected(controller, connect, 0)
    worker.send(StopWorker())
    assert sockets.recv() == StopWorker()
    controller.close()
    with pytest.raises(EOFError):
        sockets.recv()

    def cannot_send() -> bool:
        try:
            sockets.send(AuditReport(None))
        except BrokenPipeError:
            return True
        return False

    assert wait_until(cannot_send)
    sockets.beat([1])  # does not block


class PollerAfterEnd(zmq.Poller):
    """Registers the monitor of a connection only after the connection has ended."""

    def register(self, socket: Any, flags: int = zmq.POLLIN) -> None:
        assert socket.type != zmq.PAIR or socket.poll(int(1000 * WAIT_S))
        super().register(socket, flags)


def exit_when_refused(attempts: list[tuple[ControllerEndpoint, CurveKeys]]) -> None:
    sockets_module.zmq.Poller = PollerAfterEnd  # a refusal may come before the first message
    strangers = [WorkerSockets(endpoint, 0, keys) for endpoint, keys in attempts]
    for stranger in strangers:
        with contextlib.suppress(EOFError):
            stranger.recv()
            return
    os._exit(REFUSED)


def test_a_stranger_cannot_connect(controller: ControllerSockets, connect: Connect) -> None:
    """A process is refused if the controller does not know its key, if it has no key, or if it has a wrong key of the
    controller. It notices that its connection has ended, and so does a process whose controller ended before."""
    keys, stranger = CurveKeys.create(), CurveKeys.create()
    worker = remote_worker(controller, 0, keys)
    ended = ControllerSockets("127.0.0.1")
    ended.close()
    attempts = [
        (controller.endpoint, stranger),
        (replace(controller.endpoint, key=stranger.public), keys),
        (ended.endpoint, keys),
    ]
    process = fork_server().Process(target=exit_when_refused, args=(attempts,))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == REFUSED
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.linger = 0
        plain.connect(controller.endpoint.reports)
        plain.send(b"\0" * 100)
        assert not worker.connected.wait(0.5)
    assert not worker.poll()
    connect(0, keys)
    assert controller.wait_connected(0, WAIT_S)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(StartupError, match=r"cannot listen at 192\.0\.2\.77 for workers"):
        ControllerSockets("192.0.2.77")
