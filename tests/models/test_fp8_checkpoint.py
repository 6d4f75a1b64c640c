"""fp8 weights are read bit for bit in every slice, and damaged ones are refused by file and tensor name."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from split_workers import SPECS
from torch import Tensor

from hotset.base.errors import CheckpointError, ConfigError
from hotset.kernels.fp8 import Fp8Weight, common_block_rows
from hotset.models.checkpoint import stored_tensors
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.weights import WeightSource, open_weights
from hotset.models.formats.fp8_blocks import FP8_BLOCKS, FP8_CHECKPOINT
from hotset.models.formats.weight_format import PLAIN_WEIGHTS
from hotset.models.split import TensorSlice

NAME = "model.layers.1.self_attn.q_proj.weight"
SCALE = NAME + "_scale_inv"
CPU = torch.device("cpu")


def open_tensors(folder: Path, tensors: dict[str, Tensor], fp8: bool = True) -> WeightSource:
    """Writes a checkpoint with these tensors and opens it. With `fp8`, its weights stay in fp8."""
    formats = FP8_CHECKPOINT if fp8 else PLAIN_WEIGHTS
    save_file(tensors, folder / "model.safetensors")
    return open_weights(ModelFiles(folder, replace(SPECS["llama"], weight_formats=formats)), torch.float32, CPU)


def random_fp8(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Returns a tensor of random codes, NaN excluded, and its scales."""
    random = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(127, (rows, columns), generator=random)
    codes = (magnitudes + 128 * torch.randint(2, (rows, columns), generator=random)).to(torch.uint8)
    scales = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=random) + 0.1
    return {NAME: codes.view(torch.float8_e4m3fn), SCALE: scales}


def fp8_value(byte: int) -> float:
    """Decodes e4m3fn by its definition: sign, 4 bits of exponent with bias 7, 3 bits of fraction, no infinities."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    magnitude = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 128 else magnitude


VALUES = numpy.array([fp8_value(byte) for byte in range(256)], dtype=numpy.float32)


def output_scales(scales: Tensor, rows: int) -> Tensor:
    """Returns the scales of each output, found one by one."""
    return torch.stack([scales[row // 128] for row in range(rows)])


def defined_values(tensors: dict[str, Tensor]) -> Tensor:
    """Returns the float32 values by the definition of the format."""
    rows, columns = tensors[NAME].shape
    per_output = output_scales(tensors[SCALE], rows).numpy()
    factors = numpy.stack([per_output[:, column // 128] for column in range(columns)], axis=1)
    return torch.from_numpy(VALUES[tensors[NAME].view(torch.uint8).numpy()] * factors)


@st.composite
def slices(draw: st.DrawFn, rows: int, columns: int, *, any_input: bool) -> TensorSlice | None:
    """Draws a slice of the outputs that begins anywhere, or of the inputs; these begin at a block or anywhere."""
    kind = draw(st.sampled_from(["whole", "outputs", "inputs"]))
    if kind == "whole":
        return None
    size, unit = (rows, 1) if kind == "outputs" else (columns, 1 if any_input else 128)
    first = draw(st.integers(0, (size - 1) // unit)) * unit
    last = min(size, first + draw(st.integers(1, (size - 1) // unit + 1)) * unit)
    return TensorSlice(0 if kind == "outputs" else 1, first, last)


SHAPES = {"rows": st.integers(1, 300), "columns": st.integers(1, 300), "seed": st.integers(0, 1 << 30)}


@examples(12)
@given(data=st.data(), **SHAPES)
def test_expanded_slices_match_the_definition(
    data: st.DataObject, rows: int, columns: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = random_fp8(rows, columns, seed)
    part = data.draw(slices(rows, columns, any_input=True))
    expected = defined_values(tensors) if part is None else part.of(defined_values(tensors))
    for fp8 in (True, False):
        source = open_tensors(tmp_path_factory.mktemp("fp8"), tensors, fp8)
        assert torch.equal(source.load(NAME, (rows, columns), tensor_slice=part), expected)
        out = torch.full((expected.shape[0] + 2, expected.shape[1]), torch.nan, dtype=torch.float64)
        source.load_weight(NAME, (rows, columns), out=out[1:-1], tensor_slice=part)
        assert torch.equal(out[1:-1], expected.double()) and out[0].isnan().all() and out[-1].isnan().all()
        source.finish()  # the scales count as loaded


def check_kept_slice(tensors: dict[str, Tensor], part: TensorSlice | None, before: int, folder: Path) -> None:
    """Loads a slice alone and into a merged weight, behind `before` outputs that must not change."""
    rows, columns = tensors[NAME].shape
    codes, scales = tensors[NAME].view(torch.uint8), output_scales(tensors[SCALE], rows)
    first_output = 0
    if part is not None and part.dim == 0:
        codes, scales, first_output = part.of(codes), part.of(scales), part.first
    elif part is not None:
        codes, scales = part.of(codes), scales[:, part.first // 128 : math.ceil(part.last / 128)]
    source = open_tensors(folder, tensors)
    assert source.format_of(NAME) == FP8_BLOCKS
    alone = source.load_weight(NAME, (rows, columns), tensor_slice=part)
    block_rows = common_block_rows(before, first_output)
    merged = Fp8Weight.empty((before + codes.shape[0], codes.shape[1]), CPU, block_rows)
    merged.codes.view(torch.uint8).fill_(0xAB)
    merged.scales.fill_(torch.nan)
    inner = merged.outputs(before, before + codes.shape[0])
    assert source.load_weight(NAME, (rows, columns), out=inner, tensor_slice=part) is inner
    for weight in (alone, inner):
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(weight.codes.view(torch.uint8), codes) and torch.equal(weight.output_scales(), scales)
    assert isinstance(alone, Fp8Weight) and alone.block_rows == common_block_rows(first_output)
    assert (merged.codes.view(torch.uint8)[:before] == 0xAB).all()
    assert merged.scales[: before // block_rows].isnan().all()
    planned = source.planned().load_weight(NAME, (rows, columns), tensor_slice=part)
    assert isinstance(planned, Fp8Weight) and planned.device.type == "meta"
    assert (planned.shape, planned.block_rows) == (alone.shape, alone.block_rows)


@examples(10)
@given(data=st.data(), before=st.integers(0, 200), **SHAPES)
def test_random_slices_that_stay_in_fp8_keep_their_bits(
    data: st.DataObject, before: int, rows: int, columns: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    part = data.draw(slices(rows, columns, any_input=False))
    check_kept_slice(random_fp8(rows, columns, seed), part, before, tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize(
    ("part", "before"),
    [
        (None, 0),
        (TensorSlice(0, 70, 201), 0),  # begins and ends inside a block
        (TensorSlice(0, 96, 288), 48),
        (TensorSlice(0, 127, 257), 0),  # has outputs of three blocks
        (TensorSlice(0, 128, 256), 7),
        (TensorSlice(0, 299, 300), 130),
        (TensorSlice(1, 0, 128), 0),
        (TensorSlice(1, 128, 290), 64),
    ],
)
def test_chosen_slices_that_stay_in_fp8_keep_their_bits(part: TensorSlice | None, before: int, tmp_path: Path) -> None:
    check_kept_slice(random_fp8(300, 290, 17), part, before, tmp_path)


@pytest.mark.parametrize(("first", "last"), [(64, 128), (0, 100), (128, 200)])
def test_a_slice_within_a_block_of_inputs_is_refused_with_the_numbers(first: int, last: int, tmp_path: Path) -> None:
    source = open_tensors(tmp_path, random_fp8(4, 256, 1))
    with pytest.raises(ConfigError) as refusal:
        source.load_weight(NAME, (4, 256), tensor_slice=TensorSlice(1, first, last))
    message = str(refusal.value)
    assert (
        f"{tmp_path / 'model.safetensors'}: tensor {NAME}" in message and f"inputs {first} to {last} of 256" in message
    )
    assert "multiples of 128" in message and "divides 2" in message and "--tensor-parallel-size" in message


def with_value(tensor: Tensor, value: float) -> Tensor:
    tensor[-1, -1] = value
    return tensor


def nan_codes(rows: int) -> Tensor:
    codes = torch.zeros(rows, 200, dtype=torch.uint8)
    codes[rows // 2 :, 3] = 0x7F
    codes[-1, 4] = 0xFF
    return codes.view(torch.float8_e4m3fn)


BAD = {
    "NaN scale": ({SCALE: with_value(torch.ones(2, 2), math.nan)}, [SCALE, "1 of 4 scales"]),
    "infinite scale": ({SCALE: with_value(torch.ones(2, 2), math.inf)}, [SCALE, "1 of 4 scales"]),
    "zero scale": ({SCALE: torch.zeros(2, 2)}, [SCALE, "4 of 4 scales are NaN, infinite, zero or negative"]),
    "negative scale": ({SCALE: with_value(torch.ones(2, 2), -1.0)}, [SCALE, "1 of 4 scales"]),
    "scales of whole numbers": ({SCALE: torch.ones(2, 2, dtype=torch.int32)}, [SCALE, "int32"]),
    "scale per tensor": ({SCALE: torch.ones(1)}, [SCALE, "[1]", "128 x 128 require [2, 2]"]),
    "scale of other blocks": ({SCALE: torch.ones(4, 2)}, [SCALE, "[4, 2]", "128 x 128 require [2, 2]"]),
    "missing scale": ({SCALE: None}, [NAME, f"{SCALE} is missing"]),
    "NaN codes": ({NAME: nan_codes(200)}, [f"{NAME}: 101 of 40000 values are NaN"]),
}


@pytest.mark.parametrize("keeps_fp8", [True, False])
@pytest.mark.parametrize("case", BAD)
def test_damaged_fp8_is_refused(case: str, keeps_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "PIECE_BYTES", 1000)  # a few rows
    changes, words = BAD[case]
    tensors = {name: tensor for name, tensor in (random_fp8(200, 200, 3) | changes).items() if tensor is not None}
    source = open_tensors(tmp_path, tensors, keeps_fp8)
    with pytest.raises(CheckpointError) as refusal:
        source.load_weight(NAME, (200, 200))
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: tensor ") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("shape", [(200,), (2, 200, 3)])
def test_fp8_tensors_that_are_no_matrices_are_refused_by_name(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = open_tensors(tmp_path, {NAME: torch.ones(shape).to(torch.float8_e4m3fn), SCALE: torch.ones(1, 1)})
    for load in (source.load, source.load_weight):
        with pytest.raises(CheckpointError, match=r"q_proj.weight is fp8 of shape .*; supported: matrices"):
            load(NAME, shape)


def test_a_rank_does_not_notice_nan_in_the_outputs_of_another_rank(tmp_path: Path) -> None:
    source = open_tensors(tmp_path, random_fp8(200, 200, 3) | {NAME: nan_codes(200)})
    source.load_weight(NAME, (200, 200), tensor_slice=TensorSlice(0, 0, 100))
    with pytest.raises(CheckpointError, match="1 of 200 values are NaN"):
        source.load_weight(NAME, (200, 200), tensor_slice=TensorSlice(0, 100, 101))


def test_progress_counts_the_bytes_of_slices(tmp_path: Path) -> None:
    save_file(random_fp8(256, 256, 1) | {"plain.weight": torch.ones(64, 8)}, tmp_path / "model.safetensors")
    reports: list[int] = []
    files = ModelFiles(tmp_path, replace(SPECS["llama"], weight_formats=FP8_CHECKPOINT))
    source = open_weights(files, torch.float32, CPU, progress=reports.append)
    source.load_weight(NAME, (256, 256), tensor_slice=TensorSlice(0, 0, 64))
    source.load("plain.weight", (64, 8), tensor_slice=TensorSlice(0, 8, 16))
    scales = 4 * 4
    assert reports == [64 * 256 + scales // 4, 64 * 256 + scales // 4 + 8 * 8 * 4]
    tensors = source.tensor_source
    assert tensors.stored_bytes(NAME) == 256 * 256 + scales and tensors.stored_bytes("plain.weight") == 64 * 8 * 4


def test_scales_of_one_byte_are_read_too(tmp_path: Path) -> None:
    """Checkpoints with scales in powers of two (ue8m0) may store only their exponents."""
    tensors = random_fp8(130, 20, 5)
    powers = torch.tensor([[0.25], [8.0]])
    source = open_tensors(tmp_path, tensors | {SCALE: powers.to(torch.float8_e8m0fnu)})
    weight = source.load_weight(NAME, (130, 20))
    assert isinstance(weight, Fp8Weight) and torch.equal(weight.scales, powers)


DUMMY_KINDS: dict[str, Any] = {
    "model.layers.3.self_attn.q_a_proj.weight": True,
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": True,
    "model.layers.3.self_attn.kv_b_proj.weight": True,
    "model.layers.3.self_attn.indexer.wq_b.weight": True,
    "model.layers.3.self_attn.indexer.wk.weight": True,
    "model.layers.3.mlp.experts.7.gate_proj.weight": True,
    "model.layers.3.mlp.shared_experts.down_proj.weight": True,
    "model.layers.3.mlp.gate.weight": False,
    "model.layers.3.self_attn.indexer.weights_proj.weight": False,
    "model.layers.3.self_attn.q_a_layernorm.weight": False,
    "model.layers.3.self_attn.q_a_proj.bias": False,
    "model.embed_tokens.weight": False,
    "lm_head.weight": False,
}


def test_made_up_weights_are_fp8_where_published_checkpoints_are(tmp_path: Path) -> None:
    for fp8 in (True, False):
        files = ModelFiles(
            tmp_path, replace(SPECS["deepseek_v32"], weight_formats=FP8_CHECKPOINT if fp8 else PLAIN_WEIGHTS)
        )
        source = open_weights(files, torch.float32, CPU, load_format="dummy")
        found = {name: source.format_of(name) == FP8_BLOCKS for name in DUMMY_KINDS}
        assert found == (DUMMY_KINDS if fp8 else dict.fromkeys(DUMMY_KINDS, False))
        for name, kind in found.items():
            assert isinstance(source.load_weight(name, (130, 140)), Fp8Weight) == kind


def test_slices_of_made_up_fp8_weights_are_those_of_one_finite_random_weight(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, replace(SPECS["deepseek_v32"], weight_formats=FP8_CHECKPOINT))
    source = open_weights(files, torch.float32, CPU, load_format="dummy", seed=4)
    whole = source.load_weight(NAME, (300, 256))
    assert isinstance(whole, Fp8Weight)
    values = whole.dequantised(torch.float32)
    assert values.isfinite().all() and 0.015 < values.std() < 0.025 and abs(values.mean()) < 0.001
    assert len(whole.codes.view(torch.uint8).unique()) == 254 and len(whole.scales.unique()) == 6
    assert torch.equal(source.load(NAME, (300, 256)), values)
    for part in (TensorSlice(0, 70, 201), TensorSlice(1, 128, 256)):
        loaded = source.load_weight(NAME, (300, 256), tensor_slice=part)
        assert isinstance(loaded, Fp8Weight) and torch.equal(loaded.dequantised(torch.float32), part.of(values))
    other = open_weights(files, torch.float32, CPU, load_format="dummy", seed=5).load(NAME, (300, 256))
    assert not torch.equal(other, values)
