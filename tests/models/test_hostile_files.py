"""Model files with absurd contents are refused in one line that names the file, quickly, and with no other error."""

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from examples import examples
from harness import DSA_SIZES
from hypothesis import given
from hypothesis import strategies as st
from models.test_config_reader import SIZES, fields_read
from tokenizers import models, pre_tokenizers

from hotset.base.config import EngineConfig
from hotset.base.errors import RequestError, StartupError
from hotset.engine.frontend import load_frontend
from hotset.engine.model_checks import check_weights_fit
from hotset.models import gguf_tokenizer, tokenizer_probe
from hotset.models import tokenizer as tokenizer_module
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.gguf_file import GgufFile
from hotset.models.checkpoint.gguf_spec import gguf_spec
from hotset.models.decoder import worker_kv_shape
from hotset.models.families import FAMILIES
from hotset.models.rope import Rope, softmax_gain
from hotset.models.spec import KvStorage
from hotset.models.split import WHOLE_MODEL
from hotset.models.tokenizer import Tokenizer, TokenizerParts

CPU = torch.device("cpu")
MAX_CPU_SECONDS = 1.0
LONG_NUMBER = "@a number of 5000 digits@"  # json.dumps refuses to write such a number
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIG: dict[str, Any] = {**SIZES, **DSA_SIZES, "num_key_value_heads": 2, "rope_parameters": ROPE}
TOKENIZER_FIELDS = ("bos_token", "eos_token", "pad_token", "add_bos_token", "chat_template", "tokenizer_class")
GENERATION_FIELDS = ("eos_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


# The paths of all fields that a configuration reader looks up.
FIELDS = sorted({tuple(path.split(".")) for name in FAMILIES for path in fields_read({**CONFIG, "model_type": name})})
FEW_VALUES = [None, [], {}, "x", -1, 0, 2**31 - 1, 10**400, math.nan, 5e-324]
HOSTILE_VALUES = [
    *FEW_VALUES,
    *(True, False, "", "\ud800", "default", "llama3", "FSSF", [[]], {"": None}),
    *([10**400], [None] * 4, ["full"] * 4, ["sparse", []] * 2, {"content": 1}, [{"name": [], "template": 1}]),
    *(-(10**400), 1, 3, 1025, 32768, 65537, 10**9, 2**31, 10**12, 2**63, LONG_NUMBER),
    *(math.inf, -math.inf, -0.0, 1e-308, 1.0000000000000002, 1e30, 1e308),
]
LEAVES = st.one_of(st.sampled_from(HOSTILE_VALUES), st.integers(-3, 70), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(
            st.sampled_from(["content", "name", "template", "rope_type", "factor", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)


def dumped(value: object) -> str:
    return json.dumps(value).replace(f'"{LONG_NUMBER}"', "7" * 5000)


@contextmanager
def accepted_or_refused(file: str) -> Iterator[None]:
    """Passes if the body raises nothing, or StartupError with one line that names `file`, in little time."""
    began = time.process_time()
    try:
        yield
    except StartupError as error:
        assert file in str(error) and "\n" not in str(error) and len(str(error)) < 1000
    assert time.process_time() - began < MAX_CPU_SECONDS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def check_config(model_dir: Path, architecture: str, changes: Iterable[tuple[tuple[str, ...], Any]]) -> None:
    """Reads a configuration with changed fields, and builds what start-up builds before it loads weights."""
    config = CONFIG | {"model_type": architecture, "rope_parameters": dict(ROPE)}
    for path, value in changes:
        section = config["rope_parameters"] if len(path) > 1 else config
        if isinstance(section, dict):
            section[path[-1]] = value
    (model_dir / "config.json").write_text(dumped(config))
    with accepted_or_refused("config.json"):
        files = find_model(str(model_dir))
        spec = files.spec
        worker_kv_shape(spec, torch.float32, KvStorage())
        softmax_gain(spec.rope)
        if spec.rope.dim <= 4096:
            Rope(spec.rope, torch.float32, CPU).at(torch.arange(3))
        with accepted_or_refused(str(model_dir)):
            check_weights_fit(files, [WHOLE_MODEL], torch.float32.itemsize, 1 << 40)


@examples(15)
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    changes=st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3),
)
def test_defect_26_any_value_in_any_field_of_config_json_is_accepted_or_refused_by_name(
    model_dir: Path, architecture: str, changes: list[tuple[tuple[str, ...], Any]]
) -> None:
    check_config(model_dir, architecture, changes)


@examples(12)
@given(
    generation=st.dictionaries(st.sampled_from(GENERATION_FIELDS), VALUES, max_size=3),
    tokenizer=st.dictionaries(st.sampled_from(TOKENIZER_FIELDS), VALUES, max_size=3),
)
def test_defect_26_any_value_in_the_other_configurations_is_accepted_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, generation: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "frontend"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(dumped(CONFIG | {"model_type": "llama"}))
    (directory / "generation_config.json").write_text(dumped(generation))
    (directory / "tokenizer_config.json").write_text(dumped(tokenizer))
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(directory / "tokenizer.json"))
    with accepted_or_refused(str(directory)) if "eos_token_id" not in generation else accepted_or_refused("config"):
        close(load_frontend(EngineConfig(model=str(directory))).tokenizer)


def close(tokenizer: Tokenizer | None) -> None:
    """Ends the processes that render chat templates."""
    if tokenizer is not None:
        tokenizer.close()


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"model_type": "llama", "x": ' + "[" * 500 + "]" * 500 + "}",
        json.dumps({"model_type": json.loads("[" * 400 + "]" * 400)}),
        "null",
        "",
        "7" * 5000,
        '{"model_type": "\\ud800"}',
        '{"bos_token": "\\ud800"}',
        '{"model_type": "llama"}' + " " * (9 << 20),
        json.dumps({"model_type": "x" * 1_000_000}),
        json.dumps({"model_type": ["x"] * 500_000}),
    ],
    ids=lambda content: f"{content[:12]} {len(content)}",
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_defect_26_absurd_json_is_refused_in_one_line_with_the_file(tmp_path: Path, content: str, file: str) -> None:
    (tmp_path / "config.json").write_text(dumped(CONFIG | {"model_type": "llama"}))
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(content)
    with accepted_or_refused(file):
        load_frontend(EngineConfig(model=str(tmp_path)))
        assert file != "config.json", "accepted"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("vocab_size", 10**12, "vocab_size is 1000000000000; supported: a whole number from 1 to 2147483647"),
        ("hidden_size", 0, "hidden_size is 0; supported: a whole number from 1"),
        ("hidden_size", -32, "hidden_size is -32; supported: a whole number from 1"),
        pytest.param("rms_norm_eps", 10**400, "rms_norm_eps is inf; supported: a number from", id="400 digits"),
        ("rope_theta", LONG_NUMBER, "rope_theta is inf"),
        ("index_topk", 10**6, "index_topk is 1000000; supported: a whole number from 1 to 32767"),
        ("n_routed_experts", 10**8, "n_routed_experts is 100000000"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; supported: a whole number from 1 to 1024"),
    ],
)
def test_defect_26_absurd_numbers_are_refused_by_field(tmp_path: Path, field: str, value: object, words: str) -> None:
    (tmp_path / "config.json").write_text(dumped(CONFIG | {"model_type": "deepseek_v32", field: value}))
    began = time.process_time()
    with pytest.raises(StartupError) as refusal:
        find_model(str(tmp_path))
    assert time.process_time() - began < MAX_CPU_SECONDS
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {words}")


def tokenizer_dir(directory: Path, pattern: str) -> Path:
    """Writes a model directory whose tokenizer splits text by `pattern`."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("PATTERN"), behavior="isolated")
    content = backend.to_str().replace('"PATTERN"', json.dumps(pattern))
    (directory / "tokenizer.json").write_text(content)
    (directory / "config.json").write_text(dumped(CONFIG | {"model_type": "llama"}))
    return directory


def tokenizer_refusal(directory: Path) -> str:
    with pytest.raises(StartupError) as refusal:
        load_frontend(EngineConfig(model=str(directory)))
    message = str(refusal.value)
    assert message.startswith(str(directory / "tokenizer.json")) and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("pattern", "escaped"), [("(a+)+$", False), ("(a|a)*b", True), (r"(\w+\s?)+;", False), ("((", False)]
)
def test_defect_26_exponential_or_broken_patterns_are_refused(tmp_path: Path, pattern: str, escaped: bool) -> None:
    path = tokenizer_dir(tmp_path, pattern) / "tokenizer.json"
    if escaped:
        path.write_text(path.read_text().replace('"Regex"', '"\\u0052egex"'))
    message = tokenizer_refusal(tmp_path)
    assert ("parenthesis" if pattern == "((" else "retry-limit") in message


def test_defect_26_a_slow_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_probe, "CPU_SECONDS", 1)
    assert "did not finish within 1 s" in tokenizer_refusal(tokenizer_dir(tmp_path, "a*a*b"))


def test_a_text_on_which_a_pattern_backtracks_too_often_is_a_request_error() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), behavior="isolated")
    tokenizer = Tokenizer(TokenizerParts(backend, {}, False, (), None, "test"))
    with pytest.raises(RequestError, match="the tokenizer fails on this text"):
        tokenizer.encode("a" * 60 + "!")
    assert tokenizer.encode("a") == [0]


def test_the_patterns_of_usual_tokenizers_are_accepted(tmp_path: Path) -> None:
    for pattern in (gguf_tokenizer._LLAMA3_WORDS, gguf_tokenizer._QWEN2_WORDS, r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"):
        tokenizer = load_frontend(EngineConfig(model=str(tokenizer_dir(tmp_path, pattern)))).tokenizer
        assert tokenizer is not None and tokenizer.encode("abba") == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        "\0",
        "\ud800",
    ],
    ids=range(8),
)
def test_a_malformed_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tokenizer_dir(tmp_path, "a") / "tokenizer.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    tokenizer_refusal(tmp_path)


def test_a_tokenizer_too_large_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer_dir(tmp_path, "a")
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", 100)
    assert "has more than 100 B" in tokenizer_refusal(tmp_path)


GGUF_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 2.0,
    "llama.vocab_size": 3,
    "tokenizer.chat_template": None,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 1,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
}
GGUF_LEAVES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), st.integers(-2, 9), st.floats(width=32), st.text(max_size=8)
)
GGUF_VALUES = st.one_of(GGUF_LEAVES, st.lists(st.one_of(GGUF_LEAVES, st.lists(GGUF_LEAVES, max_size=2)), max_size=4))


@examples(60)
@given(changes=st.dictionaries(st.sampled_from(sorted(GGUF_METADATA)), GGUF_VALUES, min_size=1, max_size=3))
def test_defect_26_any_metadata_of_a_gguf_file_are_accepted_or_refused_by_name(changes: dict[str, Any]) -> None:
    file = GgufFile(Path("m.gguf"), GGUF_METADATA | changes, {}, None)  # type: ignore[arg-type]
    with accepted_or_refused("m.gguf"):
        gguf_spec(file)
        close(Tokenizer.load(ModelFiles(file.path, spec=None, gguf=file), None))  # type: ignore[arg-type]
