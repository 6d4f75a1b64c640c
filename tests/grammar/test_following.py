"""Answers are followed through their structures in other processes, which may end at any time."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from processes import parent_of, state_of, wait_until_ended
from structures import END, small_tokenizer

from hotset.base.structure import Structure
from hotset.grammar import following
from hotset.grammar.following import FollowedAnswer, Masks, StructureProcesses

VOCAB = 64
TIMEOUT_SECONDS = 30.0
TOKENIZER = small_tokenizer()
STOPS = frozenset({END})
MIXED = Structure("regex", "[a-f](12|34)(ab|cd){9}")
AFTER_LETTER, AFTER_NUMBER = ("1", "3", "12", "34"), ("a", "c", "ab", "abc")


@pytest.fixture(scope="module")
def processes() -> Iterator[StructureProcesses]:
    with closing(StructureProcesses(TOKENIZER.to_str, VOCAB)) as processes:
        yield processes


def ids(*pieces: str) -> list[int]:
    return [TOKENIZER.token_to_id(piece) for piece in pieces]


def masks_after(answer: FollowedAnswer, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Masks:
    answer.request(tokens, drafts)
    masks = answer.masks(TIMEOUT_SECONDS)
    assert masks is not None, "the masks are late"
    return masks


def allowed(masks: Masks, row: int = 0) -> list[int]:
    assert not masks.failure
    return [int(token) for token in np.flatnonzero(np.unpackbits(masks.bits[row].view(np.uint8), bitorder="little"))]


def pid_of(answer: FollowedAnswer) -> int:
    assert answer.opened_in is not None, "no process follows the answer"
    return answer.opened_in.pid


def opened(processes: StructureProcesses, structure: Structure) -> FollowedAnswer:
    """Returns a new answer after its first mask."""
    answer = processes.follow(structure, STOPS, ())
    masks_after(answer, ())
    return answer


@pytest.mark.parametrize("victim", [lambda pid: pid, parent_of], ids=["process", "server"])
def test_an_answer_outlives_its_process(processes: StructureProcesses, victim: Callable[[int], int]) -> None:
    with closing(opened(processes, MIXED)) as answer:
        assert allowed(masks_after(answer, ids("a"))) == sorted(ids(*AFTER_LETTER))
        before = pid_of(answer)
        os.kill(victim(before), signal.SIGKILL)
        wait_until_ended([before])
        assert allowed(masks_after(answer, ids("12"))) == sorted(ids(*AFTER_NUMBER))
        assert pid_of(answer) != before
        assert victim is parent_of or state_of(before) is None, "the process is a zombie"
        with closing(processes.follow(MIXED, STOPS, ids("a", "1"))) as resumed:
            assert allowed(masks_after(resumed, ids("2"))) == sorted(ids(*AFTER_NUMBER))


def test_an_idle_process_ends_until_it_is_used(processes: StructureProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "IDLE_SECONDS", 0.01)
    with closing(opened(processes, MIXED)) as answer:
        masks_after(answer, ids("a"))
        wait_until_ended([pid_of(answer)])
        assert allowed(masks_after(answer, ids("12"))) == sorted(ids(*AFTER_NUMBER))


def test_drafts_are_taken_back(processes: StructureProcesses) -> None:
    with closing(opened(processes, MIXED)) as answer:
        masks = masks_after(answer, ids("a"), ids("1", "2", "true"))
        expected = [AFTER_LETTER, "2", AFTER_NUMBER]
        assert [allowed(masks, row) for row in range(3)] == [sorted(ids(*pieces)) for pieces in expected]
        assert len(masks.bits) == 3, "after a draft that does not fit, no mask is needed"
        assert allowed(masks_after(answer, ids("34"))) == sorted(ids(*AFTER_NUMBER))


def test_a_command_that_ends_two_processes_fails(
    processes: StructureProcesses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotset.grammar")
    with closing(processes.follow(Structure("regex", "[a-f]{2}"), STOPS, ())) as answer:
        with monkeypatch.context() as patch:
            patch.setattr(following, "ANSWER_BYTES", 0)  # a process cannot even map the memory for its masks
            masks = masks_after(answer, ())
        assert len(masks.bits) == 0 and "the process that follows the answer fails: OSError" in masks.failure
        assert len(caplog.records) == 2, "the command must be tried twice"
        assert allowed(masks_after(answer, ids("a")))


def test_only_the_last_idle_processes_are_kept(processes: StructureProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_IDLE", 2)
    with closing(opened(processes, Structure("regex", "[a-c]"))) as used:
        idle = [opened(processes, Structure("regex", pattern)) for pattern in ("ab?", "ac?", "ad?")]
        for answer in idle:
            answer.close()
        with closing(opened(processes, Structure("regex", "ae?"))):
            wait_until_ended([pid_of(answer) for answer in idle[:2]])
        assert [state_of(pid_of(answer)) for answer in (used, idle[2])] == ["S", "S"]
