"""Models whose weights stay in fp8: their logits, the parts that workers hold, and the formats of their tensors."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from models.fp8_models import (
    FAMILIES,
    QUANTISATION,
    expanded_blocks,
    float64_throughout,
    quantised_activations,
    save_fp8_model,
    stored_tensors,
)
from models.test_parity import StableTopk
from safetensors.torch import load_file, save_file
from split_workers import CPU, STEPS, Memory, RecordingView, StepResults, build_stages, on_ranks, parts_of, run_steps
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fp8 import Fp8Weight
from hotset.kernels.weights import Weight
from hotset.memory.resident import make_batch
from hotset.models.allowed_splits import check_tensor_parallel, stage_layers
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import WeightSource, dummy_weights, open_weights
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.formats.fp8_blocks import FP8_CHECKPOINT
from hotset.models.split import WHOLE_MODEL, Split, TensorSlice

TOLERANCE = 1e-5  # of the root mean square of the logits
ROOT = Path(__file__).resolve().parents[2]
TABLE, CONFIGS = ROOT / "docs" / "weights.md", ROOT / "hotset" / "lab" / "plan" / "configs"
DSA = [family for family in FAMILIES if family != "llama"]


class Fp8Model:
    """A tiny fp8 checkpoint, and the model of transformers with the same weights, expanded."""

    def __init__(self, folder: Path, family: str) -> None:
        self.directory, self.oracle = save_fp8_model(folder, family, seed=len(family))
        self.files = find_model(str(self.directory))
        self.stored = stored_tensors(self.directory)

    def source(self) -> "RecordingSource":
        return RecordingSource(open_weights(self.files, torch.float64, CPU))

    @cached_property
    def whole(self) -> StepResults:
        """Returns the results of one process."""
        source = self.source()
        results = run_steps(build_stages(self.files.spec, source), STEPS)
        source.finish()
        expect_stored_bits(source, self.stored)
        return results


GetModel = Callable[[str], Fp8Model]


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    return cache(lambda family: Fp8Model(tmp_path_factory.mktemp(family), family))


class RecordingSource(WeightSource):
    """Records what it returns, by tensor name and slice."""

    def __init__(self, opened: WeightSource) -> None:
        super().__init__(opened.tensor_source, opened.dtype, opened.device, opened.formats)
        self.loaded: dict[str, tuple[TensorSlice | None, Weight]] = {}

    def load(self, name: str, shape: tuple[int, ...], **options: Any) -> Tensor:
        values = super().load(name, shape, **options)
        self.loaded[name] = (options.get("tensor_slice"), values)
        return values

    def load_weight(self, name: str, shape: tuple[int, ...], **options: Any) -> Weight:
        weight = super().load_weight(name, shape, **options)
        self.loaded[name] = (options.get("tensor_slice"), weight)
        return weight


@torch.inference_mode()
def our_logits(model: Fp8Model, ids: Tensor, chunks: list[int]) -> Tensor:
    """Returns the logits of one request whose tokens are computed in chunks of these sizes."""
    decoder = Decoder(model.files.spec, model.source())
    memory, done, logits = Memory(decoder.kv_shape), 0, []
    for count in chunks:
        view = RecordingView(memory, make_batch([0], [done], [count], CPU), None)
        logits.append(decoder.logits(decoder.forward(ids[done : done + count], view), None))
        done += count
    return torch.cat(logits)


@torch.inference_mode()
def oracle_logits(model: Fp8Model, ids: Tensor, *, quantised: bool) -> Tensor:
    with float64_throughout(), StableTopk().installed():
        if not quantised:
            return model.oracle(ids[None], use_cache=False).logits[0]
        with quantised_activations(model.oracle):
            return model.oracle(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), *DSA])
def test_logits_differ_from_transformers_only_by_quantised_activations(family: str, fp8_model: GetModel) -> None:
    """The oracle is transformers in float64 on the expanded weights, with and without quantised activations.

    A code of e4m3 has 3 bits of fraction. Rounding moves a value by at most 2^-4 of itself, or, below 2^-6 scales, by
    at most 2^-10 scales. Everything else here is float64. So the logits must be those of the oracle with quantised
    inputs of the same products, found by an independent search for the nearest code. The difference between the two
    oracles then is the error that quantised activations explain: where the best logit leads by more than twice that
    error, the token is that of transformers without quantised activations.

    The tolerance covers the oracle's rotary frequencies, which are float32.
    """
    model = fp8_model(family)
    ids = torch.randint(97, (32,), generator=torch.Generator().manual_seed(3))
    ours = our_logits(model, ids, [20, 1, 11])
    expected, plain = (oracle_logits(model, ids, quantised=quantised) for quantised in (True, False))
    size = plain.square().mean().sqrt()
    assert (ours - expected).abs().max() <= TOLERANCE * size
    explained = (expected - plain).abs().amax(-1) + TOLERANCE * size
    assert explained.min() > 100 * TOLERANCE * size  # quantisation matters, so the first comparison shows something
    best, second = plain.topk(2, dim=-1).values.unbind(-1)
    decided = best - second > 2 * explained
    assert decided.any()
    assert torch.equal(ours.argmax(-1)[decided], plain.argmax(-1)[decided])


def expect_stored_bits(source: RecordingSource, stored: dict[str, Tensor]) -> None:
    """Checks what a decoder holds after all of it was loaded: each slice has the stored codes and scales."""
    for name, (part, weight) in source.loaded.items():
        if not isinstance(weight, Fp8Weight):
            continue
        codes = stored[name].view(torch.uint8)
        scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0)[: codes.shape[0]]
        if part is not None:
            codes = part.of(codes)
            rows = slice(part.first, part.last) if part.dim == 0 else slice(None)
            columns = slice(part.first // 128, -(-part.last // 128)) if part.dim == 1 else slice(None)
            scales = scales[rows, columns]
        assert torch.equal(weight.codes.view(torch.uint8), codes), name
        assert torch.equal(weight.output_scales(), scales), name


def expect_close(found: StepResults, expected: StepResults) -> None:
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.selected, expected.selected, strict=True))


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("deepseek_v32", 4),
        *(pytest.param(family, 2, marks=pytest.mark.slow) for family in FAMILIES),
        *(pytest.param(family, 4, marks=pytest.mark.slow) for family in ("llama", "glm_moe_dsa")),
    ],
)
def test_tensor_parallel_ranks_hold_the_stored_bits(family: str, ranks: int, fp8_model: GetModel) -> None:
    model = fp8_model(family)
    sources = [model.source() for _ in range(ranks)]
    found = on_ranks(
        ranks, lambda peers: run_steps(build_stages(model.files.spec, sources[peers.rank], None, peers), STEPS)
    )
    for source, result in zip(sources, found, strict=True):
        source.finish()
        expect_stored_bits(source, model.stored)
        expect_close(result, model.whole)


@pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def test_data_parallel_ranks_and_stages_hold_the_stored_bits(family: str, fp8_model: GetModel) -> None:
    model = fp8_model(family)
    spec, tokens = model.files.spec, [[step.tokens] * 2 for step in STEPS]
    sources = [model.source() for _ in range(2)]
    found = on_ranks(
        2,
        lambda peers: run_steps(
            build_stages(spec, sources[peers.rank], stage_layers(spec, 2), peers, data_parallel=True), STEPS, tokens
        ),
    )
    for source, result in zip(sources, found, strict=True):
        source.finish()
        expect_stored_bits(source, model.stored)
        expect_close(result, model.whole)


def test_weights_in_fp8_are_expanded_if_the_setting_asks_for_it(fp8_model: GetModel) -> None:
    model = fp8_model("deepseek_v32")
    files = find_model(str(model.directory), "bfloat16")
    assert model.files.spec.weight_formats.kept_formats and not files.spec.weight_formats.kept_formats
    source = RecordingSource(open_weights(files, torch.float64, CPU))
    build_stages(files.spec, source)
    stored = model.stored
    for name, (_, weight) in source.loaded.items():
        assert isinstance(weight, Tensor)
        if f"{name}_scale_inv" in stored:
            scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            values = stored[name].float() * scales[: weight.shape[0], : weight.shape[1]]
            assert torch.equal(weight.float(), values)


def as_last_layer(name: str) -> str:
    return re.sub(r"layers\.\d+", "layers.2", name)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_checkpoint_with_a_layer_of_multi_token_prediction_is_read_as_published(
    indexed: bool, fp8_model: GetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer behind the last one has its own embedding, norms and head, and experts in fp8."""
    model = fp8_model("deepseek_v32")
    layer = {as_last_layer(name): tensor for name, tensor in model.stored.items() if ".layers.1." in name}
    names = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    extra = layer | {f"model.layers.2.{name}.weight": torch.ones(4, 4) for name in names}
    assert "model.layers.2.mlp.experts.0.up_proj.weight_scale_inv" in extra
    for path in model.directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    save_file(extra, tmp_path / "mtp.safetensors")
    if indexed:
        files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_weights(find_model(str(tmp_path)), torch.float64, CPU)
    Decoder(model.files.spec, source)
    caplog.clear()
    caplog.set_level(logging.INFO, logger="hotset.models")
    source.finish()
    assert [record.message for record in caplog.records if "skipped layer 2" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("plain", ["mlp.up_proj", "mlp.experts.3.up_proj", "self_attn.o_proj"])
def test_weights_of_one_product_are_expanded_unless_all_are_fp8(
    plain: str, fp8_model: GetModel, tmp_path: Path
) -> None:
    model = fp8_model("deepseek_v32")
    layer = 1 if "experts" in plain else 0
    name = f"model.layers.{layer}.{plain}.weight"
    tensors = dict(model.stored)
    tensors[name] = expanded_blocks(tensors[name], tensors.pop(f"{name}_scale_inv")).to(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    source = RecordingSource(open_weights(replace(model.files, path=tmp_path), torch.float64, CPU))
    Decoder(model.files.spec, source)
    source.finish()
    expanded = {name for name, (_, weight) in source.loaded.items() if f"{name}_scale_inv" in model.stored}
    expanded = {name for name in expanded if isinstance(source.loaded[name][1], Tensor)}
    group = {
        "mlp.up_proj": {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")},
        "mlp.experts.3.up_proj": {
            name for name in model.stored if re.search(r"layers\.1\..*experts\.\d+.*weight$", name)
        },
        "self_attn.o_proj": {name},
    }
    assert expanded == group[plain] | {f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)}
    for name in group[plain]:
        values = expanded_blocks(model.stored[name], model.stored[f"{name}_scale_inv"])
        torch.testing.assert_close(source.loaded[name][1], values, rtol=1e-6, atol=0)


def documented_formats() -> dict[str, str]:
    """Returns the format in memory by the pattern of the tensor's name, from the table of docs/weights.md."""
    formats: dict[str, str] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            formats |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[2])
    return formats


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_the_format_of_the_table_in_the_documentation(family: str, fp8_model: GetModel) -> None:
    model = fp8_model(family)
    recording = RecordingSource(open_weights(model.files, torch.bfloat16, CPU))
    Decoder(model.files.spec, recording)
    formats = documented_formats()
    assert len(formats) > 10
    for name in model.stored:
        patterns = [pattern for pattern in formats if re.fullmatch(rf"(.*\.)?{re.escape(pattern)}", name)]
        assert len(patterns) == 1, f"{name} is in {len(patterns)} rows of the table: {patterns}"
        if name.endswith("_scale_inv"):
            continue  # is not a tensor of its own in memory
        weight = recording.loaded[name][1]
        kinds = {torch.bfloat16: "the model's dtype", torch.float32: "fp32"}
        found = "fp8" if isinstance(weight, Fp8Weight) else kinds[weight.dtype]
        assert found == formats[patterns[0]], name


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_published_models_keep_whole_blocks_on_each_of_eight_ranks(name: str) -> None:
    """The fastest kernels need one scale per 128 outputs. The model here has fewer layers and experts than the
    published one, which does not change the blocks."""
    path = CONFIGS / f"{name}.json"
    config = json.loads(path.read_text())
    whole = read_spec(config, {}, str(path))
    for ranks in (1, 2, 4, 8):
        check_tensor_parallel(whole, ranks)
    spec = read_spec(config | {"num_hidden_layers": 5, "n_routed_experts": 16}, {}, str(path))
    assert whole.weight_formats == spec.weight_formats == FP8_CHECKPOINT and spec.moe is not None
    planned = dummy_weights(torch.bfloat16, torch.device("meta"), formats=FP8_CHECKPOINT)
    for split in (WHOLE_MODEL, Split(0, 8), Split(7, 8), Split(dp_rank=7, dp_size=8)):
        decoder = Decoder(spec, planned, split=split, collectives=planning_collectives(split.rank, split.size))
        weights = [part for part in parts_of(decoder) if isinstance(part, Fp8Weight)]
        # In each layer: two merged projections and the attention's output; gate and up, and down, of an MLP or of
        # shared experts; in a layer with experts, two more.
        assert len(weights) == 5 * 5 + 2 * len(spec.moe.layers)
        assert {weight.block_rows for weight in weights} == {128}


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 8, "does not divide 4 experts and 4 attention heads evenly; nearest that works: 4"),
        (
            {"num_attention_heads": 8, "n_routed_experts": 8},
            8,
            "512 columns of a dense MLP in fp8 blocks of 128 and 512",
        ),
        (
            {"v_head_dim": 96},
            2,
            "384 columns of the attention's output in fp8 blocks of 128 evenly; nearest that works: 1",
        ),
        (
            {"intermediate_size": 768},
            4,
            "768 columns of a dense MLP in fp8 blocks of 128 evenly; nearest that works: 2 ",
        ),
        ({"n_shared_experts": 1}, 4, "256 columns of the shared experts in fp8 blocks of 128 evenly"),
    ],
)
def test_ranks_that_divide_blocks_are_refused_with_advice(changes: dict[str, Any], ranks: int, message: str) -> None:
    config = {"model_type": "deepseek_v32", **FAMILIES["deepseek_v32"][1], **changes}
    check_tensor_parallel(read_spec(config, {}, "config.json"), 2 if ranks > 2 else 1)
    if "blocks" in message:
        check_tensor_parallel(read_spec(config, {}, "config.json"), ranks)
        message = f"--tensor-parallel-size {ranks} does not divide {message}"
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        check_tensor_parallel(read_spec(config | {"quantization_config": QUANTISATION}, {}, "config.json"), ranks)
    assert ("--weight-dtype bfloat16" in str(refusal.value)) == ("blocks" in message)
