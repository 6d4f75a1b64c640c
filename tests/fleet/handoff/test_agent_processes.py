"""Tests with worker processes that are killed, suspended or restarted during a handoff."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from handoff_engines import SHORT_TIMING, DecodeEngine, FileTransfer, PrefillEngine, StoppableClock
from handoff_world import prompt
from ports import reserved_port
from processes import pause
from waiting import WAIT_SECONDS, wait_until

from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.messages import FetchFailed, Landed
from hotset.schedule.handoffs import HandoffKey

HERE = Path(__file__).parent


class Worker:
    """A process that runs peer_process.py. Its input and output are lines of words.

    Without an `address`, it gets one of its own. After `kill`, another worker can be started there until `release`.
    """

    def __init__(self, role: str, folder: Path, *, address: str | None = None, stop_before: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self._reservation = ExitStack()
        if address is None:
            address = f"127.0.0.1:{self._reservation.enter_context(reserved_port())}"
        folders = [str(path) for path in (HERE, *HERE.parents[:3])]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), role, address, str(folder), stop_before],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = self.read_line("address")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def read_line(self, beginning: str) -> str:
        """Reads the next line of output, which must begin with `beginning`, and returns the text after it."""
        line = self._lines.get(timeout=WAIT_SECONDS)
        assert line.startswith(beginning), line
        return line.removeprefix(beginning).strip()

    def send_line(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def release(self) -> None:
        """Releases the port."""
        self._reservation.close()


@contextmanager
def workers(*initial: Worker) -> Iterator[list[Worker]]:
    """Yields a list of workers, to which the test can append. At the end, all workers in the list are killed."""
    started = list(initial)
    try:
        yield started
    finally:
        for worker in started:
            if worker.process.returncode is None:
                worker.kill()
            worker.release()


@contextmanager
def engine_of(kind: Any, path: Path, pages: int, page_rows: int, options: dict[str, Any]) -> Iterator[Any]:
    """Runs an engine in this process, with its memory in the file `path`. Audits it at the end."""
    memory, channel = FileTransfer.memory(path, pages, page_rows), Channel("127.0.0.1:0")
    engine = kind(memory, channel, partial(FileTransfer, path), **options)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


def decode_engine(folder: Path, **options: Any) -> AbstractContextManager[DecodeEngine]:
    return engine_of(DecodeEngine, folder / "decode", 64, 8, options)


def prefill_engine(folder: Path, **options: Any) -> AbstractContextManager[PrefillEngine]:
    return engine_of(PrefillEngine, folder / "prefill", 32, 16, options)


def start_handoff(worker: Worker, decode: DecodeEngine, stage: str, name: str = "r") -> HandoffKey:
    """Begins a handoff and waits until its prompt has reached `stage` and its receiver has sent StartWrites."""
    key = decode.fetch(worker.address, prompt(60), name)
    while worker.read_line("stage") != stage:
        pass
    assert wait_until(lambda: decode.in_phases("landing"))
    return key


def test_a_prefill_worker_restarted_at_its_old_address_fails_its_old_handoffs_and_serves_new_ones(
    tmp_path: Path,
) -> None:
    """If it was idle, no request fails."""
    with (
        workers(Worker("prefill", tmp_path / "first", stop_before="sample")) as started,
        # The peer timeout is so long that only the new incarnation can reveal the restart.
        decode_engine(tmp_path, timing=replace(SHORT_TIMING, peer_timeout=60.0), scale=1.0) as decode,
    ):
        address = started[0].address
        old = start_handoff(started[0], decode, "sample")
        started[0].kill()
        started.append(Worker("prefill", tmp_path / "second", address=address))
        end = decode.wait_for_outcome(old)
        assert isinstance(end, FetchFailed) and end.quiesced and "restarted" in end.reason
        assert isinstance(decode.wait_for_outcome(decode.fetch(address, prompt(60), "new")), Landed)
        started[1].kill()
        started.append(Worker("prefill", tmp_path / "third", address=address))
        with decode.agent._lock:
            decode.agent._liveness.forget(address)  # as after a peer timeout without messages
        assert isinstance(decode.wait_for_outcome(decode.fetch(address, prompt(60), "newest")), Landed)


@pytest.mark.parametrize("how", ["continued", "killed"])
def test_the_pages_of_a_suspended_prefill_worker_are_in_quarantine_until_it_has_confirmed_or_ended(
    tmp_path: Path, how: str
) -> None:
    """Defect 23: a writer on this machine can write although its endpoint is closed, until its process has ended."""
    with (
        workers(Worker("prefill", tmp_path / "first", stop_before="sample")) as started,
        decode_engine(tmp_path) as decode,
    ):
        first = started[0]
        old = start_handoff(first, decode, "sample")
        pause(first.process.pid)
        end = decode.wait_for_outcome(old)
        assert isinstance(end, FetchFailed) and not end.quiesced
        assert decode.in_phases("quarantined") and decode.lost_peers == [first.address]
        retransmits = decode.agent.stats().num_retransmits
        assert wait_until(lambda: decode.agent.stats().num_retransmits > retransmits + 1), "Cancel is not retransmitted"
        assert decode.quarantined == {old}, "the process lives, and may continue to write"
        if how == "continued":
            first.process.send_signal(signal.SIGCONT)
        else:
            first.kill()
        assert wait_until(lambda: not decode.quarantined), "the pages are still in quarantine"
        if how == "killed":
            started.append(Worker("prefill", tmp_path / "second", address=first.address))
            assert isinstance(decode.wait_for_outcome(decode.fetch(first.address, prompt(60), "new")), Landed)
            assert wait_until(lambda: len(decode.transfer) == 1), "the endpoint of the killed worker is not closed"


def test_the_pages_of_a_decode_worker_that_was_suspended_during_a_write_are_free_when_it_resumes(
    tmp_path: Path,
) -> None:
    """Defect 23: the prefill worker gives the decode worker up, but can still confirm that its writes have ended."""
    with (
        prefill_engine(tmp_path, stop_before="sample") as prefill,
        workers(Worker("decode", tmp_path / "sleeper")) as [sleeper],
    ):
        assert isinstance(prefill.transfer, FileTransfer)
        prefill.transfer.may_end.clear()
        sleeper.send_line(prefill.address, "r", *prompt(60))
        assert wait_until(lambda: prefill.transfer.throughput().nbytes > 0) and prefill.in_phases("writing")
        pause(sleeper.process.pid)
        assert wait_until(lambda: prefill.in_phases()), "the silence of the peer did not end the handoff"
        assert wait_until(lambda: not prefill.held)
        sleeper.process.send_signal(signal.SIGCONT)
        prefill.transfer.may_end.set()
        assert sleeper.read_line("event") == "FetchFailed quiesced retry"
        prefill.stop_before = ""
        sleeper.send_line(prefill.address, "s", *prompt(61))
        assert sleeper.read_line("event") == "Landed"


def test_a_prefill_worker_releases_all_pages_of_a_decode_worker_killed_during_a_write(tmp_path: Path) -> None:
    """The pages are kept until the write has ended, or counts as hung."""
    clock = StoppableClock()
    with prefill_engine(tmp_path, clock=clock) as prefill, workers(Worker("decode", tmp_path / "doomed")) as started:
        transfer, doomed = prefill.transfer, started[0]
        assert isinstance(transfer, FileTransfer)
        transfer.may_end.clear()
        doomed.send_line(prefill.address, "r", *prompt(60))
        assert wait_until(lambda: prefill.transfer.throughput().nbytes > 0) and prefill.in_phases("writing")
        clock.stop()  # otherwise a timeout could end the phase before the check
        assert prefill.in_phases("writing") and prefill.held, "pages were released while a write could read them"
        clock.resume()
        doomed.kill()
        assert wait_until(lambda: prefill.in_phases() and not prefill.held)
        transfer.may_end.set()
        # The new process uses the same request id for another prompt.
        started.append(Worker("decode", tmp_path / "next", address=doomed.address))
        started[1].send_line(prefill.address, "r", *prompt(61, 5))
        assert started[1].read_line("event") == "Landed"
