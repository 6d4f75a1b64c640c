"""Shared servers and their models."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tokenizers
from running_server import API_KEY, ORIGIN, RunningServer, serving

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo-dsa")

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
    """A model directory for `--load-format dummy` that loads quickly. Its tokens are the bytes and one end token."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return str(directory)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the tiny model, for tests that send many requests and ignore the text of the answers."""
    with serving(tmp_path_factory.mktemp("tiny"), tiny_model, "--load-format", "dummy") as server:
        yield server


@pytest.fixture(scope="session")
def limited_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the tiny model with every limit set: a key, small bodies, one running and one waiting request."""
    limits = ["--api-key", API_KEY, "--max-body-mib", "0.01", "--max-queue", "1", "--max-num-seqs", "1"]
    names = ["--served-model-name", "renamed", "--cors-origin", ORIGIN]
    with serving(tmp_path_factory.mktemp("limited"), tiny_model, "--load-format", "dummy", *limits, *names) as server:
        yield server


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the embedded chat model, for tests that do not stop it."""
    with serving(tmp_path_factory.mktemp("embedded"), "embedded") as server:
        yield server


@pytest.fixture(scope="session")
def embedded_client(embedded_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the demo model, whose tokens cost a tenth of the embedded model's."""
    with serving(tmp_path_factory.mktemp("demo"), DEMO) as server:
        yield server


@pytest.fixture(scope="session")
def client(demo_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(demo_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server.url, timeout=60) as http:
        yield http
