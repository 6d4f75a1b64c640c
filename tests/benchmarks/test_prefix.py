"""The measurements of prefix.py are correct at a small size, on a CPU."""

import argparse
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import prefix
import prefix_load
import pytest
import torch
from prefix import (
    QUICK,
    Results,
    Sizes,
    make_options,
    measure_conversations,
    measure_nothing_shared,
    measure_start,
    sizes_of,
)
from prefix_load import Answer, Conversations, Script, compare
from prefix_start import PrefixStart, StartSizes
from test_decode import small_config, small_spec

from hotset.base.config import EngineConfig
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.models.spec import KvStorage

TINY = Sizes(conversations=2, turns=2, system=160, message=30, answer=6, requests=1, prompt=130, rounds=2)
VOCAB, PAGE_ROWS = 512, 64


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options for a small model with random weights in float64, in which near ties do not matter."""
    (tmp_path / "config.json").write_text(json.dumps(small_config(128)))

    def build_small(config: EngineConfig) -> Engine:
        return build_engine(replace(config, load_format="dummy", dtype="float64", max_num_batched_tokens=64))

    monkeypatch.setattr(prefix, "build_engine", build_small)
    outputs = ["--json", str(tmp_path / "prefix.json"), "--markdown", str(tmp_path / "prefix.md")]
    return make_options().parse_args(["--model", str(tmp_path), *outputs])


def test_conversations_reuse_every_full_page_and_get_the_same_answers(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Conversations] = []

    def remembered(*arguments: object) -> Conversations:
        runs.append(prefix_load.converse(*arguments))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(prefix, "converse", remembered)
    results = Results(options)
    measure_conversations(options, TINY, VOCAB, time.thread_time, results)
    without, with_cache = runs
    assert not any(answer.cached for answer in without.all)
    first_turns = sorted(answers[0].cached for answers in with_cache.answers)
    assert first_turns == [0, 128], "all but one must wait for the system prompt, which is computed once"
    for answers in with_cache.answers:
        for before, after in pairwise(answers):
            rows = len(before.prompt) + TINY.answer - 1  # the last token of an answer has no row
            assert after.cached == rows // PAGE_ROWS * PAGE_ROWS
    (compared,) = results.tables["Answers"]
    assert compared["compared"] == 4 and compared["different"] == 0
    off, on = _conversations(results)
    assert off["prompt tokens"] == 2 * (190 + 226) == on["prompt tokens"] and off["reused"] == 0
    assert on["reused"] == sum(answer.cached for answer in with_cache.all) / on["prompt tokens"] == 512 / 832
    bars = {bar.what: bar for bar in results.bars}
    whole = bars["all turns: time, without / with the cache"]
    assert whole.measured == off["seconds"] / on["seconds"]
    assert bars["answers that differ by more than a near tie"].met
    written = json.loads(options.json.read_text())["results"]
    assert written["Answers"] == [compared] and len(written["Bars"]) == len(results.bars) == 3
    assert "| with the cache |" in options.markdown.read_text()


def _conversations(results: Results) -> list[dict[str, float]]:
    (table,) = (table for title, table in results.tables.items() if title.startswith("2 conversations"))
    return table


def test_requests_that_share_nothing_are_measured_in_turn_with_a_full_host_store(options: argparse.Namespace) -> None:
    results = Results(options)
    measure_nothing_shared(options, TINY, VOCAB, time.thread_time, results)
    (rows,) = results.tables.values()
    assert [row["engine"] for row in rows] == ["without", "with the cache"]
    assert rows[0]["evicted pages"] == 0 < rows[1]["evicted pages"] and rows[1]["ratio"] > 0
    (bar,) = results.bars
    assert bar.measured == rows[1]["ratio"]


class Judge:
    """Returns the same difference of log-probabilities for all tokens."""

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self.asked: list[tuple[list[int], int, int]] = []

    def gap(self, prompt: list[int], likely: int, other: int) -> float:
        self.asked.append((prompt, likely, other))
        return self._gap


@pytest.mark.parametrize(("gap", "wrong"), [(0.0001, 0), (0.5, 1)])
def test_answers_that_differ_are_judged_at_their_first_different_token(gap: float, wrong: int) -> None:
    expected, measured = (
        Conversations(1.0, [[Answer([1, 2], 0.0, token_ids=tokens), Answer([3], 0.0, token_ids=[9])]])
        for tokens in ([5, 6, 7], [5, 8, 9])
    )
    judge = Judge(gap)
    result = compare(expected, measured, judge)  # type: ignore[arg-type]
    assert (result.compared, result.different, result.gaps, result.wrong) == (2, 1, [gap], wrong)
    assert judge.asked == [([1, 2, 5], 6, 8)]


def test_options_set_the_numbers_of_conversations_and_turns() -> None:
    sizes = sizes_of(make_options().parse_args(["--turns", "3"]))
    assert (sizes.conversations, sizes.turns, sizes.system) == (16, 3, 4096)
    assert sizes_of(make_options().parse_args(["--quick", "--conversations", "2"])) == replace(QUICK, conversations=2)


def test_scripts_with_the_same_seed_are_equal() -> None:
    script = Script.make(2, 3, 10, 4, VOCAB, seed=1)
    assert script == Script.make(2, 3, 10, 4, VOCAB, seed=1) != Script.make(2, 3, 10, 4, VOCAB, seed=2)
    assert len(script.system) == 10 and [len(messages) for messages in script.messages] == [3, 3]


SIZES = StartSizes(prefix=256, rest=20, chunk=64, repeats=2, computed=1, answer=4)


def make_start(clock: prefix_load.Clock) -> PrefixStart:
    device, storage = torch.device("cpu"), KvStorage(fp8_rows=False, fp8_keys=False)
    return PrefixStart("small", small_spec(), device, torch.float64, SIZES, clock, storage)


def test_requests_start_from_a_prefix_on_the_host_in_every_residence(options: argparse.Namespace) -> None:
    start = make_start(time.thread_time)
    shape = start.engine.executor.pool.shape  # type: ignore[union-attr]
    results = Results(options)
    measure_start(start, 500, time.thread_time, results)
    start.engine.audit()
    start.close()
    assert not results.failed
    (table,) = results.tables.values()
    rows = {row["start"]: row for row in table}
    assert list(rows) == ["computed", "resident", "known", "decode", "tiered", "streamed"]
    resident = rows["resident"]
    token_bytes = shape.row.row_bytes * shape.layers + shape.key.row_bytes * shape.groups
    assert resident["copied MB"] == pytest.approx(SIZES.prefix * token_bytes * 1e-6)
    assert resident["GB/s"] == pytest.approx(resident["copied MB"] / resident["copy ms"])
    assert resident["same tokens of 4"] == rows["streamed"]["same tokens of 4"] == SIZES.answer
    assert len(results.bars) == 5 and "Bars" in json.loads(options.json.read_text())["results"]


def test_starts_without_time_are_skipped_and_one_that_fails_does_not_end_the_run(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    class Started:
        sizes = SIZES

        def __getattr__(self, name: str) -> object:
            def case() -> dict[str, object]:
                if name == "resident":
                    raise RuntimeError("out of memory")
                return {"start": name, "first token ms": 1.0}

            case.__name__ = name
            return case

    results = Results(options)
    measure_start(Started(), 3.5, clock, results)  # type: ignore[arg-type]
    assert [row["start"] for table in results.tables.values() for row in table] == ["computed", "known"]
    printed = capsys.readouterr()
    assert results.failed and "out of memory" in printed.err
    assert all(f"skipped: {name}" in printed.out for name in ("decode", "tiered", "streamed"))
