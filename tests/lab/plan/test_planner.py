"""`hotset plan`: splits, goals, flags, pictures and refused input."""

import json
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hotset.base.config import EngineConfig
from hotset.base.errors import CheckpointError, ConfigError
from hotset.base.units import GIB
from hotset.cli import app
from hotset.lab.plan.gpus import GPUS, Machine, find_gpu
from hotset.lab.plan.model_configs import EXAMPLES, example_names, find_config
from hotset.lab.plan.planner import Plan, make_plan, serve_flags
from hotset.lab.plan.roles import best_roles

EIGHT_H200 = Machine(2048 * GIB, find_gpu("h200"), 8)


def plan_of(model: str, machine: Machine = EIGHT_H200, **settings: Any) -> Plan:
    options = {name: settings.pop(name) for name in ("contexts", "goal") if name in settings}
    return make_plan(model, find_config(model), machine, EngineConfig(**settings), **options)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_every_example_can_be_planned_and_every_gpu_is_known_by_its_full_name() -> None:
    assert {"deepseek-v3.2", "glm-5.2", "qwen3-8b", "llama-3.1-8b"} <= set(example_names())
    for name in example_names():
        assert plan_of(name).best is not None, name
    for gpu in GPUS:
        assert find_gpu(f"NVIDIA {gpu.name.upper()}") == gpu


def test_the_best_split_has_the_best_figure_of_its_goal() -> None:
    by_goal = {goal: plan_of("deepseek-v3.2", goal=goal) for goal in ("throughput", "latency", "requests")}
    fitting = [split for split in by_goal["throughput"].splits if split.reason is None]
    assert {split.name for split in fitting} == {"TP8", "TP4 x PP2", "TP2 x PP4", "PP8", "DP8"}
    assert by_goal["throughput"].splits[0] == max(fitting, key=lambda split: split.best(-1).tokens_per_s or 0)
    assert by_goal["latency"].splits[0] == min(fitting, key=lambda split: split.best(-1).step_ms or 0)
    assert by_goal["requests"].splits[0] == max(fitting, key=lambda split: split.tiers_on[-1].requests)
    assert by_goal["throughput"].splits[0].name == "DP8"


@examples(2)
@given(st.sampled_from([1, 2, 7]), st.integers(1, 1 << 20), st.integers(2, 1 << 24), st.integers(1, 1 << 16))
@example(gpus=1, host_gib=1 << 20, context=2, requests=1 << 16)
def test_every_combination_of_machine_and_load_has_a_plan(
    gpus: int, host_gib: int, context: int, requests: int
) -> None:
    machine = Machine(host_gib * GIB, find_gpu("rtx4090"), gpus)
    if context > find_config("qwen3-8b").spec.context:
        with pytest.raises(ConfigError, match="--contexts must lie between 2 and 40960"):
            plan_of("qwen3-8b", machine, contexts=(context,), max_num_seqs=requests)
        return
    plan = plan_of("qwen3-8b", machine, contexts=(context,), max_num_seqs=requests)
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False))["splits"]


def test_a_given_split_is_the_only_one_and_a_split_that_does_not_fit_says_why() -> None:
    (split,) = plan_of("deepseek-v3.2", tensor_parallel_size=8).splits
    assert split.name == "TP8"
    plan = plan_of("llama-3.3-70b")
    assert plan.splits[-1].name == "DP8" and "weights take 131.4 GiB" in (plan.splits[-1].reason or "")
    small = Machine(64 * GIB, find_gpu("h100"), 1)
    assert plan_of("deepseek-v3.2", small).best is None


def test_prompts_take_the_split_that_computes_one_first_and_answers_that_with_the_most_tokens() -> None:
    plan = plan_of("deepseek-v3.2")
    roles, of_split = best_roles(plan), {split.name: split.best(-1) for split in plan.splits}
    assert roles is not None
    prompts, answers, balance = roles.sentences
    assert (roles.prefill.name, roles.decode.name) == ("PP8", "DP8")
    seconds = {name: decode.prompt_s or 0.0 for name, decode in of_split.items()}
    assert min(seconds, key=seconds.__getitem__) == "PP8" and 8 <= seconds["PP8"] <= 10
    assert prompts.startswith(f"prompts of 131,072: PP8, {seconds['PP8']:.1f} s; ")
    assert f"{seconds['TP8']:.1f} s with TP8, where every rank computes the whole indexer" in prompts
    assert answers.startswith("answers: DP8, 3,064 tokens/s; ") and "646 with TP8" in answers
    assert "TP4 x PP2" not in prompts + answers
    # While PP8 computes one prompt after another, DP8 answers as many.
    length = 131072 / (of_split["PP8"].prompt_tokens_per_s or 0.0) * (of_split["DP8"].tokens_per_s or 0.0)
    assert f"have {length:,.0f} tokens" in balance
    for only in (plan_of("deepseek-v3.2", tensor_parallel_size=8), plan_of("qwen3-8b", Machine(64 * GIB))):
        assert best_roles(only) is None


def test_many_prompts_at_once_keep_all_gpus_busy() -> None:
    """A prompt alone leaves data parallel ranks idle, and a pipeline while it fills."""
    for split in plan_of("deepseek-v3.2", contexts=(8192,)).splits:
        (decode,) = split.tiers_on
        alone = 8192 / (decode.prompt_s or 0.0)
        faster = (decode.prompt_tokens_per_s or 0.0) / alone
        assert faster == pytest.approx(1.0) if split.name == "TP8" else faster > 1.1, split.name
        assert split.name != "DP8" or 5 < faster < 8


def test_flags_repeat_the_plan() -> None:
    """An engine that is started with the flags has the planned configuration."""
    plan = plan_of("glm-5.2", contexts=(65536,), max_num_seqs=64)
    assert plan.best is not None
    flags = plan.flags()
    assert flags == serve_flags(plan.best.config)
    for words in (["--kv-dtype", "fp8"], ["--max-model-len", "65536"], ["--data-parallel-size", "8"]):
        assert words == flags[flags.index(words[0]) :][:2]
    host_gib = int(flags[flags.index("--host-kv-gib") + 1])
    assert 0 < host_gib <= 0.8 * 2048
    again = plan_of("glm-5.2", contexts=(65536,), **(plan.to_json()["splits"][0]["config"]))
    assert again.splits == plan.splits[:1]


def test_the_command_prints_tables_json_and_a_picture(tmp_path: Path) -> None:
    machine = ("--gpu", "h200", "--gpus", "8", "--host-gib", "2048")
    shown = run("deepseek-v3.2", *machine, "--plot", str(tmp_path / "plan.svg"))
    assert shown.exit_code == 0
    for text in ("TP4 x PP2", "hotset serve deepseek-v3.2", "--data-parallel-size 8", "131,072", "answers: DP8, 3,064"):
        assert text in shown.stdout
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.startswith("<svg") and "Tokens per second" in picture
    printed = json.loads(run("deepseek-v3.2", *machine, "--json").stdout)
    assert printed["splits"][0]["name"] == "DP8" and printed["flags"]
    assert printed["roles"] == {"prefill": "PP8", "decode": "DP8"}
    assert printed["splits"][0]["tiers_on"][-1]["requests"] > printed["splits"][0]["tiers_off"][-1]["requests"]


def test_a_configuration_without_weights_is_planned_by_path(tmp_path: Path) -> None:
    path = tmp_path / "anything.json"
    path.write_text((EXAMPLES / "qwen3-8b.json").read_text())
    assert find_config(str(path)).spec == find_config("Qwen3-8B").spec
    result = run(str(path), "--gpu", "mine", "--gpu-gib", "48", "--gpu-tb-per-s", "1.2", "--host-gib", "64", "--json")
    assert result.exit_code == 0
    machine = json.loads(result.stdout)["machine"]
    assert (machine["gpu"]["memory_gib"], machine["gpu"]["tb_per_s"]) == (48, 1.2)


def test_a_missing_field_is_refused_by_name(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "deepseek-v3.2.json").read_text())
    for field in ("num_hidden_layers", "hidden_size", "vocab_size", "model_type"):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in config.items() if name != field}))
        with pytest.raises(CheckpointError, match=f"config.json: the field {field} is missing"):
            find_config(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3-8b", "--gpu", "h2000"), "--gpu h2000 is not known; did you mean h200?"),
        (("qwen3-8b", "--gpu", "gaudi3"), "give its memory and bandwidth with --gpu-gib and --gpu-tb-per-s"),
        (("qwen3-8b", "--gpu", "h200", "--gpu-gib", "-3"), "--gpu-gib must be a finite number above 0"),
        (("qwen3-8b", "--gpu", "h200", "--host-gib", "0"), "--host-gib must be a finite number above 0"),
        (("qwen3-8b", "--gpu", "h200", "--this-machine"), "--this-machine and --gpu both name a machine"),
        (("qwen3-8b", "--gpu", "h200", "--contexts", "8k"), "--contexts must be numbers of tokens"),
        (("qwen3-8b", "--gpu", "h200", "--contexts", "9999999"), "--contexts must lie between 2 and 40960"),
        (("qwen3-8b", "--gpu", "h200", "--goal", "fame"), "--goal must be one of throughput, latency, requests"),
        (("qwen3-8b", "--gpu", "h200", "--plot", "a.gif"), "--plot a.gif: the name must end in .svg or .html"),
        (("no-such-model", "--gpu", "h200"), "hotset plan also knows deepseek-v3.2"),
    ],
)
def test_wrong_input_is_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError | CheckpointError)
    assert message in str(result.exception)
