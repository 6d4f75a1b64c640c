"""Tests with worker processes that are killed, suspended or restarted during a handoff."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from handoff_engines import SHORT_TIMING, WAIT_S, DecodeEngine, FileTransfer, PrefillEngine, StoppableClock, wait_until
from handoff_world import prompt
from ports import reserved_port
from processes import pause

from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.messages import FetchFailed, Landed
from hotset.schedule.handoffs import HandoffKey

HERE = Path(__file__).parent
STAGES = [pytest.param("compute", marks=pytest.mark.slow), "second chunk", "sample"]


class Worker:
    """A process that runs peer_process.py. Its input and output are lines of words.

    Without an `address`, it gets one of its own. After `kill`, another worker can be started there until `release`.
    """

    def __init__(self, role: str, folder: Path, *, address: str | None = None, fault: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self._reservation = ExitStack()
        if address is None:
            address = f"127.0.0.1:{self._reservation.enter_context(reserved_port())}"
        paths = [
            str(HERE),
            str(HERE.parent),
            str(HERE.parents[1]),
            str(HERE.parents[2]),
            os.environ.get("PYTHONPATH", ""),
        ]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), role, address, str(folder), fault],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
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
        line = self._lines.get(timeout=WAIT_S)
        assert line.startswith(beginning), line
        return line.removeprefix(beginning).strip()

    def send_line(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
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
def decode_engine(folder: Path, **options: Any) -> Iterator[DecodeEngine]:
    path = folder / "decode"
    memory, channel = FileTransfer.memory(path, 64, 8), Channel("127.0.0.1:0")
    engine = DecodeEngine(memory, channel, partial(FileTransfer, path), **options)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


@contextmanager
def prefill_engine(folder: Path, **options: Any) -> Iterator[PrefillEngine]:
    path = folder / "prefill"
    memory, channel = FileTransfer.memory(path, 32, 16), Channel("127.0.0.1:0")
    engine = PrefillEngine(memory, channel, partial(FileTransfer, path), **options)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


def start_handoff(worker: Worker, decode: DecodeEngine, stage: str) -> HandoffKey:
    """Begins a handoff and waits until its prompt has reached `stage` and its receiver has sent StartWrites."""
    key = decode.fetch(worker.address, prompt(60), "r")
    while worker.read_line("stage") != stage:
        pass
    assert wait_until(lambda: decode.agent.stats().phase_seconds["requesting"] > 0)
    return key


@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_worker_killed_at_any_stage_fails_only_its_own_requests(tmp_path: Path, stage: str) -> None:
    with (
        workers(Worker("prefill", tmp_path / "doomed", fault=stage)) as [doomed],
        # The timeouts of the phases are longer than the peer timeout, so the peer's silence ends the handoff first.
        decode_engine(tmp_path, scale=4.0) as decode,
        prefill_engine(tmp_path) as other,
    ):
        key = start_handoff(doomed, decode, stage)
        doomed.kill()
        other_keys = [decode.fetch(other.address, prompt(60, number), f"other {number}") for number in range(3)]
        assert all(isinstance(decode.wait_for_outcome(other_key), Landed) for other_key in other_keys)
        end = decode.wait_for_outcome(key)
        assert isinstance(end, FetchFailed) and not end.retry and "no message from" in end.reason
        assert end.quiesced, "the process has ended, so nobody writes to the pages any more"
        end = decode.wait_for_outcome(decode.fetch(doomed.address, prompt(60), "r", attempt=1))
        assert isinstance(end, FetchFailed) and end.quiesced


def test_no_page_is_quarantined_if_a_prefill_worker_is_killed_before_start_writes(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "doomed")) as [doomed], decode_engine(tmp_path) as decode:
        assert isinstance(decode.wait_for_outcome(decode.fetch(doomed.address, prompt(10), "before")), Landed)
        pause(doomed.process.pid)
        key = decode.fetch(doomed.address, prompt(60), "r")
        assert wait_until(lambda: bool(decode.agent.stats().num_open))
        doomed.kill()
        end = decode.wait_for_outcome(key)
        assert isinstance(end, FetchFailed) and end.quiesced


def test_a_prefill_worker_restarted_at_its_old_address_fails_its_old_handoffs_and_serves_new_ones(
    tmp_path: Path,
) -> None:
    with (
        workers(Worker("prefill", tmp_path / "first", fault="sample")) as started,
        # The peer timeout is so long that only the new incarnation can reveal the restart.
        decode_engine(tmp_path, timing=replace(SHORT_TIMING, peer_timeout=60.0), scale=1.0) as decode,
    ):
        first = started[0]
        old = start_handoff(first, decode, "sample")
        first.kill()
        started.append(Worker("prefill", tmp_path / "second", address=first.address))
        end = decode.wait_for_outcome(old)
        assert isinstance(end, FetchFailed) and end.quiesced and "restarted" in end.reason
        assert isinstance(decode.wait_for_outcome(decode.fetch(first.address, prompt(60), "new")), Landed)


def test_no_request_fails_if_an_idle_prefill_worker_is_replaced(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "first")) as started, decode_engine(tmp_path) as decode:
        address = started[0].address
        assert isinstance(decode.wait_for_outcome(decode.fetch(address, prompt(60), "old")), Landed)
        started[0].kill()
        started.append(Worker("prefill", tmp_path / "second", address=address))
        assert wait_until(lambda: not decode.agent._liveness.heard_recently(address, decode.agent._clock()))
        assert isinstance(decode.wait_for_outcome(decode.fetch(address, prompt(60), "new")), Landed)


def test_a_suspended_prefill_worker_is_treated_as_lost_and_confirms_later_that_it_stopped(tmp_path: Path) -> None:
    with (
        workers(Worker("prefill", tmp_path / "sleeper", fault="sample")) as [sleeper],
        decode_engine(tmp_path) as decode,
    ):
        key = start_handoff(sleeper, decode, "sample")
        pause(sleeper.process.pid)
        end = decode.wait_for_outcome(key)
        assert isinstance(end, FetchFailed) and not end.quiesced
        assert decode.quarantined == {key} and decode.lost_peers == [sleeper.address]
        sleeper.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: not decode.quarantined), "the pages are still in quarantine"


def test_an_unanswered_cancelled_request_is_forgotten_if_its_prefill_worker_is_killed(tmp_path: Path) -> None:
    clock = StoppableClock()
    with workers(Worker("prefill", tmp_path / "doomed")) as [doomed], decode_engine(tmp_path, clock=clock) as decode:
        assert isinstance(decode.wait_for_outcome(decode.fetch(doomed.address, prompt(10), "before")), Landed)
        pause(doomed.process.pid)
        clock.stop()
        key = decode.fetch(doomed.address, prompt(60), "r")
        assert wait_until(lambda: decode.in_phases("requesting"))
        decode.cancel(key)
        end = decode.wait_for_outcome(key)
        assert isinstance(end, FetchFailed) and end.quiesced
        assert decode.in_phases("abandoned")
        doomed.kill()
        clock.resume()
        assert wait_until(lambda: decode.in_phases()), "Cancel is still retransmitted"


def test_pages_are_in_quarantine_while_their_writer_lives_and_free_when_it_was_killed(tmp_path: Path) -> None:
    """Defect 23: a writer on this machine can write although its endpoint is closed, until its process has ended."""
    with workers(Worker("prefill", tmp_path / "first", fault="sample")) as started, decode_engine(tmp_path) as decode:
        first = started[0]
        old = start_handoff(first, decode, "sample")
        pause(first.process.pid)
        end = decode.wait_for_outcome(old)
        assert isinstance(end, FetchFailed) and not end.quiesced
        assert decode.in_phases("quarantined")
        retransmits = decode.agent.stats().num_retransmits
        assert wait_until(lambda: decode.agent.stats().num_retransmits > retransmits + 1), "Cancel is not retransmitted"
        assert decode.quarantined == {old}, "the process lives, and may continue to write"
        first.kill()
        assert wait_until(lambda: not decode.quarantined), "the pages are still in quarantine"
        started.append(Worker("prefill", tmp_path / "second", address=first.address))
        assert isinstance(decode.wait_for_outcome(decode.fetch(first.address, prompt(60), "new")), Landed)
        assert wait_until(lambda: len(decode.transfer) == 1), "the endpoint of the killed worker is not closed"


@pytest.mark.parametrize(
    "hung", [pytest.param(False, id="no write in flight", marks=pytest.mark.slow), pytest.param(True, id="hung write")]
)
def test_the_pages_of_a_decode_worker_that_was_suspended_while_rows_land_are_free_when_it_resumes(
    tmp_path: Path, hung: bool
) -> None:
    """Defect 23: the prefill worker gives the decode worker up, but can still confirm that its writes have ended."""
    with (
        prefill_engine(tmp_path, stop_before="sample") as prefill,
        workers(Worker("decode", tmp_path / "sleeper")) as [sleeper],
    ):
        assert isinstance(prefill.transfer, FileTransfer)
        if hung:
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


def test_the_pages_of_a_handoff_cancelled_while_its_prefill_worker_dies_are_free(tmp_path: Path) -> None:
    with (
        workers(Worker("prefill", tmp_path / "doomed", fault="sample")) as [doomed],
        decode_engine(tmp_path) as decode,
    ):
        key = start_handoff(doomed, decode, "sample")
        pause(doomed.process.pid)
        decode.cancel(key)
        doomed.kill()
        end = decode.wait_for_outcome(key)
        assert isinstance(end, FetchFailed) and end.quiesced and end.reason == "cancelled"


@pytest.mark.parametrize("stage", [*STAGES, ""])
def test_a_prefill_worker_releases_all_pages_of_a_decode_worker_killed_at_any_stage(tmp_path: Path, stage: str) -> None:
    with (
        prefill_engine(tmp_path, stop_before=stage) as prefill,
        workers(Worker("decode", tmp_path / "doomed")) as started,
    ):
        doomed = started[0]
        doomed.send_line(prefill.address, "r", *prompt(60))
        assert wait_until(lambda: len(prefill.started) == 1)
        doomed.kill()
        assert wait_until(lambda: not prefill.held and not prefill.agent.stats().num_open)
        prefill.stop_before = ""
        # The new process uses the same request id for another prompt.
        started.append(Worker("decode", tmp_path / "next", address=doomed.address))
        started[1].send_line(prefill.address, "r", *prompt(61, 5))
        assert started[1].read_line("event") == "Landed"


def test_a_prefill_worker_releases_all_pages_of_a_decode_worker_killed_before_start_writes(tmp_path: Path) -> None:
    # The timeouts of the phases are so long that only the silence of the peer can end the handoff.
    slow = prefill_engine(tmp_path, scale=30.0)
    with slow as prefill, workers(Worker("decode", tmp_path / "doomed", fault="StartWrites")) as [doomed]:
        doomed.send_line(prefill.address, "r", *prompt(60))
        assert wait_until(lambda: len(prefill.started) == 1)
        assert wait_until(lambda: bool(prefill.held)) and prefill.in_phases("accepted")
        doomed.kill()
        assert wait_until(lambda: prefill.in_phases()), "the silence of the peer did not end the handoff"
        assert wait_until(lambda: not prefill.held)


@pytest.mark.parametrize("phase", [pytest.param("writing", marks=pytest.mark.slow), "draining", "writes hung"])
def test_a_prefill_worker_releases_all_pages_of_a_decode_worker_killed_while_a_write_does_not_end(
    tmp_path: Path, phase: str
) -> None:
    clock = StoppableClock()
    with prefill_engine(tmp_path, clock=clock) as prefill, workers(Worker("decode", tmp_path / "doomed")) as started:
        transfer, doomed = prefill.transfer, started[0]
        assert isinstance(transfer, FileTransfer)
        transfer.may_end.clear()
        doomed.send_line(prefill.address, "r", *prompt(60))
        # Phase WRITING begins with StartWrites, perhaps before the first write. The test waits for a write, because a
        # cancelled handoff without writes in flight closes at once.
        assert wait_until(lambda: prefill.transfer.throughput().nbytes > 0) and prefill.in_phases("writing")
        if phase != "writes hung":
            clock.stop()  # otherwise a timeout could end the phase before the check
        if phase != "writing":
            doomed.send_line("cancel")
        assert wait_until(lambda: prefill.in_phases(phase))
        if phase == "writes hung":
            assert wait_until(lambda: not prefill.held), "pages of a hung write were not released"
        else:
            assert prefill.held, "pages were released while a write could read them"
            clock.resume()
        doomed.kill()
        assert wait_until(lambda: prefill.in_phases())
        assert wait_until(lambda: not prefill.held)
        transfer.may_end.set()
        started.append(Worker("decode", tmp_path / "next", address=doomed.address))
        started[1].send_line(prefill.address, "r", *prompt(61, 5))
        assert started[1].read_line("event") == "Landed"
