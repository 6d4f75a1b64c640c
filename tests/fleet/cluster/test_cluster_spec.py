"""Specs of `hotset cluster`: mistakes are refused with their place, and the processes get what the spec says."""

from pathlib import Path
from typing import Any

import pytest

from hotset.base.errors import ConfigError
from hotset.fleet.cluster.placement import Node, check_fit
from hotset.fleet.cluster.spec import load_spec, parse_spec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "docs" / "clusters").glob("*.yaml"))
GIB = 1 << 30


def nodes(*resources: dict[str, float]) -> list[Node]:
    return [Node(f"{index}" * 56, f"10.0.0.{index}", found) for index, found in enumerate(resources, 1)]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ([], "the spec: input should be a valid dictionary"),
        ({}, "'model' is missing"),
        ({"model": "m", "decoed": {}}, "unknown field 'decoed'; did you mean 'decode'?"),
        ({"decoed": {}}, "unknown field 'decoed'"),
        (
            {"model": "m", "decode": {"split": {"tensr": 2}}},
            "unknown field 'decode.split.tensr'; did you mean 'tensor'?",
        ),
        ({"model": "m", "target": {"decode": {"max": 2, "xyz": 1}}}, "the fields are min, max, waiting-requests"),
        ({"model": "m", "decode": {"count": 0}}, "decode.count: input should be greater than or equal to 1"),
        ({"model": "m", "decode": {"count": "2"}}, "decode.count: input should be a valid integer, got '2'"),
        ({"model": "m", "decode": {"split": {"data": 2, "tensor": 2}}}, "decode: --data-parallel-size 2 cannot be"),
        ({"model": "m", "prefill": {"split": {"data": 2}}}, "prefill: --role prefill does not support"),
        ({"model": "m", "name": "My App"}, "name: string should match pattern"),
        (
            {"model": "m", "flags": {"kv-dtpe": "fp8"}},
            "flags: hotset serve has no flag 'kv-dtpe'; did you mean 'kv-dtype'",
        ),
        ({"model": "m", "flags": {"kv_dtype": "fp8"}}, "did you mean 'kv-dtype'"),
        ({"model": "m", "flags": {"page-rows": "64"}}, "flags.page-rows: input should be a valid integer, got '64'"),
        ({"model": "m", "flags": {"page-rows": 0}}, "--page-rows must be at least 1, got 0"),
        ({"model": "m", "flags": {"max-queue": 0}}, "--max-queue must be a finite number above 0"),
        ({"model": "m", "flags": {"tiers": "sometimes"}}, "flags.tiers: input should be 'auto', 'off' or 'always'"),
        ({"model": "m", "flags": {"tensor-parallel-size": 2}}, r"give it as `split: \{tensor: N\}`"),
        ({"model": "m", "flags": {"api-key": "k"}}, "HOTSET_API_KEY"),
        ({"model": "m", "decode": {"flags": {"kv-dtype": "fp8"}}}, "must be the same for all engines"),
        ({"model": "m", "decode": {"flags": {"gpus": "0,1"}}}, "no two engines share one"),
        ({"model": "m", "flags": {"executor": "ray"}}, "each engine of an application runs on one node"),
        ({"model": "m", "decode": {"flags": {"device": "cuda:1"}}}, "Ray assigns GPUs"),
        ({"model": "m", "decode": {"resources": {"gpus": 0.5}}}, "two engines would share one GPU"),
        ({"model": "m", "decode": {"resources": {"gpus": 2}}}, r"the split needs 1 \(1 ranks, 1 on each GPU\)"),
        ({"model": "m", "flags": {"device": "cpu"}, "decode": {"resources": {"gpus": 1}}}, "device is cpu"),
        ({"model": "m", "routers": {"resources": {"gpus": 1}}}, "a router uses no GPU"),
        ({"model": "m", "routers": {"flags": {"poll-second": 1}}}, "hotset router has no flag 'poll-second'"),
        ({"model": "m", "routers": {"flags": {"decode": ["http://a:1"]}}}, "the cluster sets it"),
        ({"model": "m", "routers": {"flags": {"poll-seconds": 0}}}, "routers: --poll-seconds must be"),
        ({"model": "m", "target": {"decode": {"max": 4}}}, "has no measure to follow"),
        ({"model": "m", "target": {"decode": {"max": 4, "kv-usage": 2.0}}}, "less than or equal to 1"),
        (
            {"model": "m", "decode": {"count": 5}, "target": {"decode": {"max": 4, "kv-usage": 0.5}}},
            "decode.count is 5, but target.decode allows 1 to 4",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_place(spec: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: a\nmodel: b\n", "'model' is given twice"),
        ("model: {a: b: c}\n", "is not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("x: 1\n", "spec.yaml: unknown field 'x'"),
        ("model: " + "[\n" * 3000, "is nested too deeply"),
        ("model: 2026-99-99\n", "is not valid YAML"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_not_a_spec_is_refused_with_its_name(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "spec.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_spec(path)
    assert str(path) in str(caught.value)


def test_words_that_are_booleans_in_older_yaml_stay_words(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"model: {tmp_path}\nflags: {{cuda-graphs: off, device: cpu}}\ndecode: {{flags: {{page: false}}}}\n"
    )
    spec = load_spec(path)
    assert spec.engine_settings("decode")["cuda_graphs"] == "off"
    assert spec.engine_settings("decode")["page"] is False and "page" not in spec.engine_settings("prefill")


def test_flags_of_a_role_replace_the_common_ones_and_the_split_decides_the_resources() -> None:
    spec = parse_spec(
        {
            "model": "m",
            "flags": {"max-model-len": 100, "host-kv-gib": 4.0},
            "prefill": {"split": {"tensor": 4, "pipeline": 2}},
            "decode": {
                "split": {"data": 8},
                "flags": {"ranks-per-gpu": 2, "max-model-len": 200},
                "resources": {"cpus": 3.5, "memory-gib": 2, "custom": {"rack-1": 0.5}},
            },
        }
    )
    assert spec.engine_config("prefill").max_model_len == 100 and spec.engine_config("decode").max_model_len == 200
    assert spec.engine_config("decode").host_kv_gib == 4.0 and spec.engine_config("decode").role == "decode"
    assert spec.demand("prefill") == {"CPU": 8, "GPU": 8}
    assert spec.demand("decode") == {"CPU": 3.5, "GPU": 4, "memory": 2 * GIB, "rack-1": 0.5}
    assert spec.demand("router") == {"CPU": 1}


EIGHT = {"model": "m", "prefill": {"split": {"tensor": 8}}, "decode": {"count": 3, "split": {"data": 8}}}
NODE = {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("spec", "found", "reason"),
    [
        (
            EIGHT,
            [{"CPU": 64.0, "GPU": 4.0}] * 8,
            "one prefill engine needs 8 CPUs, 8 GPUs on one node, but no node has",
        ),
        (EIGHT, [NODE] * 3, "the nodes do not have room for 1 x prefill engine"),
        ({**EIGHT, "decode": {"resources": {"custom": {"big": 1}}}}, [NODE] * 3, "one decode engine needs .* 1 big"),
        ({"model": "m", "flags": {"device": "cpu"}, "routers": {"count": 2}}, [NODE], "only 1 nodes"),
        ({"model": "m", "flags": {"device": "cpu"}, "decode": {"resources": {"memory-gib": 2}}}, [NODE], "2.0 GiB"),
    ],
)
def test_processes_that_do_not_fit_the_nodes_are_refused(spec: Any, found: list[Any], reason: str) -> None:
    parsed = parse_spec(spec)
    with pytest.raises(ConfigError, match=reason):
        check_fit(parsed, parsed.counts(), nodes(*found))


def test_processes_that_fit_are_accepted() -> None:
    spec = parse_spec(EIGHT)
    check_fit(spec, spec.counts(), nodes(*[NODE] * 4))
    # The large engine needs the first node, so it must be placed before the small one.
    mixed = parse_spec({"model": "m", "prefill": {"split": {"tensor": 4}}, "decode": {"split": {"data": 8}}})
    check_fit(mixed, mixed.counts(), nodes(NODE, {"CPU": 64.0, "GPU": 4.0}))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert load_spec(path).counts()["router"] >= 1
