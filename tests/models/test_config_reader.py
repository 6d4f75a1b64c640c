"""The configuration reader agrees with transformers on the files that transformers writes and reads."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # imports its classes lazily
from harness import DSA_SIZES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from hotset.base.errors import CheckpointError
from hotset.models import families
from hotset.models.families import read_spec
from hotset.models.formats.fp8_blocks import FP8_CHECKPOINT
from hotset.models.formats.weight_format import PLAIN_WEIGHTS
from hotset.models.rope import amplitude, inverse_frequencies
from hotset.models.spec import ModelSpec

MODELS = Path(families.__file__).parents[1]
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}

# Configurations from which each field is removed in turn. Together they have every field that the reader reads.
SIZES_OF_32_HEADS = SIZES | {"num_attention_heads": 32, "hidden_size": 64}  # Qwen3 has 32 heads of KV by default
LONG_YARN = {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 4096}
SCALED_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    {"original_max_position_embeddings": 32, "rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    {"head_dim": 64, "rope_parameters": {**LONG_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    {"head_dim": 64, "rope_parameters": {**LONG_YARN, "factor": None, "attention_factor": 1.5, "truncate": None}},
]
ALL_FAMILIES: list[dict[str, Any]] = [
    {},
    {"rms_norm_eps": 1e-3, "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 7},
    {"attention_bias": True, "torch_dtype": "float16", "dtype": "bfloat16", "hidden_act": "silu"},
    {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
    *SCALED_ROPES,
]
GQA_VARIANTS: list[dict[str, Any]] = [
    {"num_key_value_heads": 8, "head_dim": 24, "mlp_bias": False},
    {"num_key_value_heads": None},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 4},
]
WINDOWED = {"num_hidden_layers": 40, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 50}
DSA_OF_64_EXPERTS = DSA_SIZES | {"n_routed_experts": 64, "n_group": 4, "num_experts_per_tok": 4, "index_head_dim": 64}
DSA_VARIANTS: list[dict[str, Any]] = [
    {**DSA_OF_64_EXPERTS, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False},
    {"n_routed_experts": 32, "num_experts": 64},
    {"num_local_experts": 64},
    {"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    {"first_k_dense_replace": 1, "mlp_layer_types": ["sparse", "dense"] * 2, "rope_interleave": True},
    {"layer_types": ["indexed_attention"] * 4, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True},
    {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    {"index_topk_freq": 2, "index_topk_pattern": "FSSF"},
    {"index_topk_pattern": "FSSF", "indexer_types": ["full", "full", "shared", "shared"]},
]
VARIANTS = [
    *(("llama", {**SIZES_OF_32_HEADS, **fields}) for fields in (*ALL_FAMILIES, *GQA_VARIANTS, {"mlp_bias": True})),
    *(("qwen3", {**SIZES_OF_32_HEADS, **fields}) for fields in (*ALL_FAMILIES, *GQA_VARIANTS, WINDOWED)),
    *(("deepseek_v32", {**SIZES, **fields}) for fields in (*ALL_FAMILIES, *DSA_VARIANTS)),
    *(("glm_moe_dsa", {**SIZES, **fields}) for fields in (*ALL_FAMILIES, *DSA_VARIANTS)),
]
# Fields that the configuration class of some family lacks. Either the family's code always does what Hotset does
# without them (test_parity.py), or the class reads them while it is built, and writes their effect to other fields.
UNKNOWN_TO_TRANSFORMERS = {
    *("model_type", "type", "quantization_config", "fmt"),
    *("mlp_bias", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("moe_layer_freq", "scoring_func", "topk_method", "num_experts", "num_local_experts"),
    *("rope_interleave", "indexer_rope_interleave", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
    *("num_nextn_predict_layers", "index_share_for_mtp_iteration"),
}


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, "num_key_value_heads": 2, **changes}


def dsa(model_type: str, **changes: Any) -> dict[str, Any]:
    return config(model_type, **DSA_SIZES) | changes


def read(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    return read_spec(values, generation or {}, "config.json")


class Recorded(dict[str, Any]):
    """A JSON object that adds the paths of the fields that are looked up to `names`."""

    def __init__(self, values: dict[str, Any], names: set[str], prefix: str = "") -> None:
        super().__init__(values)
        self._names, self._prefix = names, prefix

    def get(self, name: str, default: Any = None) -> Any:
        self._names.add(f"{self._prefix}{name}")
        value = super().get(name, default)
        return Recorded(value, self._names, f"{self._prefix}{name}.") if isinstance(value, dict) else value


def fields_read(values: dict[str, Any]) -> set[str]:
    """Returns the paths of the fields that are read, until one is refused."""
    names: set[str] = set()
    spec_or_refusal(Recorded(values, names))
    return names


def with_a_field_removed(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path of each field, also of sections, and the configuration without it."""
    for name, value in values.items():
        yield name, {other: values[other] for other in values if other != name}
        for path, section in with_a_field_removed(value) if isinstance(value, dict) else ():
            yield f"{name}.{path}", values | {name: section}


def quantisation(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `quantization_config` with every default of transformers."""
    from transformers.quantizers.auto import AutoQuantizationConfig  # takes a second, so not in every collection

    complete: dict[str, Any] = AutoQuantizationConfig.from_dict(section).to_dict()
    return complete


def written_out(values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the configuration with every default of transformers, and its object. Raises what transformers raises."""
    oracle = transformers.AutoConfig.for_model(**deepcopy(values))
    complete: dict[str, Any] = json.loads(oracle.to_json_string(use_diff=False))
    if complete.get("quantization_config"):
        complete["quantization_config"] = json.loads(json.dumps(quantisation(values["quantization_config"])))
    return complete, oracle


def spec_or_refusal(values: dict[str, Any]) -> ModelSpec | str:
    try:
        return read_spec(values, {}, "config.json", with_mtp=True)
    except CheckpointError as refusal:
        return str(refusal)


@pytest.mark.parametrize(("model_type", "fields"), VARIANTS)
def test_every_absent_field_means_what_it_means_in_transformers(model_type: str, fields: dict[str, Any]) -> None:
    values = {"model_type": model_type, **fields}
    for path, reduced in [("nothing", values), *with_a_field_removed(values)]:
        spec = spec_or_refusal(reduced)
        if isinstance(spec, str) and f"{path} is missing" in spec:
            continue  # Hotset has no default for sizes, nor for what transformers requires
        complete, oracle = written_out(reduced)
        if isinstance(spec, str):
            assert "sliding_attention" in getattr(oracle, "layer_types", ()) and "sliding_window" in spec, (path, spec)
            continue
        assert spec == spec_or_refusal(complete), path
        if spec.rope.kind != "default":
            frequencies, scale = ROPE_INIT_FUNCTIONS[spec.rope.kind](oracle, torch.device("cpu"))
            torch.testing.assert_close(inverse_frequencies(spec.rope, torch.float32), frequencies)
            assert amplitude(spec.rope) == pytest.approx(scale)


def test_every_field_that_is_read_is_compared_with_transformers() -> None:
    compared: set[str] = set()
    known = {*UNKNOWN_TO_TRANSFORMERS, *RopeParameters.__annotations__, *quantisation(FP8)}
    for model_type, fields in VARIANTS:
        names = {path.rpartition(".")[2] for path in fields_read({"model_type": model_type, **fields})}
        unknown = names - known - {*dir(transformers.AutoConfig.for_model(model_type))}
        assert all(name.endswith("attention") for name in unknown), unknown  # sections of a rope for some layers
        compared |= names
    getters = "count|number|optional_number|flag|choice|layer_choices|ids|is_null|get|section"
    pattern = rf'\.(?:{getters})\(\s*"(\w+)"|"(\w+)" (?:not )?in \w+'
    code = "".join(text for path in MODELS.rglob("*.py") if ": ConfigFields" in (text := path.read_text()))
    in_code = {name for match in re.findall(pattern, code) for name in match if name}
    assert len(in_code) > 60 and in_code <= compared, in_code - compared


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_of_several_numbers_of_experts_the_one_that_transformers_takes_counts(name: str) -> None:
    values = dsa("deepseek_v32", n_routed_experts=16, num_experts=32, first_k_dense_replace=0) | {name: 64}
    moe = read(values).moe
    assert moe is not None and moe.experts == transformers.AutoConfig.for_model(**values).n_routed_experts == 64


def test_older_fields_determine_the_dense_and_the_moe_layers() -> None:
    moe = read(dsa("deepseek_v32", first_k_dense_replace=1, moe_layer_freq=2)).moe
    assert moe is not None and moe.layers == (2,)
    assert read(dsa("deepseek_v32", first_k_dense_replace=9)).moe is None
    by_list = read(dsa("deepseek_v32", first_k_dense_replace=9, mlp_layer_types=["sparse", "dense"] * 2)).moe
    assert by_list is not None and by_list.layers == (0, 2)


def test_the_dtype_is_read_under_either_name() -> None:
    assert read(config("llama", torch_dtype="bfloat16")).dtype == "bfloat16"
    assert read(config("llama", dtype="float64", torch_dtype="bfloat16")).dtype == "float64"
    assert read(config("llama", torch_dtype="torch.float16")).dtype == "float16"


def test_stop_tokens_of_the_generation_config_take_precedence() -> None:
    assert read(config("llama", eos_token_id=7), {"eos_token_id": [5, 6, 5]}).eos_ids == (5, 6)
    assert read(config("llama", eos_token_id=[7, 8]), {"eos_token_id": None}).eos_ids == (7, 8)
    assert read(config("llama", eos_token_id=None)).eos_ids == ()
    assert read(config("llama")).eos_ids == (2,)


def test_stop_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 96; .* vocab_size \(96\)"):
        read(config("llama"), {"eos_token_id": 96})
    assert read(config("llama"), {"eos_token_id": 95}).eos_ids == (95,)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v32", "glm_moe_dsa"])
def test_block_fp8_is_read_from_the_quantisation_of_every_family(model_type: str) -> None:
    values = dsa(model_type) if model_type in ("deepseek_v32", "glm_moe_dsa") else config(model_type)
    for plain in (values, values | {"quantization_config": None}):
        assert read(plain).weight_formats == PLAIN_WEIGHTS
    assert read(values | {"quantization_config": FP8}).weight_formats == FP8_CHECKPOINT
    skipped = {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    assert read(values | {"quantization_config": FP8 | skipped}).weight_formats == FP8_CHECKPOINT


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    spec = read(config("qwen3", sliding_window=4096, use_sliding_window=False))
    assert spec == read(config("qwen3", sliding_window=4096, use_sliding_window=True, max_window_layers=4))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "mamba"}, ["model_type", "'mamba'", "llama, qwen3, deepseek_v32, glm_moe_dsa"]),
        ({}, ["model_type", "missing"]),
        ({"model_type": "llama", **SIZES, "hidden_size": None}, ["hidden_size", "missing"]),
        (config("llama", hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
        (config("llama", num_key_value_heads=3), ["num_key_value_heads", "3"]),
        (config("llama", hidden_size="big"), ["hidden_size", "'big'"]),
        (config("llama", vocab_size=True), ["vocab_size", "True"]),
        (config("llama", hidden_size=34), ["hidden_size", "34", "num_attention_heads"]),
        (config("llama", head_dim=7), ["head_dim", "7", "even"]),
        (config("llama", rms_norm_eps=float("nan")), ["rms_norm_eps", "nan"]),
        (config("llama", sliding_window=128), ["sliding_window", "128"]),
        (config("llama", partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
        (config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), ["rope_scaling.type", "'dynamic'", "yarn"]),
        (config("llama", rope_scaling={"type": "linear"}), ["rope_scaling.factor", "missing"]),
        (config("llama", rope_parameters={"rope_type": "llama3", "factor": 8.0}), ["low_freq_factor", "missing"]),
        (config("llama", rope_parameters={"full_attention": {"rope_theta": 1.0}}), ["full_attention", "one rope"]),
        (config("llama", dtype="int8"), ["dtype", "'int8'"]),
        (config("llama", dtype={}), ["dtype", "{}", "bfloat16"]),
        (config("llama", eos_token_id=[2, 96]), ["eos_token_id", "[2, 96]", "vocab_size (96)"]),
        (config("llama", rope_theta=1.0), ["rope_theta", "1.0", "above 1"]),
        (config("llama", rope_parameters={"rope_theta": 0.5}), ["rope_parameters.rope_theta", "0.5", "above 1"]),
        (config("llama", rope_parameters=LLAMA3 | {"low_freq_factor": 4.0}), ["low_freq_factor", "4.0", "below"]),
        (config("llama", eos_token_id="</s>"), ["eos_token_id", "'</s>'"]),
        (config("qwen3", layer_types=["full_attention"] * 3 + ["sliding_attention"]), ["layer_types", "sliding"]),
        (config("qwen3", layer_types=["full_attention"] * 3), ["layer_types", "3 entries for 4 layers"]),
        (
            config("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2),
            ["sliding_window", "8", "full attention"],
        ),
        (
            config("qwen3", use_sliding_window=True, max_window_layers=2),
            ["use_sliding_window is True", "sliding_window of null"],
        ),
        (dsa("deepseek_v32", q_lora_rank=None), ["q_lora_rank", "None"]),
        (dsa("deepseek_v32", scoring_func="softmax"), ["scoring_func", "'softmax'", "sigmoid"]),
        (dsa("deepseek_v32", n_group=3, first_k_dense_replace=0), ["n_group", "3", "8"]),
        (dsa("deepseek_v32", n_group=8, first_k_dense_replace=0), ["n_group", "8", "two experts"]),
        (dsa("deepseek_v32", topk_group=3, first_k_dense_replace=0), ["topk_group", "3"]),
        (dsa("deepseek_v32", num_experts_per_tok=5), ["num_experts_per_tok", "5"]),
        (dsa("deepseek_v32", mlp_bias=True), ["mlp_bias", "True"]),
        (dsa("deepseek_v32", index_head_dim=4), ["index_head_dim", "4", "qk_rope_head_dim"]),
        (dsa("glm_moe_dsa", indexer_rope_interleave=False), ["indexer_rope_interleave", "False"]),
        (dsa("glm_moe_dsa", indexer_types=["shared", "full", "full", "full"]), ["indexer_types", "first layer"]),
        (dsa("glm_moe_dsa", index_topk_pattern="SFFF"), ["index_topk_pattern", "'SFFF'", "first layer"]),
        (dsa("glm_moe_dsa", index_topk_pattern="FX"), ["index_topk_pattern", "'FX'"]),
        *(
            (dsa("deepseek_v32", quantization_config=FP8 | changes), [f"quantization_config.{name}", words])
            for changes, name, words in (
                ({"quant_method": "awq"}, "quant_method", "'awq'; supported: fp8"),
                ({"quant_method": "compressed-tensors"}, "quant_method", "'compressed-tensors'"),
                ({"quant_method": None}, "quant_method", "missing"),
                ({"fmt": "e5m2"}, "fmt", "'e5m2'; supported: e4m3"),
                ({"activation_scheme": "static"}, "activation_scheme", "'static'; supported: dynamic"),
                ({"scale_fmt": "int8"}, "scale_fmt", "'int8'; supported: float, ue8m0"),
                ({"weight_block_size": [64, 128]}, "weight_block_size", "[64, 128]; supported: [128, 128]"),
                ({"weight_block_size": None}, "weight_block_size", "None; supported: [128, 128]"),
                ({"weight_block_size": 128}, "weight_block_size", "128; supported: [128, 128]"),
            )
        ),
        (config("llama", quantization_config="fp8"), ["quantization_config", "'fp8'", "an object"]),
    ],
)
def test_unsupported_fields_are_refused_by_name(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(values)
    message = str(refusal.value)
    assert message.startswith("config.json: ") and "\n" not in message
    for word in words:
        assert word in message
