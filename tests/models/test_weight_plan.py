"""The plan of a worker's weights, made before anything is read, against the weights that are then loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import CPU, RandomWeights
from matrix import matrix
from models.split_workers import SPECS, parts_of
from torch import Tensor

from hotset.base.errors import CheckpointError
from hotset.models.allowed_splits import stage_layers
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import dummy_weights, open_weights
from hotset.models.collectives import planning_collectives
from hotset.models.config_fields import read_json
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.formats.fp8_blocks import FP8_BLOCKS, FP8_CHECKPOINT
from hotset.models.formats.weight_format import PLAIN_WEIGHTS, FormatRule, WeightFormats
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.spec import AS_COMPUTED, ModelSpec
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.weight_plan import plan_weights

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo-dsa"
GB = 10**9


def measured_bytes(decoder: Decoder) -> int:
    """Returns the bytes of all tensors of a decoder. Packed weights are opaque: they count with the size of their
    values."""
    tensors = [part for part in parts_of(decoder) if isinstance(part, Tensor)]
    stored = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    opaque = sum(tensor.nbytes for tensor in tensors if tensor.layout != torch.strided)
    return opaque + sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())


def splits_of(spec: ModelSpec) -> list[Split]:
    stages = [Split(layers=layers) for layers in stage_layers(spec, 2)]
    tensor = [Split(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    return [WHOLE_MODEL, *stages, *tensor, *([Split(dp_rank=1, dp_size=2)] if spec.moe else [])]


@pytest.mark.parametrize("name", SPECS)
def test_without_packed_copies_the_plan_and_the_loaded_weights_are_smaller(name: str) -> None:
    spec, source = SPECS[name], RandomWeights(torch.float32, seed=1)
    packed, plain = (plan_weights(spec, source, AS_COMPUTED, WHOLE_MODEL, pack_weights=pack) for pack in (True, False))
    assert plain.packed_bytes == 0 and plain.device_bytes == packed.device_bytes - packed.packed_bytes
    assert plain.device_bytes == pytest.approx(measured_bytes(Decoder(spec, source, pack_weights=False)), rel=0.01)
    assert packed.packed_bytes == pytest.approx(measured_bytes(Decoder(spec, source)) - plain.device_bytes, rel=0.03)


def wider(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with sizes at which two ranks can divide fp8 weights."""
    attention = spec.attention
    changed = replace(attention, head_dim=64) if isinstance(attention, GqaSpec) else replace(attention, v_dim=64)
    moe = None if spec.moe is None else replace(spec.moe, width=256)
    return replace(spec, hidden=200, vocab=99, mlp_width=512, attention=changed, moe=moe)


FP8_EXPERTS = WeightFormats((FormatRule(r".*\.mlp\.experts\..*", FP8_BLOCKS),))


@pytest.mark.parametrize(
    ("name", "formats"), matrix([*SPECS], [PLAIN_WEIGHTS, FP8_CHECKPOINT, FP8_EXPERTS], together=1)
)
def test_the_computed_sizes_are_those_of_the_plan_and_of_the_loaded_weights(name: str, formats: WeightFormats) -> None:
    spec = replace(wider(SPECS[name]), weight_formats=formats)
    for split in splits_of(spec):
        source = dummy_weights(torch.bfloat16, CPU, formats=spec.weight_formats)
        plan = plan_weights(spec, source, AS_COMPUTED, split)
        assert worker_weight_bytes(spec, split, dtype_bytes=2) == pytest.approx(plan.device_bytes, rel=0.03), f"{split}"
        decoder = Decoder(spec, source, split=split, collectives=planning_collectives(split.rank, split.size))
        assert plan.device_bytes == pytest.approx(measured_bytes(decoder), rel=0.01), f"{split}"
        assert plan.kv_shape == decoder.kv_shape


PUBLISHED = [
    ("deepseek-v3.2", Split(dp_size=8), 103),
    pytest.param("glm-5.2", Split(dp_size=8), 112, marks=pytest.mark.slow),
    *(
        pytest.param(name, split, None, marks=pytest.mark.slow)
        for name in ("deepseek-v3.2", "glm-5.2", "dsa-50b")
        for split in (WHOLE_MODEL, Split(tp_size=8), Split(tp_rank=7, tp_size=8), Split(tp_size=2, layers=range(3, 21)))
    ),
]


@pytest.mark.parametrize(("name", "split", "gigabytes"), PUBLISHED)
def test_computed_sizes_of_published_models_equal_the_plan(name: str, split: Split, gigabytes: int | None) -> None:
    path = ROOT / "hotset" / "lab" / "plan" / "configs" / f"{name}.json"
    spec = read_spec(read_json(path), {}, str(path))
    source = dummy_weights(torch.bfloat16, CPU, formats=spec.weight_formats)
    plan = plan_weights(spec, source, AS_COMPUTED, split)
    assert worker_weight_bytes(spec, split, dtype_bytes=2) == pytest.approx(plan.device_bytes, rel=0.001)
    if gigabytes is not None:
        assert plan.device_bytes / GB == pytest.approx(gigabytes, rel=0.02), "the size that the project's tables state"


def test_the_bytes_to_read_are_those_that_are_then_read() -> None:
    files = find_model(str(DEMO))
    for split in (WHOLE_MODEL, Split(tp_rank=1, tp_size=2), Split(layers=range(2))):
        reports: list[int] = []
        source = open_weights(files, torch.float32, CPU, progress=reports.append)
        plan = plan_weights(files.spec, source, AS_COMPUTED, split)
        assert not reports, "a plan reads no weights"
        Decoder(files.spec, source, split=split, collectives=planning_collectives(split.rank, split.size))
        source.finish()
        assert reports[-1] == plan.read_bytes


def test_a_missing_tensor_is_reported_by_the_plan() -> None:
    files = find_model(str(DEMO))
    source = open_weights(files, torch.float32, CPU)
    spec = replace(files.spec, layers=files.spec.layers + 1)
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.{files.spec.layers}\.\S+ is missing"):
        plan_weights(spec, source, AS_COMPUTED, WHOLE_MODEL)


def test_planned_tensors_have_no_memory() -> None:
    source = RandomWeights(torch.float32, 1).planned()
    assert source.load("w", (1 << 20, 1 << 20)).is_meta
