"""`hotset record` and `hotset simulate` on the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotset.base.errors import ConfigError
from hotset.cli import app
from hotset.lab.simulate.topk_trace import TopkTrace, TraceHeader, read_trace, write_trace

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    steps = [np.sort(generator.choice(60 + step, 4, replace=False)) for step in range(30)]
    selections = np.array(steps, dtype=np.int32).reshape(1, 30, 1, 4).repeat(2, axis=2)
    path = tmp_path / "small.topk"
    write_trace(path, TopkTrace(TraceHeader("small", 2, 4, 1, 30, (60,), 8), selections))
    return path


def test_a_recorded_trace_is_simulated(tmp_path: Path) -> None:
    out = tmp_path / "demo.topk"
    flags = ("--requests", "2", "--steps", "3", "--shortest", "256", "--longest", "290", "--device", "cpu")
    recorded = run("record", str(ROOT / "models" / "demo-dsa"), "--out", str(out), *flags)
    assert recorded.exit_code == 0, recorded.exception
    header = read_trace(out).header
    assert (header.requests, header.steps, header.layers, header.k) == (2, 3, 6, 128)
    assert header.recorded["command"].startswith("hotset") and header.recorded["dtype"] == "float32"
    simulated = run("simulate", str(out), "--policy", "lru", "--slots", "128", "--json")
    (result,) = json.loads(simulated.stdout)["results"]
    assert result["selected"] == 2 * 2 * 6 * 128 and 0 < result["lookups"] < result["selected"]


def test_tables_json_and_a_picture(small: Path, tmp_path: Path) -> None:
    shown = run("simulate", str(small), "--plot", str(tmp_path / "rates.svg"))
    assert shown.exit_code == 0
    for text in ("small: 1 requests x 30 steps", "belady", "lru", "8x"):
        assert text in shown.stdout
    assert "<svg" in (tmp_path / "rates.svg").read_text()
    mine = tmp_path / "mine.py"
    mine.write_text("def victims(rows, count):\n    return range(count)\n")
    printed = json.loads(run("simulate", str(small), "--policy", "lru", "--policy", str(mine), "--json").stdout)
    assert [(result["policy"], result["slots"]) for result in printed["results"]] == [
        (policy, slots) for slots in (4, 8, 16, 32) for policy in ("lru", str(mine))
    ]
    for result in printed["results"]:
        assert result["misses"] == sum(layer["misses"] for layer in result["by_layer"])
    refused = run("simulate", str(small), "--slots", "2k")
    assert isinstance(refused.exception, ConfigError) and "--slots must be numbers of slots" in str(refused.exception)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 40 * number, "input_length": 3000 + number, "output_length": 30, "hash_ids": list(range(6))}
        for number in range(20)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_traffic_on_gpus_takes_the_time_of_the_cost_model(requests: Path, tmp_path: Path) -> None:
    flags = ("--model", "glm-5.2", "--gpu", "h200", "--gpus", "8", "--host-gib", "1024", "--max-model-len", "8192")
    shown = run("simulate", str(requests), *flags, "--plot", str(tmp_path / "traffic.html"))
    assert shown.exit_code == 0, shown.exception
    for text in ("requests at once", "first token after", "parks"):
        assert text in shown.stdout
    assert "Time to first token" in (tmp_path / "traffic.html").read_text()
    result, slower = (
        json.loads(run("simulate", str(requests), *flags, "--gpu-tb-per-s", speed, "--json").stdout)
        for speed in ("4.8", "2.4")
    )
    assert result["requests"] == 20 and 0 < result["reused"] < 1
    assert 0 < sum(result["token_s"]) < sum(slower["token_s"])


def test_traffic_takes_given_times_without_a_gpu(requests: Path) -> None:
    flags = ("--model", str(ROOT / "models" / "demo-dsa"), "--scale-lengths", "0.1", "--num-requests", "4")
    printed = run("simulate", str(requests), *flags, "--step-ms", "50", "--trace-speed", "0.001", "--json")
    result = json.loads(printed.stdout)
    assert (result["requests"], result["max_running"], result["steps"]) == (4, 1, 12)
    assert result["first_token_s"] == pytest.approx([0.05] * 4)


def test_wrong_traffic_is_refused_by_name(requests: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0, "output_length": 3}\n')
    glm = ("--model", "glm-5.2", "--gpu", "h200", "--gpus", "8", "--host-gib", "1024", "--max-model-len", "2048")
    for arguments, message in (
        ((str(requests), "--gpu", "h200"), "--model is required for a trace of requests"),
        ((str(requests), *glm, "--policy", "lru"), "--policy and --slots are for a trace of selections"),
        ((str(requests), "--model", "glm-5.2"), "the cost model knows GPUs only"),
        ((str(requests), *glm), "no request of the trace fits into a context of 2048 tokens; use --scale-lengths"),
        ((str(requests), *glm, "--trace-speed", "0"), "--trace-speed must be a finite number above 0"),
        ((str(broken), *glm), "broken.jsonl, line 1: the field 'input_length' is missing"),
        ((str(requests), "--model", "glm-5.2", "--gpu", "h100", "--host-gib", "9"), "the weights take"),
        (("README.md", "--model", "glm-5.2"), "--model is for a trace of requests"),
    ):
        result = run("simulate", *arguments)
        assert isinstance(result.exception, ConfigError), arguments
        assert message in str(result.exception), arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "README.md"), "README.md: not a top-k trace: expected it to begin with"),
        (("simulate", "none.topk"), "none.topk: the top-k trace cannot be read: No such file"),
        (("simulate", "x.topk", "--policy", "fifo"), "--policy fifo: use one of lru, belady"),
        (("simulate", "x.topk", "--plot", "x.gif"), "the name must end in .svg or .html"),
        (("record", "models/demo-dsa", "--out", "/nowhere/at/all.topk"), "the directory /nowhere/at does not exist"),
        (("record", "embedded", "--out", "x.topk"), "has no indexer"),
        (("record", "models/demo-dsa", "--out", "x.topk", "--steps", "1"), "--steps must be at least 2"),
        (("record", "models/demo-dsa", "--out", "x.topk", "--longest", "300"), "--longest 300 is lower than"),
    ],
)
def test_wrong_input_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(ROOT)
    result = run(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
