from pathlib import Path

import pytest
import torch
from capacity import AUTO, OFF, Bar, Sizes, crowd, draw, overload, recovery
from synthetic_model import Demo

from hotset.kernels import EMPTY

MODEL = Path(__file__).parents[2] / "models" / "demo-dsa"
TINY = Sizes(device_gib=0.05, lengths=(2048,), answer=16, timed_steps=1)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(str(MODEL))


def test_stand_in_selects_what_no_indexer_could(demo: Demo) -> None:
    """Positions must be distinct, ascending and not after the query, with EMPTY only behind them, and mostly stay."""
    stand_in, topk = demo.stand_in, demo.kv_shape.topk
    before: set[int] = set()
    for at in (0, 5, topk, 4000, 4001):
        (row,) = stand_in.positions(torch.tensor([at]), group=1).tolist()
        chosen = [position for position in row if position != EMPTY]
        assert len(row) == topk and row[len(chosen) :] == [EMPTY] * (topk - len(chosen))
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] == at
        shared = len(before & set(chosen))
        before = set(chosen)
    assert 0.75 * topk < shared < topk  # of the two adjacent steps at the end


def test_tiers_hold_no_more_requests_than_off_or_fewer_than_predicted(demo: Demo) -> None:
    rows = {tiers: crowd(demo, tiers, 2048, TINY) for tiers in (OFF, AUTO)}
    assert rows[AUTO]["decoding"] >= 2 * rows[OFF]["decoding"]
    for row in rows.values():
        assert row["decoding"] >= row["predicted"]
        assert row["tokens/s"] > 0
    assert rows[AUTO]["tiered"] == rows[AUTO]["decoding"]
    assert rows[OFF]["tiered"] == 0


def test_overload_loses_requests_or_waits(demo: Demo) -> None:
    row = overload(demo, 500, 12, 0.03, sustained=False)
    assert row["counted"] == 4 * row["fit"] > row["fit"]
    assert row["answer"] < row["mean wait"] < 0.8 * row["max wait"], "four rounds, and who has ended waits no more"
    assert row["max wait"] == row["steps"] - row["answer"], (
        "the last to end has waited all the time that it did not run"
    )


def test_recovery_takes_a_passing_quick_step_for_the_end() -> None:
    def steps(*ratios: float) -> list[dict[str, float | None]]:
        during = {"auto ms": 1.0, "off ms": 1.0, "since end": None}
        return [during, *({"auto ms": r, "off ms": 1.0, "since end": float(at)} for at, r in enumerate(ratios))]

    assert recovery(steps(2, 2, 1, 2, 2, 1, 1, 1, 1.02), window=3) == (7, pytest.approx(1.01))
    assert recovery(steps(1, 1, 1, 1.04), window=3) == (3, 1.04)
    assert recovery(steps(2, 2, 2, 2, 2), window=3) == (float("inf"), float("inf"))


def test_bar_calls_a_miss_met() -> None:
    assert Bar("share", 0.96, 0.95, at_least=True).row()["met"]
    assert not Bar("share", 0.94, 0.95, at_least=True).row()["met"]
    assert Bar("cost", 1.02, 1.03).row()["met"]
    assert not Bar("cost", 1.04, 1.03).row()["met"]


def test_figure_is_not_drawn(tmp_path: Path) -> None:
    lengths = [
        {"context": 512, "tiers": tiers, "decoding": 3, "predicted": 3, "tokens/s": 9.0} for tiers in (OFF, AUTO)
    ]
    steps = [{"auto ms": 2.0, "off ms": 1.0, "since end": None}, {"auto ms": 1.0, "off ms": 1.0, "since end": 0.0}]
    draw(tmp_path / "capacity.png", lengths, steps)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
