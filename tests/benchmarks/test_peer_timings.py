"""Benchmarks of kernels show another kernel's timings beside their own."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from peer_timings import add_peer_option, read_peer

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
