"""`--prefill-args` and `--decode-args`: which settings each engine gets. test_quick_errors.py has the flags that are
refused."""

from pathlib import Path
from typing import Any

import pytest
import typer
from harness import tiny_directory

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.cli import app
from hotset.fleet.local import roles as local_roles
from hotset.fleet.local.roles import EngineCounts, check_engines, role_engines
from hotset.fleet.local.shares import RoleEngine

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


def test_engines_with_different_dtypes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_roles, "has_gpu_driver", lambda: True)
    model = tiny_directory(tmp_path, torch_dtype="bfloat16")

    def check(**settings: Any) -> None:
        devices = ("cpu", None)
        check_engines([RoleEngine(f"on {d}", EngineConfig(model=model, device=d, **settings)) for d in devices])

    with pytest.raises(ConfigError, match=r"on cpu would compute in float32 and on None in bfloat16, .*; set --dtype"):
        check(load_format="dummy")
    check(load_format="dummy", dtype="float32")
