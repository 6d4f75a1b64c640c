"""A tiny model, which most servers of these tests load, and a server that several files share."""

import json
from collections.abc import Iterator

import pytest
from byte_level import byte_level
from harness import DEMO
from running_server import RunningServer, serving

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 257,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 256,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model for `--load-format dummy`. The vocabulary is the 256 bytes and one end token."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
    # A message on which the template grows without end.
    template += "{% if messages[0].content == 'grow without end' %}{{ 'A' * 2000000000 }}{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return str(directory)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the demo model, which computes a token in a tenth of the embedded model's time."""
    with serving(tmp_path_factory.mktemp("demo"), DEMO) as server:
        yield server
