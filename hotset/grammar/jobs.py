"""Jobs of worker processes: they compile the structures that clients send, and follow answers through them.

Structures are compiled and executed only in workers, which have limits (`base/fork_server.py`).
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hotset.base.fork_server import ForkServer, Prepared
from hotset.base.job_pool import JobPool
from hotset.base.structure import Structure, needs_tokenizer
from hotset.base.units import MIB
from hotset.grammar.compiler import CompiledGrammar, GrammarCompiler
from hotset.grammar.matcher import Bits, Matcher, StructureFailed

TABLE_SECONDS = 60.0  # of CPU time, to build the tables of a vocabulary
TABLE_BYTES = 4096 * MIB  # address space of the process that builds them
MASK_SECONDS = 0.25  # of CPU time, for one mask; usual ones take less than a millisecond
EXPENSIVE_SECONDS = 0.05  # after a mask that takes longer, the process has the lowest priority
LOWEST_PRIORITY = 19
MAX_ROWS = 1024  # of masks in the memory that a worker shares with the engine

Json = dict[str, Any]


class PreparedCompiler:
    """The compiler of a vocabulary in a server, whose workers share its tables. Thread-safe."""

    def __init__(self, server: ForkServer | JobPool, tokenizer_json: Callable[[], str | None], vocab: int) -> None:
        """`tokenizer_json` returns a tokenizer in the format of tokenizer.json, or None if the model has none. `vocab`
        is the number of logits."""
        self._server, self._tokenizer_json, self._vocab = server, tokenizer_json, vocab
        self._lock = threading.Lock()
        self._is_prepared = False

    def prepare(self) -> None:
        """Makes the compiler available to workers that are forked from now on. Does nothing the second time. Raises
        RequestError if there is no tokenizer."""
        with self._lock:
            if self._is_prepared:
                return
            if (tokenizer_json := self._tokenizer_json()) is None:
                raise needs_tokenizer()
            self._server.prepare(
                "compiler",
                "hotset.grammar.jobs:GrammarCompiler",  # the server imports this module, which its workers need
                {"tokenizer_json": tokenizer_json, "vocab": self._vocab},
                cpu_seconds=TABLE_SECONDS,
                memory_bytes=TABLE_BYTES,
            )
            self._is_prepared = True


def structure_json(structure: Structure) -> Json:
    return asdict(structure)


def check(prepared: Prepared, structure: Json) -> None:
    """Compiles a structure as a trial. Raises RequestError if that is not possible."""
    prepared["compiler"].compile(Structure(**structure))


def follow(prepared: Prepared, structure: Json, commands: Sequence[Json]) -> list[Json]:
    """Executes commands for answers (see `OpenAnswers`). All jobs of a worker have the same structure."""
    answers = prepared.get("answers")
    if answers is None:
        answers = prepared["answers"] = OpenAnswers(prepared["compiler"], Structure(**structure), prepared["fds"][0])
    first_row, replies = 0, []
    for command in commands:
        replies.append(answers.execute(command, first_row))
        first_row += 1 + len(command["drafts"])
    return replies


class OpenAnswers:
    """The answers that a worker follows, all with the same structure. Masks are written to shared memory."""

    def __init__(self, compiler: GrammarCompiler, structure: Structure, masks_fd: int) -> None:
        self._compiler, self._structure = compiler, structure
        self._compiled: CompiledGrammar | None = None
        self._matchers: dict[int, Matcher] = {}
        memory = mmap.mmap(masks_fd, os.fstat(masks_fd).st_size)
        self._shared: Bits = np.frombuffer(memory, np.int32).reshape(MAX_ROWS, -1)
        self._is_expensive = False

    def execute(self, command: Mapping[str, Any], first_row: int) -> Json:
        """Advances an answer by its newest tokens. From row `first_row` on, writes the masks of its next token and of
        the token after each of `drafts`. The drafts do not advance the answer.

        No mask is written after a draft that does not fit, because this draft and all later ones are rejected. Returns
        the number of masks and, if the answer cannot be continued after the tokens that have masks, the reason.
        """
        number = command["answer"]
        if command.get("closed"):
            self._matchers.pop(number, None)
            return {"masks": 0}
        masks = 0
        try:
            if "stop_ids" in command:  # the answer is new to this process
                self._compiled = self._compiled or self._compiler.compile(self._structure)
                self._matchers[number] = self._compiled.matcher(frozenset(command["stop_ids"]))
            matcher = self._matchers[number]
            for token in command["tokens"]:
                matcher.accept(token)
            drafts, bits = command["drafts"], matcher.masks.empty(1)
            while True:
                self._fill(matcher, bits)
                self._shared[first_row + masks] = bits[0, : self._shared.shape[1]]
                masks += 1
                if masks > len(drafts) or not matcher.masks.allows(bits[0], drafts[masks - 1]):
                    break
                matcher.accept(drafts[masks - 1])
            matcher.rollback(masks - 1)
        except StructureFailed as error:
            self._compiled = None  # its lexer may have reached a limit
            if 0 < masks <= len(command["drafts"]):
                # The token after the drafts has no mask, which matters only if the drafts are right.
                self._take_back(number, masks)
            return {"masks": masks, "failure": str(error)}
        return {"masks": masks}

    def _take_back(self, number: int, drafts: int) -> None:
        """Drops drafts of an answer. If that is not possible, a later command must open the answer again."""
        try:
            self._matchers[number].rollback(drafts)
        except StructureFailed:
            self._matchers.pop(number)

    def _fill(self, matcher: Matcher, bits: Bits) -> None:
        """Computes a mask. Raises StructureFailed if that takes too long."""
        began = time.process_time()
        matcher.fill(bits, 0)
        seconds = time.process_time() - began
        if seconds > MASK_SECONDS:
            raise StructureFailed(
                f"the structure is too complex: computing which tokens may come next took {seconds:.2f} s of CPU time, "
                f"and the limit is {MASK_SECONDS:g} s"
            )
        if seconds > EXPENSIVE_SECONDS and not self._is_expensive:
            self._is_expensive = True
            os.nice(LOWEST_PRIORITY)  # added to the current niceness; Linux stops at the lowest priority
