"""A process that is stopped or hangs is noticed after its time limit, and one that only takes long is not."""

import multiprocessing
import threading

import pytest

from hotset.engine import progress as progress_module
from hotset.engine.progress import (
    BEATS,
    EXPECTED_NS,
    FIRST_STEP_SECONDS,
    MAX_POLL_SECONDS,
    RECENT_STEPS,
    STALL_MARGIN_SECONDS,
    STEP_NS,
    EngineWatch,
    Progress,
    StallTimer,
)

TIMEOUT = 60.0
DEADLINE_S = 60.0


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedEngine:
    """An engine whose signs of life come from the test, and a watch that checks them once per second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.progress = Progress(multiprocessing.get_context("spawn"))
        self.watch = EngineWatch(self.progress, TIMEOUT, self.clock)

    def run(self, seconds: float, *, beats: bool = True, advances: bool = False) -> str | None:
        """Lets time pass. Returns the first problem that the watch reports."""
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            if beats:
                self.progress._counters[BEATS] += 1
            if advances:
                self.progress.advance()
            if (problem := self.watch.problem()) is not None:
                return problem
        return None


@pytest.fixture
def engine() -> WatchedEngine:
    watched = WatchedEngine()
    watched.progress.record_step(41, 1)
    watched.run(1)
    return watched


def test_a_process_without_beats_is_noticed_after_the_step_timeout(engine: WatchedEngine) -> None:
    assert engine.run(TIMEOUT, beats=False) is None
    assert engine.run(1, beats=False) == "the engine process has shown no sign of life for 60 s (--step-timeout)"


def test_a_process_that_beats_but_does_not_advance_is_noticed_and_its_step_is_named(engine: WatchedEngine) -> None:
    limit = TIMEOUT + STALL_MARGIN_SECONDS
    assert engine.run(limit - 1) is None
    assert engine.run(2) == "step 42 of the engine has made no progress for 65 s (--step-timeout)"
    assert engine.watch.seconds_without_progress > limit


def test_a_step_that_finishes_one_layer_after_another_may_take_any_time(engine: WatchedEngine) -> None:
    for _layer in range(20):
        assert engine.run(TIMEOUT) is None
        assert engine.run(1, advances=True) is None


def test_a_slow_machine_has_longer_limits(engine: WatchedEngine) -> None:
    engine.progress._counters[EXPECTED_NS] = 100 * 10**9
    limit = TIMEOUT + STALL_MARGIN_SECONDS + 100
    assert engine.run(limit - 1) is None
    assert engine.run(2) == "step 42 of the engine has made no progress for 165 s (--step-timeout)"


def test_the_expected_time_is_the_longest_between_two_advances_in_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic_ns", lambda: round(clock.now * 1e9))
    progress = Progress(multiprocessing.get_context("spawn"))

    def step(number: int, *layers: float) -> float:
        with progress.waiting():
            clock.now += 1000.0  # time without work does not count
        for seconds in layers:
            clock.now += seconds
            progress.advance()
        progress.record_step(number)
        return progress.expected_seconds

    assert step(1, 7.0, 3.0) == 7.0
    for number in range(2, 1 + RECENT_STEPS):
        assert step(number, 1.0, 2.0) == 7.0
    assert step(1 + RECENT_STEPS, 1.0) == 2.0, "older steps still count"


def test_an_engine_that_waits_for_requests_need_not_advance(engine: WatchedEngine) -> None:
    with engine.progress.waiting():
        assert engine.run(20 * TIMEOUT) is None
    assert engine.run(TIMEOUT) is None, "the time before the first command counts"
    assert engine.run(TIMEOUT) is not None


def test_only_the_first_step_may_take_longer_without_progress() -> None:
    engine = WatchedEngine()
    assert engine.run(FIRST_STEP_SECONDS) is None
    assert engine.run(2 * TIMEOUT, beats=False) is not None, "a stopped process is noticed in the first step too"


def test_a_pause_of_the_watcher_does_not_count_against_the_watched_process() -> None:
    clock = Clock()
    timer = StallTimer(clock)
    timer.seconds(7)
    clock.now += 3600  # for example, the whole process group was stopped and resumed
    assert timer.seconds(7) == MAX_POLL_SECONDS
    clock.now += 0.25
    assert timer.seconds(7) == MAX_POLL_SECONDS + 0.25
    assert timer.seconds(8) == 0.0


def test_beats_come_from_a_thread_of_their_own_and_end_with_the_block() -> None:
    progress = Progress(multiprocessing.get_context("spawn"))
    timer, waiting = StallTimer(), threading.Event()
    with progress.beating():
        while progress.beats < 2:  # this thread only waits
            waiting.wait(0.01)
            assert timer.seconds(0) < DEADLINE_S
    assert not any(thread.name == "hotset-beats" for thread in threading.enumerate())


def test_the_newest_step_and_its_time_are_recorded() -> None:
    progress = Progress(multiprocessing.get_context("spawn"))
    assert progress.seconds_since_step is None
    progress.record_step(1, 3)
    first = progress._counters[STEP_NS]
    progress.record_step(1, 2)  # the loop ran, but no step ended
    assert (progress.steps, progress.open_requests, progress._counters[STEP_NS]) == (1, 2, first)
    assert progress.seconds_since_step is not None and 0 <= progress.seconds_since_step < DEADLINE_S


def test_the_layers_of_steps_during_start_up_do_not_count() -> None:
    progress = Progress(multiprocessing.get_context("spawn"))
    progress._longest_ns = 10**15  # a layer that compiled kernels, or that ended after a long start
    with progress.beating():
        progress.advance()
        progress.record_step(1)
    assert progress.expected_seconds < DEADLINE_S
