"""Worker processes that are killed, stopped and restarted in every stage of a handoff."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handoff_engines import QUICK, SECONDS, DecodeEngine, FileTransfer, PrefillEngine, StoppableClock, until
from handoff_world import prompt
from processes import pause

from hotset.handoff.channel import Channel
from hotset.handoff.messages import FetchFailed, HandoffKey, Landed

HERE = Path(__file__).parent
STAGES = [pytest.param("compute", marks=pytest.mark.slow), "second chunk", "sample"]


class Worker:
    """A process of peer_process.py, and its output."""

    def __init__(self, role: str, folder: Path, *, address: str = "127.0.0.1:0", hold: str = "") -> None:
        folder.mkdir(exist_ok=True)
        paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), role, address, str(folder), hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = self.says("address")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def says(self, beginning: str) -> str:
        """Returns the rest of the next line, which must begin with these words."""
        line = self._lines.get(timeout=SECONDS)
        assert line.startswith(beginning), line
        return line.removeprefix(beginning).strip()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.process.kill()
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def workers(*wanted: Worker) -> Iterator[list[Worker]]:
    """Yields a list of workers, which may grow, and kills them at the end."""
    alive = list(wanted)
    try:
        yield alive
    finally:
        for worker in alive:
            if worker.process.returncode is None:
                worker.kill()


@contextmanager
def decoding(folder: Path, **rest: Any) -> Iterator[DecodeEngine]:
    path = folder / "decode"
    memory, channel = FileTransfer.memory(path, 64, 8), Channel("127.0.0.1:0")
    engine = DecodeEngine(memory, channel, FileTransfer(path), **rest)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


@contextmanager
def prefilling(folder: Path, **rest: Any) -> Iterator[PrefillEngine]:
    path = folder / "prefill"
    memory, channel = FileTransfer.memory(path, 32, 16), Channel("127.0.0.1:0")
    engine = PrefillEngine(memory, channel, FileTransfer(path), **rest)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()


def reach(worker: Worker, decode: DecodeEngine, stage: str) -> HandoffKey:
    """Begins a handoff that stops at this stage, and whose receiver has sent StartWrites."""
    key = decode.fetch(worker.address, prompt(60), "r")
    while worker.says("stage") != stage:
        pass
    assert until(lambda: decode.agent.stats().phase_seconds["requesting"] > 0)
    return key


@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_worker_killed_at_any_stage_fails_only_its_own_requests(tmp_path: Path, stage: str) -> None:
    with (
        workers(Worker("prefill", tmp_path / "doomed", hold=stage)) as [doomed],
        # The limits of its phases are so long that silence ends the handoff first.
        decoding(tmp_path, scale=4.0) as decode,
        prefilling(tmp_path) as other,
    ):
        key = reach(doomed, decode, stage)
        doomed.kill()
        others = [decode.fetch(other.address, prompt(60, number), f"other {number}") for number in range(3)]
        assert all(isinstance(decode.ended(each), Landed) for each in others)
        end = decode.ended(key)
        assert isinstance(end, FetchFailed) and not end.quiesced and not end.retry and "no message from" in end.reason
        assert decode.quarantined == {key}
        end = decode.ended(decode.fetch(doomed.address, prompt(60), "r", attempt=1))
        assert isinstance(end, FetchFailed) and end.quiesced


def test_a_prefill_worker_killed_before_start_writes_costs_no_page(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "doomed")) as [doomed], decoding(tmp_path) as decode:
        assert isinstance(decode.ended(decode.fetch(doomed.address, prompt(10), "before")), Landed)
        pause(doomed.process.pid)
        key = decode.fetch(doomed.address, prompt(60), "r")
        assert until(lambda: bool(decode.agent.stats().num_open))
        doomed.kill()
        end = decode.ended(key)
        assert isinstance(end, FetchFailed) and end.quiesced


def test_a_restarted_prefill_worker_at_its_old_address_is_noticed_at_once_and_used(tmp_path: Path) -> None:
    with (
        workers(Worker("prefill", tmp_path / "first", hold="sample")) as alive,
        # The timeout of the peer would find out much later.
        decoding(tmp_path, timing=replace(QUICK, peer_timeout=60.0), scale=1.0) as decode,
    ):
        first = alive[0]
        old = reach(first, decode, "sample")
        first.kill()
        alive.append(Worker("prefill", tmp_path / "second", address=first.address))
        end = decode.ended(old)
        assert isinstance(end, FetchFailed) and not end.quiesced and "restarted" in end.reason
        assert isinstance(decode.ended(decode.fetch(first.address, prompt(60), "new")), Landed)
        assert decode.quarantined == {old}


def test_a_prefill_worker_replaced_while_idle_costs_no_request(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "first")) as alive, decoding(tmp_path) as decode:
        address = alive[0].address
        assert isinstance(decode.ended(decode.fetch(address, prompt(60), "old")), Landed)
        alive[0].kill()
        alive.append(Worker("prefill", tmp_path / "second", address=address))
        assert until(lambda: not decode.agent._liveness.heard_recently(address, decode.agent._clock()))
        assert isinstance(decode.ended(decode.fetch(address, prompt(60), "new")), Landed)


def test_a_suspended_prefill_worker_is_treated_as_lost_and_confirms_later_that_it_stopped(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "sleeper", hold="sample")) as [sleeper], decoding(tmp_path) as decode:
        key = reach(sleeper, decode, "sample")
        pause(sleeper.process.pid)
        end = decode.ended(key)
        assert isinstance(end, FetchFailed) and not end.quiesced
        assert decode.quarantined == {key}
        sleeper.process.send_signal(signal.SIGCONT)
        assert until(lambda: not decode.quarantined), "the pages stay in quarantine"


def test_a_prefill_worker_killed_after_an_unanswered_request_was_cancelled_costs_nothing(tmp_path: Path) -> None:
    clock = StoppableClock()
    with workers(Worker("prefill", tmp_path / "doomed")) as [doomed], decoding(tmp_path, clock=clock) as decode:
        assert isinstance(decode.ended(decode.fetch(doomed.address, prompt(10), "before")), Landed)
        pause(doomed.process.pid)
        clock.stop()
        key = decode.fetch(doomed.address, prompt(60), "r")
        assert until(lambda: decode.stands_in("requesting"))
        decode.give_up(key)
        end = decode.ended(key)
        assert isinstance(end, FetchFailed) and end.quiesced
        assert decode.stands_in("abandoned")
        doomed.kill()
        clock.go_on()
        assert until(lambda: decode.stands_in()), "it is told for ever to stop"


def test_pages_stay_in_quarantine_when_their_writer_is_killed_and_restarted(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "first", hold="sample")) as alive, decoding(tmp_path) as decode:
        first = alive[0]
        old = reach(first, decode, "sample")
        pause(first.process.pid)
        end = decode.ended(old)
        assert isinstance(end, FetchFailed) and not end.quiesced
        assert decode.stands_in("quarantined")
        first.kill()
        alive.append(Worker("prefill", tmp_path / "second", address=first.address))
        assert isinstance(decode.ended(decode.fetch(first.address, prompt(60), "new")), Landed)
        asked = decode.agent.stats().num_retransmits
        assert until(lambda: decode.agent.stats().num_retransmits > asked + 1), "it is not asked any more"
        # The new process has no record of the handoff, so it cannot confirm that its writes have stopped.
        assert decode.quarantined == {old} and decode.stands_in("quarantined")


def test_cancelling_while_the_prefill_worker_dies_ends_once(tmp_path: Path) -> None:
    with workers(Worker("prefill", tmp_path / "doomed", hold="sample")) as [doomed], decoding(tmp_path) as decode:
        key = reach(doomed, decode, "sample")
        pause(doomed.process.pid)
        decode.give_up(key)
        doomed.kill()
        end = decode.ended(key)
        assert isinstance(end, FetchFailed) and not end.quiesced and end.reason == "cancelled"


@pytest.mark.parametrize("stage", [*STAGES, ""])
def test_a_decode_worker_killed_at_any_stage_costs_the_prefill_worker_nothing(tmp_path: Path, stage: str) -> None:
    with prefilling(tmp_path, hold=stage) as prefill, workers(Worker("decode", tmp_path / "doomed")) as alive:
        doomed = alive[0]
        doomed.tell(prefill.address, "r", *prompt(60))
        assert until(lambda: len(prefill.computed) == 1)
        doomed.kill()
        assert until(lambda: not prefill.held and not prefill.agent.stats().num_open)
        prefill._hold = ""
        # The new process may use the same id for another request.
        alive.append(Worker("decode", tmp_path / "next", address=doomed.address))
        alive[1].tell(prefill.address, "r", *prompt(61, 5))
        assert alive[1].says("event") == "Landed"


def test_a_decode_worker_killed_before_start_writes_costs_the_prefill_worker_nothing(tmp_path: Path) -> None:
    # The time limits of its phases are so long that only the silence of the peer can end the handoff.
    slow = prefilling(tmp_path, scale=30.0)
    with slow as prefill, workers(Worker("decode", tmp_path / "doomed", hold="StartWrites")) as [doomed]:
        doomed.tell(prefill.address, "r", *prompt(60))
        assert until(lambda: len(prefill.computed) == 1)
        assert until(lambda: bool(prefill.held)) and prefill.stands_in("accepted")
        doomed.kill()
        assert until(lambda: prefill.stands_in()), "it is missed only when the time of the phase is up"
        assert until(lambda: not prefill.held)


@pytest.mark.parametrize("phase", [pytest.param("writing", marks=pytest.mark.slow), "draining", "writes hung"])
def test_a_decode_worker_killed_while_a_write_does_not_end_costs_the_prefill_worker_no_page(
    tmp_path: Path, phase: str
) -> None:
    clock = StoppableClock()
    with prefilling(tmp_path, clock=clock) as prefill, workers(Worker("decode", tmp_path / "doomed")) as alive:
        transfer, doomed = prefill.transfer, alive[0]
        assert isinstance(transfer, FileTransfer)
        transfer.go.clear()
        doomed.tell(prefill.address, "r", *prompt(60))
        # The phase begins when StartWrites arrives, perhaps before the first write. A cancelled handoff without writes
        # closes at once.
        assert until(lambda: prefill.agent.stats().nbytes > 0) and prefill.stands_in("writing")
        if phase != "writes hung":
            clock.stop()  # otherwise the timeout may end the phase before the check
        if phase != "writing":
            doomed.tell("give up")
        assert until(lambda: prefill.stands_in(phase))
        if phase == "writes hung":
            assert until(lambda: not prefill.held), "pages that nobody waits for any more never come back"
        else:
            assert prefill.held, "pages that are being read are in use again"
            clock.go_on()
        doomed.kill()
        assert until(lambda: prefill.stands_in())
        assert until(lambda: not prefill.held)
        transfer.go.set()
        alive.append(Worker("decode", tmp_path / "next", address=doomed.address))
        alive[1].tell(prefill.address, "r", *prompt(61, 5))
        assert alive[1].says("event") == "Landed"
