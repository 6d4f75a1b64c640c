"""The measurements of capacity.py are correct at a small size."""

from pathlib import Path

import pytest
import torch
from capacity import AUTO, OFF, Bar, Sizes, draw, fill_engine, overload, recovery
from synthetic_model import SyntheticDemoModel

from hotset.kernels import EMPTY

MODEL = Path(__file__).parents[2] / "models" / "demo-dsa"
TINY = Sizes(device_gib=0.05, lengths=(2048,), answer=16, timed_steps=1)


@pytest.fixture(scope="module")
def model() -> SyntheticDemoModel:
    return SyntheticDemoModel(str(MODEL))


def test_synthetic_selections_are_valid_and_local(model: SyntheticDemoModel) -> None:
    """Positions are distinct, ascending and not after the query. All EMPTY entries follow them. The query at the
    next position selects most of them again."""
    topk = model.kv_shape.topk
    previous: set[int] = set()
    for query in (0, 5, topk, 4000, 4001):
        (row,) = model.synthetic.positions(torch.tensor([query]), group=1).tolist()
        chosen = [position for position in row if position != EMPTY]
        assert len(row) == topk and row[len(chosen) :] == [EMPTY] * (topk - len(chosen))
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] == query
        shared = len(previous & set(chosen))
        previous = set(chosen)
    assert 0.75 * topk < shared < topk  # `shared` refers to the last two queries, whose positions are adjacent


def test_tiers_hold_more_requests_than_off_and_as_many_as_predicted(model: SyntheticDemoModel) -> None:
    rows = {tiers: fill_engine(model, tiers, 2048, TINY) for tiers in (OFF, AUTO)}
    assert rows[AUTO]["decoding"] >= 2 * rows[OFF]["decoding"]
    for row in rows.values():
        assert row["decoding"] >= row["predicted"]
        assert row["tokens/s"] > 0
    assert rows[AUTO]["tiered"] == rows[AUTO]["decoding"]
    assert rows[OFF]["tiered"] == 0


def test_overload_counts_every_request_and_its_waits(model: SyntheticDemoModel) -> None:
    row = overload(model, 500, 12, 0.03, sustained=False)
    assert row["counted"] == 4 * row["fit"] > row["fit"]
    assert row["answer"] < row["mean wait"] < 0.8 * row["max wait"], (
        "the requests must run in four waves, and a request that has ended must not be counted as waiting"
    )
    assert row["max wait"] == row["steps"] - row["answer"], (
        "the last request must wait in every step in which it gets no token"
    )


def test_recovery_ignores_a_single_fast_step() -> None:
    def steps(*ratios: float) -> list[dict[str, float | None]]:
        during = {"auto ms": 1.0, "off ms": 1.0, "since end": None}
        return [during, *({"auto ms": r, "off ms": 1.0, "since end": float(n)} for n, r in enumerate(ratios))]

    assert recovery(steps(2, 2, 1, 2, 2, 1, 1, 1, 1.02), window=3) == (7, pytest.approx(1.01))
    assert recovery(steps(1, 1, 1, 1.04), window=3) == (3, 1.04)
    assert recovery(steps(2, 2, 2, 2, 2), window=3) == (float("inf"), float("inf"))


def test_bar_is_met_on_the_right_side_of_its_limit() -> None:
    assert Bar("share", 0.96, 0.95, at_least=True).met
    assert not Bar("share", 0.94, 0.95, at_least=True).met
    assert Bar("cost", 1.02, 1.03).met
    assert Bar("cost", 1.04, 1.03).row()["verdict"] == "MISSED"


def test_figure_is_drawn(tmp_path: Path) -> None:
    lengths = [
        {"context": 512, "tiers": tiers, "decoding": 3, "predicted": 3, "tokens/s": 9.0} for tiers in (OFF, AUTO)
    ]
    steps = [{"auto ms": 2.0, "off ms": 1.0, "since end": None}, {"auto ms": 1.0, "off ms": 1.0, "since end": 0.0}]
    draw(tmp_path / "capacity.png", lengths, steps)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
