"""Remote endpoints for tests of transfer engines: in a separate process, or for loopback in this process."""

import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
from loopback import Hub, Loopback
from processes import fork_server, pause

from hotset.fleet.transfer.api import Region, Transfer, WriteState, WriteTicket
from hotset.fleet.transfer.engines import TransferSettings

NBYTES = 4 << 20
POISON = 0xAB
POISON_COMMAND = slice(0, 0)  # an empty span, after which the far process fills its memory with POISON
ANSWER_S = 120.0  # how long to wait for the far process; only an overloaded machine needs that long


def wait_for_end(transfer: Transfer, ticket: WriteTicket, seconds: float = 60.0) -> WriteState:
    """Returns the final state of a list, or PENDING if it has not ended after `seconds`."""
    until = time.monotonic() + seconds
    while (state := transfer.poll(ticket)) is WriteState.PENDING and time.monotonic() < until:
        time.sleep(0.0001)
    return state


def serve(engine: str, pipe: Connection) -> None:
    """Runs in the far process. Sends the requested spans of its memory until it receives None or the pipe is closed."""
    memory = np.full(NBYTES, POISON, np.uint8)
    transfer = TransferSettings(engine).open()
    transfer.register(Region(memory.ctypes.data, NBYTES))
    pipe.send((transfer.describe(), memory.ctypes.data))
    try:
        while (span := pipe.recv()) is not None:
            pipe.send_bytes(memory[span].tobytes())
            if span == POISON_COMMAND:
                memory[:] = POISON
    except EOFError:
        pass
    transfer.close()


class FarProcess:
    """A separate process with an open endpoint. `description` and `address` are those of its registered memory."""

    def __init__(self, engine: str) -> None:
        context = fork_server()
        self._pipe, remote_pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(engine, remote_pipe), daemon=True)
        self._process.start()
        remote_pipe.close()
        assert self._pipe.poll(ANSWER_S), f"the far process did not start within {ANSWER_S} s"
        self.description, self.address = self._pipe.recv()

    def read(self, first: int = 0, last: int = NBYTES) -> np.ndarray:
        """Returns bytes [first, last) of the far process's memory, as they are when that process handles the call."""
        self._pipe.send(slice(first, last))
        assert self._pipe.poll(ANSWER_S), f"the far process did not answer within {ANSWER_S} s"
        return np.frombuffer(self._pipe.recv_bytes(), np.uint8)

    def poison(self) -> None:
        self.read(POISON_COMMAND.start, POISON_COMMAND.stop)
        self.read(0, 1)  # the answer proves that the memory is filled

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
        assert self._process.exitcode in (0, -signal.SIGKILL), (
            f"the far process ended with exit code {self._process.exitcode}"
        )
        self._pipe.close()


class FarLoopback:
    """A loopback endpoint in this process, with the interface of `FarProcess`, except for `pause` and `resume`."""

    def __init__(self, hub: Hub) -> None:
        self._memory = np.full(NBYTES, POISON, np.uint8)
        self._transfer = Loopback(hub)
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
