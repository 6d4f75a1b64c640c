"""Follows answers through their structures in other processes, so that no structure delays a step.

Each structure has a process of its own, forked from a server that has the tables of the vocabulary. If a process
exceeds its limits or dies, its answers are opened again in a new process. An answer whose command ends two processes
fails.
"""

import contextlib
import logging
import mmap
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotset.base.errors import CheckpointError, EngineStopped, RequestError
from hotset.base.fork_server import NICENESS, ForkServer, JobFailed, Worker
from hotset.base.structure import Structure
from hotset.base.units import MIB
from hotset.grammar.jobs import MASK_SECONDS, MAX_ROWS, PreparedCompiler, structure_json
from hotset.grammar.matcher import Bits

LOGGER = logging.getLogger("hotset.grammar")
COMPILE_SECONDS = 4.0  # of CPU time; twice what a trial may take
COMMAND_SECONDS = 4 * MASK_SECONDS  # of CPU time for each command, and again for every TOKENS_PER_COMMAND tokens
TOKENS_PER_COMMAND = 1024
WAIT_FACTOR = 5  # time limit of a command, as a multiple of its CPU time; then the process is replaced
MAX_COMPILING = 2  # processes at the same time
IDLE_SECONDS = 30.0  # a process without a command for this time ends; the next command starts it again
MAX_IDLE = 16  # processes that are kept without an open answer, for later answers with the same structure
ANSWER_BYTES = 512 * MIB  # memory of a process besides the tables


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of an answer's next token, and of the token after each draft that fits. If masks are missing and
    `failure` is not empty, the answer cannot be continued after the tokens that have masks."""

    bits: Bits
    failure: str = ""


@dataclass(slots=True)
class _Command:
    answer: "FollowedAnswer"
    tokens: Sequence[int]
    drafts: Sequence[int]
    length: int  # of the answer after these tokens
    result: "Future[Masks]" = field(default_factory=Future)
    ended_processes: int = 0  # while they executed it


class StructureProcesses:
    """The processes that follow answers. Threads wait for them, and one thread opens and advances answers."""

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab: int) -> None:
        """Takes the arguments of `PreparedCompiler`."""
        self._server, self._vocab = ForkServer(), vocab
        self._compiler = PreparedCompiler(self._server, tokenizer_json, vocab)
        self.compiling = threading.Semaphore(MAX_COMPILING)
        self._processes: OrderedDict[Structure, _Process] = OrderedDict()  # least recently used first

    @property
    def words(self) -> int:
        """The number of 32-bit words of a mask."""
        return (self._vocab + 31) // 32

    def warm_up(self) -> None:
        """Builds the tables in the background, if the model has a tokenizer."""
        threading.Thread(target=self._warm_up, name="hotset-grammar", daemon=True).start()

    def follow(self, structure: Structure, stop_ids: frozenset[int], answer: Sequence[int]) -> "FollowedAnswer":
        """Begins to follow an answer that already has the tokens `answer`."""
        process = self._processes.get(structure)
        if process is None:
            process = self._processes[structure] = _Process(self, structure)
            self._end_idle()
        self._processes.move_to_end(structure)
        return FollowedAnswer(process, stop_ids, answer)

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        self._server.close()
        for process in self._processes.values():
            process.stop()
        self._processes.clear()

    def fork(self, fd: int) -> Worker:
        """Starts a process. Raises JobFailed, RequestError without a tokenizer, and EngineStopped after `close`."""
        self._compiler.prepare()
        return self._server.fork(ANSWER_BYTES, NICENESS, (fd,))

    def _warm_up(self) -> None:
        with contextlib.suppress(RequestError, CheckpointError, JobFailed, EngineStopped):
            self._compiler.prepare()

    def _end_idle(self) -> None:
        idle = [structure for structure, process in self._processes.items() if process.is_idle]
        for structure in idle[: max(0, len(idle) - MAX_IDLE)]:
            self._processes.pop(structure).stop()


class FollowedAnswer:
    """One answer and its structure. Only one thread uses it."""

    def __init__(self, process: "_Process", stop_ids: frozenset[int], tokens: Sequence[int]) -> None:
        self._process, self.stop_ids = process, stop_ids
        self.number = process.add()
        self.tokens = list(tokens)  # including those of commands that wait
        self.opened_in: Worker | None = None  # set by the thread of the process
        self._newest: _Command | None = None

    def request(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Advances the answer by its newest `tokens`, and asks for the masks of the next token and of those after
        `drafts`. Does not wait."""
        self.tokens += tokens
        self._newest = _Command(self, tokens, drafts, len(self.tokens))
        self._process.put(self._newest)

    def masks(self, timeout: float) -> Masks | None:
        """Returns the masks that were asked for last, or None if they are not there within `timeout` seconds."""
        assert self._newest is not None, "no masks were asked for"
        try:
            return self._newest.result.result(max(0.0, timeout))
        except TimeoutError:
            return None

    def close(self) -> None:
        """Makes the process drop the state of the answer."""
        self._process.remove(self)


class _Process:
    """The process of one structure, which is started again when it has ended, and the thread that waits for it."""

    def __init__(self, owner: StructureProcesses, structure: Structure) -> None:
        self._owner, self._structure = owner, structure
        self._commands: queue.SimpleQueue[_Command | int | None] = queue.SimpleQueue()
        self._num_answers = 0
        self._num_open = 0
        self._worker: Worker | None = None
        self._compiled_in: Worker | None = None
        self._fd = os.memfd_create("hotset-masks")
        os.ftruncate(self._fd, MAX_ROWS * owner.words * 4)
        memory = mmap.mmap(self._fd, 0)
        self._shared: Bits = np.frombuffer(memory, np.int32).reshape(MAX_ROWS, -1)
        threading.Thread(target=self._serve, name="hotset-structure", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._num_open == 0

    def add(self) -> int:
        """Counts an answer. Returns its number."""
        self._num_open += 1
        self._num_answers += 1
        return self._num_answers

    def remove(self, answer: FollowedAnswer) -> None:
        self._num_open -= 1
        self._commands.put(answer.number)

    def put(self, command: _Command) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the process and the thread after all waiting commands."""
        self._commands.put(None)

    def _serve(self) -> None:
        ending = False
        while not ending:
            closed: list[int] = []
            batch: list[_Command] = []
            rows = 0
            try:
                command = self._commands.get(timeout=None if self._worker is None else IDLE_SECONDS)
            except queue.Empty:
                self._end_worker()
                continue
            while True:
                if command is None:
                    ending = True
                elif isinstance(command, int):
                    closed.append(command)
                else:
                    batch.append(command)
                    rows += 1 + len(command.drafts)
                if ending or rows > MAX_ROWS // 2:
                    break
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    break
            self._execute(batch, closed)
        self._end_worker()
        os.close(self._fd)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _execute(self, batch: Sequence[_Command], closed: Sequence[int] = ()) -> None:
        """Executes commands, together or, if the process ends, each of them alone."""
        try:
            if batch or (closed and self._worker is not None and self._worker.alive):
                self._exchange(batch, closed)
        except JobFailed as failure:
            LOGGER.info("the process of a %s %s", self._structure.name, failure)
            self._worker = None
            for command in batch:
                command.ended_processes += 1
                if command.ended_processes > 1:
                    reason = f"the structure is too complex: the process that follows the answer {failure}"
                    command.result.set_result(Masks(self._shared[:0].copy(), reason))
                else:
                    self._execute([command])
        except (RequestError, CheckpointError, EngineStopped, OSError) as error:  # OSError: too many open files
            for command in batch:
                command.result.set_result(Masks(self._shared[:0].copy(), str(error)))

    def _exchange(self, batch: Sequence[_Command], closed: Sequence[int]) -> None:
        if self._worker is None or not self._worker.alive:
            self._end_worker()  # a dead worker is still to be reaped by its server
            self._worker = self._owner.fork(self._fd)
        worker, commands = self._worker, []
        for command in batch:
            answer = command.answer
            message: dict[str, Any] = {"answer": answer.number, "drafts": list(command.drafts)}
            if answer.opened_in is worker:
                message["tokens"] = list(command.tokens)
            else:
                message |= {"tokens": answer.tokens[: command.length], "stop_ids": sorted(answer.stop_ids)}
            commands.append(message)
        commands += [{"answer": number, "drafts": [], "closed": True} for number in closed]
        num_tokens = sum(len(command.get("tokens", ())) for command in commands)
        seconds = COMPILE_SECONDS + COMMAND_SECONDS * (len(commands) + num_tokens / TOKENS_PER_COMMAND)
        arguments = {"structure": structure_json(self._structure), "commands": commands}
        with contextlib.nullcontext() if self._compiled_in is worker else self._owner.compiling:
            replies = worker.run("hotset.grammar.jobs:follow", arguments, seconds, WAIT_FACTOR * seconds)
        self._compiled_in = worker
        row = 0
        for command, reply in zip(batch, replies, strict=False):
            command.answer.opened_in = worker if not reply.get("failure") else None
            bits = self._shared[row : row + reply["masks"]].copy()
            command.result.set_result(Masks(bits, reply.get("failure", "")))
            row += 1 + len(command.drafts)
