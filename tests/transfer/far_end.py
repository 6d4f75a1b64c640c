"""The other end of a transfer: another process with its own memory, or a stand-in in this process for loopback."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from processes import pause

from hotset.transfer.api import Region
from hotset.transfer.engines import open_transfer
from hotset.transfer.loopback import Hub

NBYTES = 8 << 20
POISON = 0xAB
POISONED = slice(0, 0)  # a command to poison, sent in place of a span to read
ANSWER_S = 30.0


def serve(engine: str, pipe: Connection) -> None:
    """Answers reads of its memory until it receives the command to end, or the pipe closes."""
    memory = np.full(NBYTES, POISON, np.uint8)
    transfer = open_transfer(engine)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    pipe.send((transfer.describe(), memory.ctypes.data))
    try:
        while (span := pipe.recv()) is not None:
            pipe.send_bytes(memory[span].tobytes())
            if span == POISONED:
                memory[:] = POISON
    except EOFError:
        pass
    transfer.close()


class FarProcess:
    """A real process, with the `description` and `address` of its memory."""

    def __init__(self, engine: str) -> None:
        # Real processes, forked from one that has done the slow imports and has not loaded an engine.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "nixl"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(engine, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(ANSWER_S), "the far end does not start"
        self.description, self.address = self._pipe.recv()

    def read(self, first: int = 0, last: int = NBYTES) -> np.ndarray:
        """Returns bytes [first, last) of its memory at the time when the process handles this."""
        self._pipe.send(slice(first, last))
        assert self._pipe.poll(ANSWER_S), "the far end does not answer"
        return np.frombuffer(self._pipe.recv_bytes(), np.uint8)

    def poison(self) -> None:
        self.read(0, 0)
        self.read(0, 1)  # the answer proves that the poisoning is done

    def pause(self) -> None:
        pause(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(ANSWER_S)
        assert self._process.exitcode in (0, -signal.SIGKILL), f"the far end ended with {self._process.exitcode}"
        self._pipe.close()


class FarStandIn:
    """The same interface for loopback."""

    def __init__(self, hub: Hub) -> None:
        self._memory = np.full(NBYTES, POISON, np.uint8)
        self._transfer = open_transfer("loopback", hub=hub)
        self._transfer.register(Region(self._memory.ctypes.data, NBYTES))
        self.description, self.address = self._transfer.describe(), self._memory.ctypes.data

    def read(self, first: int = 0, last: int = NBYTES) -> np.ndarray:
        return self._memory[first:last].copy()

    def poison(self) -> None:
        self._memory[:] = POISON

    def kill(self) -> None:
        self._transfer.close()

    def close(self) -> None:
        self._transfer.close()
