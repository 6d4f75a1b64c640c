"""Checks structures before their requests are admitted: each is compiled as a trial, in a process with limits."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from hotset.base.fork_server import JobFailed
from hotset.base.job_pool import JobPool
from hotset.base.structure import Structure, invalid_structure
from hotset.grammar.jobs import PreparedCompiler, structure_json

CHECK_SECONDS = 2.0  # of CPU time
MAX_PASSED = 1024  # structures that have passed, and are not compiled again


class StructureChecks:
    """Checks structures for one vocabulary. Thread-safe; the first check builds the tables of the vocabulary."""

    def __init__(self, jobs: JobPool, tokenizer_json: Callable[[], str | None], vocab: int) -> None:
        self._jobs, self._compiler = jobs, PreparedCompiler(jobs, tokenizer_json, vocab)
        self._lock = threading.Lock()  # held only for moments: the event loop takes it
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def has_passed(self, structure: Structure) -> bool:
        """Returns whether `check` would return at once."""
        key = _key(structure)
        with self._lock:
            if key not in self._passed:
                return False
            self._passed.move_to_end(key)
            return True

    def check(self, structure: Structure) -> None:
        """Raises RequestError if a structure cannot be compiled, takes too long or too much memory, or allows no
        answer."""
        if self.has_passed(structure):
            return
        try:
            self._compiler.prepare()
            self._jobs.run("hotset.grammar.jobs:check", {"structure": structure_json(structure)}, CHECK_SECONDS)
        except JobFailed as failure:
            raise invalid_structure(f"compiling the {structure.name} {failure}; simplify it") from None
        with self._lock:
            self._passed[_key(structure)] = None
            if len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)


def _key(structure: Structure) -> bytes:
    return hashlib.sha256(repr(structure).encode()).digest()
