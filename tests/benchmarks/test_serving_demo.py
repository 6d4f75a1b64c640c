"""The measurements of serving_demo.py are correct at a small size."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving_demo import AUTO, OFF, Batch, DemoModel, Sizes, compare, draw, serve_all

MODEL = Path(__file__).parents[2] / "models" / "demo-dsa"
TINY = Sizes(contexts=(768,), requests=(), resident=2, answer=6, growth=32, step_tokens=1024)


@pytest.fixture(scope="module")
def model() -> Iterator[DemoModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield DemoModel(str(MODEL), "cpu")
    torch.set_num_threads(threads)


def test_tiers_swap_rows_and_keep_the_answers(model: DemoModel) -> None:
    (off, auto), device_bytes = serve_all(model, TINY)
    assert (off["tiers"], auto["tiers"]) == (OFF, AUTO)
    assert off["requests"] == 2 < auto["requests"] == auto["tiered"] and off["tiered"] == 0
    assert off["miss"] == off["rows/step"] == 0 and off["same"] is None
    assert 0 < auto["miss"] < 1
    shape = model.decoder.kv_shape
    selected = shape.layers * shape.topk * auto["tiered"]
    assert 0 < auto["rows/step"] < auto["miss"] * selected, "`miss` must not count rows in a tail as selected"
    assert auto["compared"] == 2 and auto["same"] == 1
    page_bytes = 64 * shape.layers * shape.row.row_bytes
    assert device_bytes == 2 * shape.geometry(64).resident_pages(800) * page_bytes
    for row in (off, auto):
        assert 0 < row["p50 ms"] <= row["p99 ms"] and row["tokens/s"] > 0


def test_aborted_requests_end_before_the_next_batch_which_computes_the_same_prompts_again(model: DemoModel) -> None:
    engine = model.engine(*model.size(AUTO, TINY))
    for _ in range(2):
        batch = Batch(engine, [[5] * 70, [6] * 80], growth=32)
        batch.prefill()
        timed = batch.decode(3)
        assert timed.steps == 3 and len(timed.gaps) == 6 and sum(timed.gaps) <= 2 * timed.seconds
        batch.abort()
        assert engine.stats().running == 0
    assert engine.stats().requests_finished == {"abort": 4}, "the requests ran to their end instead of being aborted"
    assert engine.stats().tokens_prefilled == 2 * (70 + 80), "prompts of the first batch were reused"
    engine.audit()


def test_answers_are_compared_with_those_of_the_same_request() -> None:
    known = {0: [1, 2], 1: [3, 4]}
    assert compare([[1, 2], [3, 4], [9, 9]], known) == {"compared": 2, "same": 1.0}
    assert compare([[1, 2], [3, 5]], known) == {"compared": 2, "same": 0.5}
    assert compare([[1, 2]], {}) == {"compared": 0, "same": None}


def test_figure_is_drawn(tmp_path: Path) -> None:
    rows = [
        {"context": context, "tiers": tiers, "requests": 3, "tokens/s": 9.0, "p50 ms": 1.0, "p99 ms": 2.0}
        for context in (768, 1024)
        for tiers in (OFF, AUTO)
    ]
    draw(tmp_path / "serving.png", rows)
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
