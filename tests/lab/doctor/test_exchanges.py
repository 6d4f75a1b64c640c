"""What ranks exchange: real ranks on CPUs, and judgements about ranks that fail, are wrong or slow."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.doctor.subjects import subject
from processes import children_of

from hotset.base.host_checks import Finding
from hotset.lab.doctor import exchanges, ranks
from hotset.lab.doctor.exchanges import check_gloo, check_nccl, check_symmetric_memory
from hotset.lab.doctor.findings import Subject
from hotset.lab.doctor.ranks import Exchange, Ranks, RanksFailed, run_ranks

NCCL = Exchange("8 workers communicate over NCCL", False, False, True, 60e-6, 40e-6, 700e-6)
SYMMETRIC = Exchange("8 workers communicate over symmetric memory", True, False, True, 20e-6, 12e-6, 700e-6)
EIGHT = {"gpus": tuple(range(8)), "ranks": 8}

pytestmark = pytest.mark.usefixtures("real_process_starts")  # a rank ends with the test


def give(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Ranks], Exchange]) -> list[Ranks]:
    """Replaces the processes of ranks by a function. Returns the list of what will be started."""
    started: list[Ranks] = []

    def run(asked: Ranks, seconds: float) -> Exchange:
        started.append(asked)
        return answer(asked)

    monkeypatch.setattr(exchanges, "run_ranks", run)
    return started


def fail(asked: Ranks) -> Exchange:
    raise RanksFailed("rank 1 of 8: DistBackendError: unhandled cuda error", "Failed to bind NVLink SHARP")


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1
    return found[0]


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"^rank [01] of 2: \w+Error: "):
        run_ranks(Ranks(("cuda:98", "cuda:98")), 120.0)


def test_ranks_that_hang_are_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children_of(os.getpid())
    with pytest.raises(RanksFailed, match=r"^rank 0 of 2 did not finish within 0.01 s$"):
        run_ranks(Ranks(("cpu", "cpu")), 0.01)
    left = children_of(os.getpid()) - before
    assert not [pid for pid in left if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_first_warning_of_nccl_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "nccl.7").write_text("NCCL version 2.28.9\n")
    (tmp_path / "nccl.8").write_text("host:8:9 [1] init.cc:4 NCCL WARN Cuda failure 'x'\nNCCL WARN later\n")
    assert str(RanksFailed("rank 1 failed", ranks._first_warning(tmp_path))) == (
        "rank 1 failed; NCCL says: Cuda failure 'x'"
    )
    assert str(RanksFailed("rank 1 failed")) == "rank 1 failed"


def test_ranks_use_the_gpus_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started = give(monkeypatch, lambda asked: NCCL)
    check_nccl(subject(gpus=(2, 3), ranks=2))
    assert started == [Ranks(("cuda:2", "cuda:3"), 1, "nccl")]
    settings = {"tensor_parallel_size": 4, "ranks_per_gpu": 2}
    check_symmetric_memory(subject(settings=settings, gpus=(1, 0), ranks=4))
    assert started[1] == Ranks(("cuda:1", "cuda:1", "cuda:0", "cuda:0"), 2, "auto")


def test_fast_ranks_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, lambda asked: SYMMETRIC if asked.collectives == "auto" else NCCL)
    found = only(check_nccl(subject(**EIGHT)))
    assert found == Finding("good", f"{NCCL.choice}: 256 KiB in 60 us, in a CUDA graph 40 us; 64 MiB in 700 us")
    found = only(check_symmetric_memory(subject(**EIGHT)))
    assert found.level == "good" and found.what.endswith("64 MiB in 700 us; torch's multicast is off")


@pytest.mark.parametrize(
    ("exchange", "level", "words"),
    [
        (Exchange("NCCL", False, False, False, 1e-6, 1e-6, 1e-6), "broken", "wrong sum"),
        (Exchange("NCCL", False, False, True, 1e-3, 1e-3, 1.0), "slow", "in a CUDA graph 1.0 ms"),
    ],
)
def test_wrong_sums_are_broken_and_slow_ones_slow(
    exchange: Exchange, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, lambda asked: exchange)
    found = only(check_nccl(subject(**EIGHT)))
    assert found.level == level and words in found.what and found.mend


def test_nccl_that_fails_is_tried_without_its_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    started = give(monkeypatch, lambda asked: NCCL if asked.environment else fail(asked))
    found = only(check_nccl(subject(**EIGHT)))
    assert found.level == "broken" and "NCCL says: Failed to bind NVLink SHARP" in found.what
    assert found.mend.startswith("set NCCL_NVLS_ENABLE=0")
    assert [asked.environment for asked in started] == [{}, {"NCCL_NVLS_ENABLE": "0"}]
    give(monkeypatch, fail)
    found = only(check_nccl(subject(**EIGHT)))
    assert found.level == "broken" and "does not help" in found.mend


def test_symmetric_memory_that_fails_is_broken_and_without_peer_access_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, fail)
    found = only(check_symmetric_memory(subject(**EIGHT)))
    assert found.level == "broken" and "--collectives nccl" in found.mend
    give(monkeypatch, lambda asked: NCCL)
    assert only(check_symmetric_memory(subject(**EIGHT))).level == "slow"


def test_ranks_that_share_a_gpu_are_slow_without_the_multi_process_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    give(monkeypatch, lambda asked: Exchange("NCCL", False, False, True, 5e-3, 5e-3, 1.0))
    shared = subject(settings={"tensor_parallel_size": 2, "ranks_per_gpu": 2}, gpus=(0,), ranks=2)
    found = only(check_nccl(shared))
    assert found.level == "slow" and "nvidia-cuda-mps-control -d" in found.mend
    (tmp_path / "control").touch()
    assert only(check_nccl(shared)).level == "good"


@pytest.mark.parametrize("check", [check_nccl, check_symmetric_memory])
def test_one_rank_exchanges_nothing(check: Callable[[Subject], list[Finding]]) -> None:
    assert only(check(subject(gpus=(0,)))).level == "skipped"


def test_symmetric_memory_is_skipped_if_the_engine_does_not_use_it() -> None:
    found = only(check_symmetric_memory(subject(settings={"collectives": "nccl"}, **EIGHT)))
    assert found.level == "skipped"


def test_gloo_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    started = give(monkeypatch, fail)
    assert only(check_gloo(subject(ranks=4))).level == "broken"
    assert started == [Ranks(("cpu",) * 4)]
