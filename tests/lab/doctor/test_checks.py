"""The loop over the checks: one that hangs or crashes is named, and the others run."""

import os
import time
from typing import Any

import pytest
from lab.doctor.subjects import subject

from hotset.base.errors import ConfigError
from hotset.base.host_checks import Finding
from hotset.base.status_line import TaskProgress, ignore_progress
from hotset.lab.doctor import checks
from hotset.lab.doctor.checks import GPUS, MACHINE, all_checks, examine, run_checks
from hotset.lab.doctor.child import CallFailed
from hotset.lab.doctor.findings import Check, CheckResult, Subject, show_seconds, worst


def tell_pid(subject: Subject) -> list[Finding]:
    return [Finding("good", str(os.getpid()))]


def hang(subject: Subject) -> list[Finding]:
    time.sleep(1000)
    return []


def fail(subject: Subject) -> list[Finding]:
    raise ValueError("a bug of the check")


def pids(results: list[CheckResult]) -> list[str]:
    return [result.findings[0].what for result in results if result.findings[0].level == "good"]


def test_a_check_that_hangs_is_ended_and_named_and_the_others_run() -> None:
    table = [Check("a", tell_pid), Check("b", hang, "restart", seconds=0.05), Check("c", tell_pid)]
    shown: list[TaskProgress] = []
    results = run_checks(table, subject(), shown.append)
    assert [result.name for result in results] == ["a", "b", "c"]
    assert results[1].findings == (Finding("broken", "did not finish within 0.05 s", "restart"),)
    assert [progress.title for progress in shown] == ["Checking: a", "Checking: b", "Checking: c"]
    first, second = pids(results)
    assert first != second


def test_checks_share_a_process_except_those_that_want_to_be_alone() -> None:
    table = [Check("a", tell_pid), Check("b", fail), Check("c", tell_pid), Check("d", tell_pid, alone=True)]
    results = run_checks(table, subject(), ignore_progress)
    assert results[1].findings[0].what == "ValueError: a bug of the check"
    first, second, third = pids(results)
    assert first == second != third


def test_a_machine_without_a_driver_has_one_line_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_gpu_driver", lambda: False)
    names = [check.name for check in all_checks(subject())]
    assert names == [*(check.name for check in MACHINE), "GPUs", "gloo"]
    (found,) = checks.why_no_gpu(subject())
    assert found.level == "skipped" and found.what.startswith("no GPU was found: ")
    (found,) = checks.why_no_gpu(subject(settings={"device": "cpu"}))
    assert found.what == "--device cpu uses none"


def test_a_machine_with_a_driver_is_asked_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_gpu_driver", lambda: True)
    assert list(all_checks(subject(gpus=(0,)))) == [*MACHINE, *GPUS]
    assert GPUS[0] in all_checks(subject()), "it says why they cannot be used"
    assert GPUS[0] not in all_checks(subject(settings={"device": "cpu"}))


@pytest.mark.parametrize(
    ("settings", "found", "ranks"),
    [
        ({}, (0, 1, 2), 3),
        ({}, (), 1),
        ({"tensor_parallel_size": 4, "ranks_per_gpu": 2}, (0, 1), 4),
        ({"tensor_parallel_size": 4, "executor": "ray"}, (0, 1), 2),
    ],
)
def test_each_gpu_has_a_rank_unless_the_engine_divides_its_model(
    settings: dict[str, Any], found: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_gpu_driver", lambda: True)
    monkeypatch.setattr("hotset.lab.doctor.child.ChildProcess.call", lambda self, *arguments, seconds: found)
    examined = checks.with_gpus(subject(settings=settings))
    assert (examined.gpus, examined.ranks) == (found, ranks)


def test_cuda_that_does_not_start_is_broken_and_unknown_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: Exception) -> Any:
        def call(subject: Subject) -> Subject:
            raise error

        return call

    monkeypatch.setattr(checks, "MACHINE", ())
    monkeypatch.setattr(checks, "CPUS", (Check("gloo", tell_pid),))
    monkeypatch.setattr(checks, "with_gpus", refuse(CallFailed("did not finish within 60 s")))
    results = examine(subject(), ignore_progress)
    assert [(result.name, result.findings[0].level) for result in results] == [("GPUs", "broken"), ("gloo", "good")]
    assert results[0].findings[0].what == "CUDA does not start: did not finish within 60 s"
    monkeypatch.setattr(checks, "with_gpus", refuse(ConfigError("GPU 9 does not exist")))
    with pytest.raises(ConfigError):
        examine(subject(), ignore_progress)


def test_the_worst_level_is_that_of_the_command() -> None:
    good, slow, broken = (Finding(level, "") for level in ("good", "slow", "broken"))  # type: ignore[arg-type]
    assert (worst([good]), worst([slow, good]), worst([slow, broken, good])) == ("good", "slow", "broken")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00012, "120 us"), (0.002, "2.0 ms"), (1.5, "1.5 s"), (90.0, "1.5 min"), (5400.0, "1.5 h")]
)
def test_durations_have_a_fitting_unit(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
