"""Every worker loads its part of a checkpoint, keeps nothing else, and still reports tensors that no worker loads."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from models.test_gguf import llama_state, write_gguf
from safetensors.torch import load_file, save_file
from split_workers import SPECS, RecordingWeights, build_stages, on_ranks
from torch import Tensor

from hotset.base.errors import CheckpointError
from hotset.models.allowed_splits import stage_layers
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.weights import WeightSource, open_weights
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder
from hotset.models.spec import ModelSpec
from hotset.models.split import Split, TensorSlice

NAME, SHAPE = "model.layers.0.self_attn.q_proj.weight", (16, 8)
SLICES = [None, TensorSlice(0, 0, 16), TensorSlice(0, 3, 11), TensorSlice(1, 2, 7), TensorSlice(0, 5, 5)]


def save_checkpoint(folder: Path, spec: ModelSpec) -> ModelFiles:
    recording = RecordingWeights()
    Decoder(spec, recording)
    save_file(recording.tensors, folder / "model.safetensors")
    return ModelFiles(folder, spec)


def expect_slices(source: WeightSource, whole: Tensor) -> None:
    """Checks that every loaded slice equals that slice of `whole` and allocates memory only for the slice."""
    for tensor_slice in SLICES:
        expected = whole if tensor_slice is None else tensor_slice.of(whole)
        loaded = source.load(NAME, (*whole.shape,), tensor_slice=tensor_slice)
        assert torch.equal(loaded, expected) and loaded.is_contiguous()
        assert loaded.untyped_storage().nbytes() == expected.numel() * loaded.element_size()
        out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
        assert source.load(NAME, (*whole.shape,), out=out, tensor_slice=tensor_slice) is out
        torch.testing.assert_close(out, expected.double(), rtol=0, atol=0)


def test_slices_of_float32_tensors_equal_those_of_the_whole(tmp_path: Path) -> None:
    whole = torch.randn(SHAPE)
    save_file({NAME: whole}, tmp_path / "model.safetensors")
    expect_slices(open_weights(ModelFiles(tmp_path, SPECS["llama"]), torch.float32, "cpu"), whole)


def test_slices_of_dummy_weights_equal_those_of_the_whole(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, SPECS["llama"])
    whole = open_weights(files, torch.float32, "cpu", load_format="dummy", seed=5).load(NAME, SHAPE)
    expect_slices(open_weights(files, torch.float32, "cpu", load_format="dummy", seed=5), whole)
    ones = open_weights(files, torch.float32, "cpu", load_format="dummy").load(
        "norm.weight", (6,), tensor_slice=TensorSlice(0, 1, 3)
    )
    assert ones.tolist() == [1.0, 1.0]


def gguf_file(path: Path, **extra: Tensor) -> ModelFiles:
    """Writes a random llama with three layers. `extra` are more tensors."""
    write_gguf(path, llama_state() | extra)
    return find_model(str(path))


def test_slices_of_gguf_tensors_equal_those_of_the_whole_in_the_order_of_hugging_face(tmp_path: Path) -> None:
    files = gguf_file(tmp_path / "m.gguf")
    whole = open_weights(files, torch.float32, "cpu").load(NAME, (32, 32))
    expect_slices(open_weights(files, torch.float32, "cpu"), whole)


def load_all(files: ModelFiles, splits: list[Split]) -> None:
    """Loads the weights of each split, one split after another."""
    for split in splits:
        source = open_weights(files, torch.float32, "cpu")
        Decoder(files.spec, source, split=split, collectives=planning_collectives(split.rank, split.size))
        source.finish()


def splits_of(spec: ModelSpec) -> list[Split]:
    first, second = stage_layers(spec, 2)
    return [
        *(Split(rank, 2) for rank in range(2)),
        *(Split(dp_rank=rank, dp_size=2) for rank in range(2)),
        *(Split(rank, 4, layers=stage) for rank in range(4) for stage in (first, second)),
    ]


@pytest.mark.parametrize("name", SPECS)
def test_tensors_of_other_workers_are_not_an_error(name: str, tmp_path: Path) -> None:
    load_all(save_checkpoint(tmp_path, SPECS[name]), splits_of(SPECS[name]))


def test_every_worker_reports_tensors_that_no_worker_loads(tmp_path: Path) -> None:
    extra = [
        "model.layers.0.mlp.experts.1.gate_proj.weight",  # an expert in a dense layer
        "model.layers.4.mlp.experts.8.gate_proj.weight",  # an expert beyond the last one
        "model.layers.4.self_attn.q_norm.weight",
        "model.other.weight",
    ]
    files = save_checkpoint(tmp_path, SPECS["glm_moe_dsa"])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: torch.ones(2) for name in extra}, tmp_path / "model.safetensors")
    reported = f"4 tensors do not belong to a glm_moe_dsa model: {', '.join(extra[:3])}"
    for split in splits_of(files.spec):
        with pytest.raises(CheckpointError, match=reported):
            load_all(files, [split])


def test_each_stage_skips_the_tensors_of_other_stages_in_a_gguf_file(tmp_path: Path) -> None:
    files = gguf_file(tmp_path / "m.gguf")
    stages = [Split(layers=stage) for stage in stage_layers(files.spec, 2)]
    load_all(files, [*stages, Split(1, 2)])
    files = gguf_file(tmp_path / "extra.gguf", **{"blk.1.attn_q_norm.weight": torch.ones(8)})
    for stage in stages:
        with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q_norm"):
            load_all(files, [stage])


def test_each_expert_is_loaded_by_one_rank_and_every_tensor_by_some_worker() -> None:
    spec = SPECS["deepseek_v32"]
    whole = RecordingWeights()
    Decoder(spec, whole)
    for data_parallel in (False, True):
        ranks = [RecordingWeights() for _ in range(4)]
        on_ranks(
            4, lambda peers, weights=ranks, dp=data_parallel: build_stages(spec, weights[peers.rank], None, peers, dp)
        )
        load_counts = sum((recording.load_counts for recording in ranks), Counter())
        assert load_counts.keys() == whole.tensors.keys()
        assert {count for name, count in load_counts.items() if ".experts." in name} == {1}
    stages = [RecordingWeights(), RecordingWeights()]
    for recording, layers in zip(stages, stage_layers(spec, 2), strict=True):
        build_stages(spec, recording, [layers])
    assert stages[0].load_counts + stages[1].load_counts == whole.load_counts
