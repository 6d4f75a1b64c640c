"""Benchmarks of kernels show another kernel's timings beside their own."""

import argparse
import json
from pathlib import Path
from typing import Any

import attention
import indexer
import pytest
import swap_in
import torch
from peer_timings import PeerTimings, add_peer_option, read_peer

COLUMNS = ("batch", "heads")
ROWS = [
    {"batch": 1, "heads": 64, "us": 10.0},
    {"batch": 8, "heads": 64, "us": 20.0},
    {"batch": 8, "heads": 16, "us": 5.0},
]
TIMINGS = [{"batch": 8, "heads": 64, "us": 30.0}, {"batch": 1, "heads": 64, "us": 9.0}]


def write(folder: Path, content: Any) -> Path:
    path = folder / "peer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_times_and_speedups_are_in_the_rows_that_the_peer_has_timed(tmp_path: Path) -> None:
    peer = read_peer(write(tmp_path, {"name": "Other", "timings": TIMINGS}), COLUMNS)
    shown = [(row["Other us"], row["speedup"]) for row in peer.beside(ROWS)]
    assert shown == [(9.0, 0.9), (30.0, 1.5), ("-", "-")]
    mean, slowest = peer.bars(ROWS, mean=1.0, slowest=1.0)
    assert mean.measured == pytest.approx((0.9 * 1.5) ** 0.5) and mean.met
    assert slowest.measured == pytest.approx(0.9) and not slowest.met
    assert peer.bars(ROWS[2:], mean=1.0, slowest=1.0) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "peer.json: Expecting"),
        ([], 'expected {"name"'),
        ({"name": "Other", "timings": []}, 'expected {"name"'),
        ({"timings": TIMINGS}, 'expected {"name"'),
        (
            {"name": "Other", "timings": [*TIMINGS, {"batch": 1, "us": 2.0}]},
            "timing 2 must have the fields batch, heads",
        ),
        (
            {"name": "Other", "timings": [TIMINGS[0] | {"rows": "fp8"}]},
            "timing 0 must have the fields batch, heads, us",
        ),
        ({"name": "Other", "timings": [TIMINGS[0] | {"us": 0}]}, "us must be a positive number, not 0"),
        ({"name": "Other", "timings": [TIMINGS[0] | {"us": "fast"}]}, "us must be a positive number, not 'fast'"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=r"peer\.json: ") as refused:
        read_peer(path, COLUMNS)
    assert message in str(refused.value)
    parser = argparse.ArgumentParser()
    add_peer_option(parser, COLUMNS)
    with pytest.raises(SystemExit):
        parser.parse_args(["--peer", str(path)])
    assert message in capsys.readouterr().err


def peer_of(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> PeerTimings:
    return PeerTimings("Other", [{column: rows[0][column] for column in columns} | {"us": 17.0}])


def test_both_kernels_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "both.png"
    of_attention: list[dict[str, Any]] = [
        {"batch": batch, "heads": 64, "rows": "fp8", "us": 10.0, "of copy": 0.5, "of matrix": 0.4, "bar": "-"}
        for batch in (1, 8)
    ]
    of_scoring: list[dict[str, Any]] = [
        {"queries": batch, "context": 1 << 15, "heads": 32, "keys": "fp8", "groups": "1 of 1", "scoring us": 10.0,
         "top-k us": 5.0, "of ceiling": 0.9}
        for batch in (1, 8)
    ]  # fmt: skip
    for draw, rows, columns in (
        (attention.draw, of_attention, attention.PEER_COLUMNS),
        (indexer.draw, of_scoring, indexer.PEER_COLUMNS),
    ):
        for peer in (None, peer_of(rows, columns)):
            draw(rows, path, peer)
            assert path.read_bytes().startswith(b"\x89PNG")
            path.unlink()


def test_swap_in_is_compared_with_sglang_unless_another_peer_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    cases = [swap_in.SwapInCase(656, slots, 8, misses) for slots in swap_in.SLOTS for misses in swap_in.MISSES]
    results = [swap_in.SwapInResult(case, 10.0, 12.0, 8.0 if case.misses else None, 100) for case in cases]
    rows = [result.row() for result in results]
    assert [row["SGLang us"] for row in swap_in.SGLANG.beside(rows)][:4] == [19.3, 24.4, 39.1, 79.3]
    other = peer_of(rows, swap_in.PEER_COLUMNS)
    assert [row["speedup"] for row in other.beside(rows)][:2] == [1.7, "-"]
    for peer, mean in ((swap_in.SGLANG, pytest.approx(4.0, rel=0.1)), (other, 1.7)):
        bars = {bar.what: bar.measured for bar in swap_in.make_bars(results, peer)}
        assert next(value for what, value in bars.items() if "geometric mean" in what) == mean
        swap_in.draw(results, tmp_path / f"{peer.name}.png", peer)
        assert (tmp_path / f"{peer.name}.png").exists()
