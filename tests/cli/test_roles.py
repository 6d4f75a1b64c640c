"""`--prefill-args` and `--decode-args`: which settings each engine gets, and which flags are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from harness import tiny_directory

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.cli import app, main
from hotset.fleet.local import engines as local_engines
from hotset.fleet.local.engines import RoleEngine, check_engines
from hotset.fleet.local.roles import EngineCounts, role_engines

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "models" / "demo-dsa")


def engines_of(counts: str, *flags: str) -> list[RoleEngine]:
    """Returns the engines of `hotset serve DEMO --disaggregate counts` with further flags."""
    command = typer.main.get_command(app).commands["serve"]
    values = dict(command.make_context("serve", [DEMO, *flags]).params)
    texts = [values.pop(name) or () for name in ("prefill_args", "decode_args")]
    return role_engines(EngineCounts.parse(counts), values, *texts)


def test_counts_are_parsed() -> None:
    assert EngineCounts.parse("2p1D") == EngineCounts(2, 1)
    assert [engine.name for engine in engines_of("2P1D")] == ["prefill 1", "prefill 2", "decode 1"]


@pytest.mark.parametrize("text", ["", "1P", "0P1D", "1P0D", "1D1P", "-1P1D", "1P1D1", "99P99D", "٣P1D"])
def test_invalid_counts_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="like 1P1D"):
        EngineCounts.parse(text)


def test_each_role_has_its_flags_and_the_common_ones() -> None:
    prefill, decode = engines_of(
        "1P1D",
        *("--max-num-seqs", "8", "--page-rows", "16"),
        *("--prefill-args", "--tensor-parallel-size 4 --max-num-seqs 256"),
        *("--decode-args", "--data-parallel-size=4 --no-prefix-cache --tiers 'always'"),
    )
    assert (prefill.config.role, prefill.config.tensor_parallel_size, prefill.config.page_rows) == ("prefill", 4, 16)
    assert prefill.config.max_num_seqs == 256, "a role's flag replaces the common one, also by the default value"
    assert (decode.config.role, decode.config.data_parallel_size, decode.config.max_num_seqs) == ("decode", 4, 8)
    assert (decode.config.prefix_cache, decode.config.tiers, decode.config.tensor_parallel_size) == (False, "always", 1)
    assert prefill.config.handoff_secret == decode.config.handoff_secret is not None


def test_args_are_given_once_for_all_engines_of_a_role_or_once_for_each() -> None:
    def sizes(*flags: str) -> list[int]:
        return [engine.config.tensor_parallel_size for engine in engines_of("2P1D", *flags)]

    assert sizes("--prefill-args", "--tensor-parallel-size 2") == [2, 2, 1]
    assert sizes("--prefill-args", "--tensor-parallel-size 2", "--prefill-args", "") == [2, 1, 1]
    assert sizes("--tensor-parallel-size", "4", "--decode-args", "--tensor-parallel-size 1") == [4, 4, 1]
    with pytest.raises(ConfigError, match="given 2 times, but --disaggregate starts 3 prefill engines; give it once"):
        engines_of("3P1D", "--prefill-args", "", "--prefill-args", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--tensor-paralel-size 2", "No such option: --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("--tensor-paralel-size=2", "No such option: --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("--tensor-parallel-size two", "Invalid value for '--tensor-parallel-size'"),
        ("--tensor-parallel-size", "--tensor-parallel-size"),
        ("--tiers sometimes", "'sometimes'"),
        ("--max-num-seqs 0", "prefill 1: --max-num-seqs must be at least 1"),
        ("'", "No closing quotation"),
        ("another-model", "unexpected extra argument"),
        ("--help", "No such option: --help"),
        ("--disaggregate 1P1D", "No such option: --disaggregate"),
        ("--port 1234", "--port cannot be set for one engine; give it to hotset serve itself"),
        ("--host 0.0.0.0", "--host cannot be set for one engine"),
        ("--control 127.0.0.1:0", "--control cannot be set for one engine"),
        ("--transfer mooncake", "--transfer cannot be set for one engine"),
        ("--dtype float64", "--dtype cannot be set for one engine"),
        ("--role decode", "--role cannot be set for one engine; leave it out"),
        ("--model other", "--model cannot be set for one engine; leave it out"),
        ("--handoff-secret s3cret-that-is-long", "--handoff-secret cannot be set for one engine"),
        ("--kv-events tcp://127.0.0.1:5557", "prefill 1: --disaggregate gives each engine its own ports; use port 0"),
        ("--gpus 0,0", "prefill 1: --gpus 0,0 has GPU 0 twice"),
        ("--data-parallel-size 2", "prefill 1: --role prefill does not support --data-parallel-size; start several"),
    ],
)
def test_flags_that_an_engine_cannot_have_are_refused(
    args: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotset", "serve", DEMO, "--disaggregate", "1P1D", "--prefill-args", args])
    with pytest.raises(SystemExit) as ended:
        main()
    output, error = capsys.readouterr()
    assert (ended.value.code, output) == (1, "")
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill-args", ""], "are for --disaggregate"),
        (["--disaggregate", "1P1D", "--gpus", "0,1"], "give it in --prefill-args or --decode-args"),
        (["--disaggregate", "1P1D", "--decode-args", "", "--decode-args", ""], "starts 1 decode engine; give it once"),
        (["--disaggregate", "1P1D", "--decode-args", "--tensor-parallel-size 3"], "decode 1: --tensor-parallel-size 3"),
        (["--disaggregate", "1P2D", "--decode-args", "", "--decode-args", "--hot-slots 1"], "decode 2: --hot-slots 1"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotset", "serve", DEMO, "--device", "cpu", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.count("\n") == 1 and message in error


def test_engines_that_would_compute_in_different_dtypes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engines, "has_gpu_driver", lambda: True)
    model = tiny_directory(tmp_path, torch_dtype="bfloat16")

    def check(**settings: Any) -> None:
        devices = ("cpu", None)
        check_engines([RoleEngine(f"on {d}", EngineConfig(model=model, device=d, **settings)) for d in devices])

    with pytest.raises(ConfigError, match=r"on cpu would compute in float32 and on None in bfloat16, .*; set --dtype"):
        check(load_format="dummy")
    check(load_format="dummy", dtype="float32")


def test_wrong_args_are_answered_without_torch() -> None:
    program = (
        "import json, sys; from hotset.cli import main\ntry: main()\nfinally: print(json.dumps('torch' in sys.modules))"
    )
    flags = ["serve", DEMO, "--device", "cpu", "--disaggregate", "1P1D", "--decode-args", "--data-parallel-size 3"]
    result = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, json.loads(result.stdout)) == (1, False), result.stderr
    assert "decode 1: --data-parallel-size 3 does not divide 8 experts" in result.stderr
