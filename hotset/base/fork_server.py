"""A fork server imports and builds once what its workers need, and then forks a worker in milliseconds.

Clients send texts that act like programs: templates, grammars, JSON schemas. None of them may stop this process or fill
its memory, so they run as jobs in workers. A worker has limits on CPU time, waiting time and memory, and is killed when
it exceeds one. The server prepares what is slow to build (a compiled template, the tables of a vocabulary), and its
workers share this memory. It imports neither torch nor the engine, and its environment contains only ENVIRONMENT,
and so no secrets. If this process dies, the fork server reads the end of its input and exits, and Linux kills its
workers.

A job is a function, named "module:function", of the prepared objects and of arguments that are JSON values. Both sides
send messages of four bytes with their length, followed by JSON.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotset.base.errors import EngineStopped, HotsetError, RequestError
from hotset.base.parent_death import kill_if_parent_dies
from hotset.base.units import MIB, show_bytes

START_SECONDS = 60.0  # time limit for starting the server, and for forking a worker
END_SECONDS = 5.0  # time limit for the server to end a worker
WAIT_FACTOR = 30  # time limit of a job, as a multiple of its CPU time: on a busy machine, it gets little of a core
SERVER_BYTES = 4096 * MIB  # limit of the address space between jobs and preparations, which have limits of their own
MAX_MESSAGE_BYTES = 512 * MIB
MAX_REASON_CHARACTERS = 1000
NICENESS = 10  # of workers: steps of the engine come first
ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")
# Libraries must not start threads in the server: a fork copies only the thread that calls it.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
ONE_THREAD |= {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}

Prepared = dict[str, Any]


class JobFailed(Exception):
    """A job exceeded a limit, or its process died. The message continues a sentence whose subject is the job."""


class ForkServer:
    """Owns one server process, which starts when it is first needed and is replaced when it has died. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._preparations: dict[str, dict[str, Any]] = {}
        self.closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None while none runs."""
        return None if self._process is None else self._process.pid

    def prepare(
        self, name: str, function: str, arguments: Mapping[str, Any], *, cpu_seconds: float, memory_bytes: int
    ) -> None:
        """Makes `function(**arguments)` available to the jobs of workers that are forked from now on.

        Raises RequestError if the function does, and JobFailed if it exceeds its limits.
        """
        request = {
            "prepare": name,
            "function": function,
            "arguments": dict(arguments),
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        with self._lock:
            self._ensure_running()
            self._exchange(request, START_SECONDS + WAIT_FACTOR * cpu_seconds)
            self._preparations[name] = request

    def fork(self, memory_bytes: int, niceness: int = NICENESS, fds: Sequence[int] = ()) -> "Worker":
        """Starts a worker, whose address space may grow by `memory_bytes`. It inherits `fds`, which its jobs find among
        the prepared objects as "fds". Raises JobFailed if that is not possible, and EngineStopped after `close`."""
        ours, theirs = socket.socketpair()
        try:
            with self._lock:
                self._ensure_running()
                request = {"fork": memory_bytes, "niceness": niceness}
                pid = int(self._exchange(request, START_SECONDS, (theirs.fileno(), *fds)))
                process = self._process
                assert process is not None, "the server has answered"
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Worker(self, process, pid, ours)

    def end(self, process: "subprocess.Popen[bytes]", pid: int) -> int | None:
        """Kills a worker that the server process `process` has forked. Returns the worker's exit code, negative for a
        signal, or None if it is unknown.

        If `process` has been replaced, nothing is killed: its workers ended with it, and other processes may have
        their ids.
        """
        with self._lock, contextlib.suppress(JobFailed):
            if process is self._process:
                return int(self._exchange({"end": pid}, END_SECONDS))
        return None

    def close(self) -> None:
        """Kills the server and its workers. A job in progress fails. Idempotent."""
        self.closed = True
        process = self._process
        if process is not None:
            process.kill()  # before the lock is taken: its owner may be waiting for the server
        with self._lock:
            self._drop()

    def check_open(self) -> None:
        """Raises EngineStopped after `close`."""
        if self.closed:
            raise EngineStopped("this model was closed, which ended the processes of its templates and structures")

    def _ensure_running(self) -> None:
        """Starts the server if it does not run."""
        self.check_open()
        if self._process is not None and self._process.poll() is None:
            return
        self._drop()
        ours, theirs = socket.socketpair()
        start = f"from hotset.base.fork_server import main; main({theirs.fileno()})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            ours.close()
            raise JobFailed(f"cannot be run in a process: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        self._finalizer = weakref.finalize(self, _kill, self._process, ours)  # also when the interpreter exits
        for request in self._preparations.values():
            self._exchange(request, START_SECONDS + WAIT_FACTOR * request["cpu_seconds"])
        if self.closed:  # by another thread meanwhile
            self._drop()
            self.check_open()

    def _exchange(self, request: Mapping[str, Any], seconds: float, fds: Sequence[int] = ()) -> Any:
        process, control = self._process, self._control
        assert process is not None and control is not None, "the server runs"
        deadline = time.monotonic() + seconds
        try:
            _send(control, request, deadline, fds)
            answer = _receive(control, deadline)
        except TimeoutError:
            self._drop()
            raise JobFailed(f"did not answer within {seconds:g} s") from None
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self._drop()
            raise JobFailed(_describe_end(process.returncode, request.get("cpu_seconds", 0.0)))
        return _value_of(answer)

    def _drop(self) -> None:
        if self._process is not None:
            self._finalizer()
        self._process = self._control = None


class Worker:
    """One worker process. Only one thread at a time uses it, except for `end`."""

    def __init__(
        self, server: ForkServer, process: "subprocess.Popen[bytes]", pid: int, connection: socket.socket
    ) -> None:
        """`process` is the server process that has forked this one."""
        self.pid = pid
        self._server, self._process, self._connection = server, process, connection
        self.grown_bytes = 0  # growth of its peak memory since it was forked
        self._ended = False
        weakref.finalize(self, connection.close)

    @property
    def alive(self) -> bool:
        """Whether the process can run a job. Call it only between jobs."""
        if self._ended:
            return False
        try:
            self._connection.settimeout(0.0)
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run(self, job: str, arguments: Mapping[str, Any], cpu_seconds: float, wall_seconds: float | None = None) -> Any:
        """Runs a job and returns its result.

        Raises RequestError if the job does, and JobFailed if it takes more than `cpu_seconds` of CPU time or more than
        `wall_seconds` (by default WAIT_FACTOR times as long), needs too much memory, or its process dies. After
        JobFailed, the worker has ended. Raises TypeError or ValueError if `arguments` are not JSON values.
        """
        seconds = WAIT_FACTOR * cpu_seconds if wall_seconds is None else wall_seconds
        message = _encoded({"function": job, "arguments": dict(arguments), "cpu_seconds": cpu_seconds})
        deadline = time.monotonic() + seconds
        try:
            _send_bytes(self._connection, message, deadline)
            answer = _receive(self._connection, deadline)
        except TimeoutError:
            self.end()
            raise JobFailed(f"did not answer within {seconds:g} s") from None
        except (OSError, ValueError):
            answer = None
        if answer is None:
            code = self.end()
            self._server.check_open()
            raise JobFailed(_describe_end(code, cpu_seconds))
        self.grown_bytes = int(answer["grown"])
        if "failed" in answer:
            self.end()
        return _value_of(answer)

    def end(self) -> int | None:
        """Kills the process. Returns its exit code, negative for a signal, or None if it is unknown."""
        if self._ended:
            return None
        self._ended = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        self._connection.close()
        return self._server.end(self._process, self.pid)


def _value_of(answer: Mapping[str, Any]) -> Any:
    if "failed" in answer:
        raise JobFailed(answer["failed"])
    if "refused" in answer:
        message, param, code = answer["refused"]
        raise RequestError(message, param=param, code=code)
    return answer["value"]


def _describe_end(code: int | None, cpu_seconds: float) -> str:
    if code == -signal.SIGPROF:
        return f"did not finish within {cpu_seconds:g} s of CPU time"
    if code is None:
        return "ended its process"
    return f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


def _kill(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    process.kill()
    process.wait()
    control.close()


def main(control_fd: int) -> None:
    """Runs in the server process until the other end of the control socket is closed."""
    control = socket.socket(fileno=control_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a library that aborts on a hostile text writes no core file
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _all_cores_but_one())
    prepared: Prepared = {}
    while (received := _receive_with_fds(control)) is not None:
        request, fds = received
        if "fork" in request:
            gc.collect()
            gc.freeze()  # later collections do not write to the objects that exist now, so workers share their memory
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    kill_if_parent_dies(server)
                    control.close()
                    os.nice(request["niceness"])
                    _work(socket.socket(fileno=fds[0]), prepared | {"fds": fds[1:]}, request["fork"])
                finally:
                    os._exit(0)
            answer: dict[str, Any] = {"value": pid}
        elif "end" in request:
            os.kill(request["end"], signal.SIGKILL)  # only this process can reap it, so its id was not reused
            _, status = os.waitpid(request["end"], 0)
            answer = {"value": os.waitstatus_to_exitcode(status)}
        else:
            answer = _run_limited(request, lambda function, arguments: function(**arguments), request["memory_bytes"])
            if "value" in answer:
                prepared[request["prepare"]] = answer["value"]
                answer = {"value": None}
        for fd in fds:
            os.close(fd)
        _send(control, answer)


def _all_cores_but_one() -> list[int]:
    """Returns the cores for this server and its workers. If there are several, one is left to the engine."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[1:] or cores


def _work(connection: socket.socket, prepared: Prepared, memory_bytes: int) -> None:
    """Runs in a worker: executes jobs until the other end of the connection is closed."""
    size, resident = _address_space(), _peak_bytes()
    while (request := _receive(connection)) is not None:
        answer = _run_limited(
            request, lambda function, arguments: function(prepared, **arguments), memory_bytes, base_bytes=size
        )
        _send(connection, answer | {"grown": _peak_bytes() - resident})


def _run_limited(
    request: Mapping[str, Any], call: Callable[..., Any], memory_bytes: int, base_bytes: int = 0
) -> dict[str, Any]:
    """Returns the answer to a request. If the CPU time is exceeded, SIGPROF ends this process."""
    _limit_memory(base_bytes + memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
    try:
        module, _, name = request["function"].partition(":")
        return {"value": call(getattr(importlib.import_module(module), name), request["arguments"])}
    except HotsetError as error:
        return {"refused": (str(error), getattr(error, "param", None), getattr(error, "code", None))}
    except JobFailed as error:
        return {"failed": str(error)}
    except MemoryError:
        return {"failed": f"needs more than {show_bytes(memory_bytes)} of memory"}
    except Exception as error:
        return {"failed": f"fails: {type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(SERVER_BYTES)


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _encoded(message: Mapping[str, Any]) -> bytes:
    """Returns a message after its length. The JSON is ASCII, so lone surrogates cause no error."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text


def _send(
    connection: socket.socket, message: Mapping[str, Any], deadline: float | None = None, fds: Sequence[int] = ()
) -> None:
    encoded = _encoded(message)
    if fds:
        _set_timeout(connection, deadline)
        socket.send_fds(connection, [encoded[:4]], fds)
        encoded = encoded[4:]
    _send_bytes(connection, encoded, deadline)


def _send_bytes(connection: socket.socket, encoded: bytes, deadline: float | None) -> None:
    _set_timeout(connection, deadline)
    connection.sendall(encoded)


def _receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Returns the next message, or None at the end of the connection. Raises TimeoutError after the deadline."""
    size = _receive_bytes(connection, 4, deadline)
    return None if size is None else _receive_rest(connection, size, deadline)


def _receive_with_fds(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Returns the next message with its file descriptors, or None at the end of the connection."""
    size, fds, _, _ = socket.recv_fds(connection, 4, 16)
    rest = _receive_bytes(connection, 4 - len(size)) if size else None
    message = None if rest is None else _receive_rest(connection, size + rest)
    return None if message is None else (message, fds)


def _receive_rest(connection: socket.socket, size: bytes, deadline: float | None = None) -> Any:
    length = int.from_bytes(size, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError("a message is too long")
    body = _receive_bytes(connection, length, deadline)
    return None if body is None else json.loads(body)


def _receive_bytes(connection: socket.socket, length: int, deadline: float | None = None) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        _set_timeout(connection, deadline)
        piece = connection.recv(min(length - len(received), MIB))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _set_timeout(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
