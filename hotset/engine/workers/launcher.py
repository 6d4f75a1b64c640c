"""The interface that starts the worker processes of an engine, and its implementation with child processes."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from hotset.base.address import Address
from hotset.engine.ports import Messages
from hotset.engine.progress import Progress
from hotset.engine.workers.group import StartProcess
from hotset.engine.workers.handle import WorkerPipe, WorkerProcess
from hotset.engine.workers.messages import ConnectionAddress, WorkerRank
from hotset.engine.workers.placement import WorkerDevice
from hotset.engine.workers.worker import main
from hotset.models.split import Split

T = TypeVar("T")


class Launcher(Protocol):
    """Decides where workers run, and starts them."""

    def place(self, splits: Sequence[Split]) -> list[WorkerRank]:
        """Returns the rank of each worker, in the order of their numbers. Workers of one node are neighbours.

        Raises StartupError if the workers do not fit. Called once, before `start`.
        """

    def start(self, rank: WorkerRank, progress: Progress) -> tuple[WorkerPipe, WorkerProcess]:
        """Starts a worker process, which counts its signs of life in `progress`, and returns the connection to it."""

    def connect(self, rank: WorkerRank, request: Callable[[Connection | ConnectionAddress], T]) -> tuple[Messages, T]:
        """Makes a further connection to a worker. `request` passes the worker its end and waits for the answer.

        Returns this process's end, and the answer. Raises StartupError if the worker does not connect.
        """

    @property
    def addresses(self) -> Sequence[Address]:
        """The addresses on which this process listens for its workers."""

    def problem(self) -> str | None:
        """Returns why the engine must end although its workers live, or None. Called repeatedly."""

    def close(self) -> None:
        """Releases everything after all workers have ended. Idempotent."""


def worker_rank(number: int, splits: Sequence[Split], rendezvous: str, device: WorkerDevice) -> WorkerRank:
    """Returns the rank of a worker on this machine."""
    split = splits[number]
    return WorkerRank(
        number=number,
        workers=len(splits),
        stage=number // split.size,
        stages=len(splits) // split.size,
        split=split,
        rendezvous=rendezvous,
        device=device.name,
        ranks_on_gpu=device.ranks_on_gpu,
    )


def start_process(rank: WorkerRank, progress: Progress) -> tuple[WorkerPipe, WorkerProcess]:
    """Starts a child process that runs a worker, and returns the pipe to it."""
    context = multiprocessing.get_context("spawn")
    pipe, worker_end = context.Pipe()
    process = context.Process(target=main, args=(worker_end, progress), name=f"hotset-worker-{rank.number}")
    process.start()
    worker_end.close()
    return pipe, process


class LocalLauncher:
    """Implements `Launcher` with child processes on this machine, which find each other through a file."""

    addresses: Sequence[Address] = ()  # the controller has a pipe to each worker

    def __init__(self, devices: Sequence[WorkerDevice], start: StartProcess = start_process) -> None:
        self._devices = devices
        self.start = start
        # Like the shared memory, this file has no name in the file system and ends with the last process that uses it.
        self._rendezvous = os.fdopen(os.memfd_create("hotset-rendezvous"), "wb")

    def place(self, splits: Sequence[Split]) -> list[WorkerRank]:
        path = f"/proc/{os.getpid()}/fd/{self._rendezvous.fileno()}"
        return [worker_rank(number, splits, path, device) for number, device in enumerate(self._devices)]

    def connect(self, rank: WorkerRank, request: Callable[[Connection | ConnectionAddress], T]) -> tuple[Messages, T]:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            return ours, request(theirs)

    def problem(self) -> None:
        """Returns None, because child processes depend on nothing else."""

    def close(self) -> None:
        self._rendezvous.close()
