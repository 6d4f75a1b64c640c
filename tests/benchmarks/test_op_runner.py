"""The runner of op benchmarks measures all cases, compares with a peer and tries tunings. All ops have valid tables."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import op_runner
import pytest
import swap_in
import torch
from op_runner import OpBenchmark, PeerComparison, Sweep, run
from peer_timings import PeerTimings
from report import Bar, Row

OPS = ("attention", "experts", "fp8_experts", "fp8_linear", "indexer", "sampling", "slice_pack", "small_ops", "swap_in")


def measure(case: int) -> Row:
    if case == 3:
        raise ArithmeticError("a wrong result")
    return {"batch": case, "us": 10.0 * case}


def sweeps() -> Iterator[Sweep]:
    def seconds(tuning: int) -> float:
        if tuning < 0:
            raise RuntimeError("does not fit")
        return 1e-6 * tuning

    yield Sweep("Tiles", {"slow": 9, "too large": -1, "fast": 4}, {"batch 1": seconds})


OP = OpBenchmark(
    doc="Measures nothing.",
    title="An op",
    cases=(1, 2, 3),
    quick=(2,),
    measure=measure,
    bars=lambda rows: [Bar("slowest", max(row["us"] for row in rows), 15.0)],
    peer=PeerComparison(columns=("batch",), mean=1.0, slowest=1.0),
    sweeps=sweeps,
)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_runner, "require_gpu", lambda: None)
    monkeypatch.setattr(op_runner, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(op_runner, "matrix_rate", lambda: 7e14)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def run_with(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["an_op.py", *flags])
    run(OP)


def test_all_cases_are_measured_also_after_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = tmp_path / "peer.json"
    peer.write_text(json.dumps({"name": "Other", "timings": [{"batch": 2, "us": 30.0}]}))
    path = tmp_path / "an_op.json"
    with pytest.raises(SystemExit, match="3: a wrong result"):
        run_with(monkeypatch, "--json", str(path), "--png", str(tmp_path / "an_op.png"), "--peer", str(peer))
    rows = json.loads(path.read_text())["results"]
    assert [(row["batch"], row["speedup"]) for row in rows] == [(1, "-"), (2, 1.5)]
    bars = json.loads(path.with_name("an_op-bars.json").read_text())["results"]
    assert [bar["verdict"] for bar in bars] == ["MISSED", "met", "met"]
    assert (tmp_path / "an_op.png").read_bytes().startswith(b"\x89PNG")
    assert "copy 4.00 TB/s" in capsys.readouterr().out


def test_quick_measures_some_cases_and_no_case_begins_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "an_op.json"
    run_with(monkeypatch, "--quick", "--json", str(path))
    assert [row["batch"] for row in json.loads(path.read_text())["results"]] == [2]
    run_with(monkeypatch, "--seconds", "-1")
    assert capsys.readouterr().out.count("not measured") == 3


def test_tunings_are_sorted_by_their_times_and_those_that_fail_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep.json"
    run_with(monkeypatch, "--sweep", "--json", str(path))
    rows = json.loads(path.read_text())["results"]
    assert [(row["tuning"], row["batch 1 us"]) for row in rows] == [("fast", 4.0), ("slow", 9.0)]


@pytest.mark.parametrize("name", OPS)
def test_the_table_of_an_op_has_distinct_cases(name: str) -> None:
    op: OpBenchmark = import_module(name).OP
    assert op.doc and f"python benchmarks/{name}.py" in op.doc
    assert len(set(op.cases)) == len(op.cases) > 0 and set(op.quick) <= set(op.cases)


def peer_of(rows: list[Row], columns: tuple[str, ...]) -> PeerTimings:
    return PeerTimings("Other", [{column: rows[0][column] for column in columns} | {"us": 17.0}])


def test_swap_in_is_compared_with_sglang_unless_another_peer_is_given() -> None:
    assert swap_in.OP.peer is not None and swap_in.OP.peer.default is swap_in.SGLANG
    cases = [case for case in swap_in.OP.cases if case.row_bytes == 656 and case.batch == 8]
    rows: list[dict[str, Any]] = [
        case.columns | {"us": 10.0, "gather us": 8.0 if case.misses else "-"} for case in cases
    ]
    assert [row["SGLang us"] for row in swap_in.SGLANG.beside(rows)][:4] == [19.3, 24.4, 39.1, 79.3]
    other = peer_of(rows, swap_in.PEER_COLUMNS)
    assert [row["speedup"] for row in other.beside(rows)][:2] == [1.7, "-"]
    (mean, _), (of_other, _) = (peer.bars(rows, 1.0, 1.0) for peer in (swap_in.SGLANG, other))
    assert mean.measured == pytest.approx(4.0, rel=0.1) and of_other.measured == pytest.approx(1.7)
    assert [bar.measured for bar in swap_in.bars(rows)] == [10.0, 2.0]
