"""Tokens, text and chat prompts equal those of transformers, and streams return the complete text."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers  # imports its classes lazily
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from hotset.base.errors import CheckpointError, ContextLengthExceeded, RequestError
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.gguf_file import GgufFile, open_gguf
from hotset.models.gguf_tokenizer import build_gguf_tokenizer, gguf_adds_bos
from hotset.models.text_stream import TextStream
from hotset.models.tokenizer import BYTE_OF, SLICE_CHARACTERS, SLICE_TOLERANCE, Tokenizer, TokenizerParts

TEXTS = [
    "The quick brown fox doesn't jump.",
    "  two  spaces\n\n\ttabs 1234567 3.14",
    "Zażółć gęślą jaźń, 日本語, Ελλάδα, русский",
    "🙂👍🏽 👩‍👩‍👧‍👦 e\u0301 \u200b",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hi 🙂"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
DECORATED_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools ' + message.role) }}{% endif %}
    {%- if loop.index > 10 %}{% break %}{% endif %}
    {{ bos_token }}{{ message | tojson }}{{ message | tojson(ensure_ascii=False) }}
    {% generation %}[{{ message.content }}]{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}{{ eos_token }}>{% endif %}
"""


@pytest.fixture(scope="session")
def embedded() -> ModelFiles:
    return find_model("embedded")


@pytest.fixture(scope="session")
def smol(embedded: ModelFiles) -> Tokenizer:
    return not_none(Tokenizer.load(embedded, None))


@pytest.fixture(scope="session")
def smol_dir(embedded: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Hugging Face directory with the embedded model's tokenizer."""
    directory = tmp_path_factory.mktemp("smol")
    file = open_gguf(embedded.path)
    build_gguf_tokenizer(file).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": file.metadata["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    transformers.LlamaConfig().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def oracle(smol_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smol_dir)


@pytest.fixture(scope="session")
def read_back(smol_dir: Path) -> Tokenizer:
    return not_none(from_directory(smol_dir))


@pytest.fixture(scope="session")
def spaced() -> Tokenizer:
    """Returns a tokenizer like SentencePiece's: `▁` for spaces, byte tokens for characters without a piece."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "",
        "▁",
        "▁▁",
        "a",
        "▁a",
        "b",
        "é",
        "▁b",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, True, (2,), None, "test"))


def not_none(tokenizer: Tokenizer | None) -> Tokenizer:
    assert tokenizer is not None
    return tokenizer


def from_directory(directory: Path) -> Tokenizer | None:
    return Tokenizer.load(ModelFiles(directory, find_model(str(directory)).spec), None)


def streamed(stream: TextStream, token_ids: list[int]) -> str:
    return "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_equal_transformers(smol: Tokenizer, read_back: Tokenizer, oracle: Any, text: str) -> None:
    ids = smol.encode(text)
    assert ids == oracle.encode(text) == read_back.encode(text)
    assert smol.decode(ids, skip_special=False) == oracle.decode(ids) == text
    assert smol.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_the_embedded_tokenizer_has_special_tokens_and_adds_none(smol: Tokenizer) -> None:
    assert smol.chat_stop_ids == (2,) and smol.decode([2], skip_special=False) == "<|im_end|>"
    assert {0, 1, 2} <= smol.special_ids and smol.decode([1, 2]) == ""
    assert smol.encode("Hi")[0] not in smol.special_ids  # no BOS
    assert smol.encode("123") == [33, 34, 35]  # each digit is one token


def test_chat_prompts_equal_those_of_transformers(smol: Tokenizer, read_back: Tokenizer, oracle: Any) -> None:
    for messages in (CHAT, CHAT[1:]):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert smol.render_chat(messages) == expected
        assert read_back.render_chat(messages) == expected
        assert smol.encode(expected, add_special=False) == oracle.encode(expected, add_special_tokens=False)


def write_directory(directory: Path, **config: Any) -> Path:
    """Writes a model directory with a tokenizer of a few tokens."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Hi"]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.add_special_tokens(tokens[:3])
    backend.save(str(directory / "tokenizer.json"))
    transformers.LlamaConfig().save_pretrained(directory)
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return directory


def test_a_template_with_every_extension_renders_like_in_transformers(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, chat_template="not this one")
    (directory / "chat_template.jinja").write_text(DECORATED_TEMPLATE)
    oracle = transformers.AutoTokenizer.from_pretrained(directory)
    ours = not_none(from_directory(directory))
    expected = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(CHAT) == expected
    assert "<|im_start|>" in expected and "<kind>" in expected


def test_the_template_named_default_of_several_is_used(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    ours = not_none(from_directory(write_directory(tmp_path, chat_template=templates)))
    assert ours.render_chat(CHAT) == "Be brief & <kind>.!"


def test_messages_that_a_template_refuses_are_a_request_error(tmp_path: Path) -> None:
    ours = not_none(from_directory(write_directory(tmp_path, chat_template=DECORATED_TEMPLATE)))
    with pytest.raises(RequestError, match="no tools tool") as refusal:
        ours.render_chat([{"role": "tool", "content": "x"}])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("message", [{"content": 3}, {"role": "user", "content": 3}])
def test_messages_on_which_a_template_fails_are_a_request_error(smol: Tokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        smol.render_chat([message])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    ours = not_none(from_directory(write_directory(tmp_path, chat_template=escape)))
    with pytest.raises(RequestError):
        ours.render_chat(CHAT)


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path, smol_dir: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert from_directory(tmp_path) is None
    found = find_model(str(tmp_path))
    assert not_none(Tokenizer.load(found, str(smol_dir))).encode("123") == [33, 34, 35]
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(found, str(tmp_path))
    with pytest.raises(CheckpointError, match="File name too long"):
        Tokenizer.load(found, "x" * 5000)


def test_bos_is_added_once_if_the_configuration_requires_it(tmp_path: Path, spaced: Tokenizer) -> None:
    ours = not_none(from_directory(write_directory(tmp_path, add_bos_token=True)))
    assert ours.encode("Hi") == [1, *ours.encode("Hi", add_special=False)]
    assert spaced.encode("a") == [1, *spaced.encode("a", add_special=False)]  # the post-processor adds BOS


class CountingBackend:
    """Records the length of every text that the library encodes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


def test_a_text_far_beyond_the_limit_is_refused_after_its_first_slices(smol: Tokenizer) -> None:
    backend: Any = CountingBackend(smol._backend)
    tokenizer = Tokenizer(TokenizerParts(backend, {}, False, (), None, "test"))
    text = "The quick brown fox doesn't jump. " * 30_000
    with pytest.raises(ContextLengthExceeded, match=rf"limit is 40000 tokens.* of {len(text)} characters") as refusal:
        tokenizer.encode(text, max_tokens=40_000)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")
    assert backend.lengths == [SLICE_CHARACTERS] * 2
    fitting = text[: 2 * SLICE_CHARACTERS]
    assert tokenizer.encode(fitting, max_tokens=len(fitting)) == tokenizer.encode(fitting)


WORDS = st.sampled_from(["a", "e\u0301", " ", "  ", "\n", "7", "The", " quick", "<|im_start|>", "日本", "🙂", "_"])


@examples(40)
@given(words=st.lists(WORDS, max_size=30), repeats=st.sampled_from([1, 50]), data=st.data())
def test_cuts_add_few_tokens(
    smol: Tokenizer, spaced: Tokenizer, words: list[str], repeats: int, data: st.DataObject
) -> None:
    """Texts are judged by their slices, so the parts of a text must not have many more tokens than the whole."""
    text = "".join(word * repeats for word in words)
    cut = data.draw(st.integers(0, len(text)))
    for tokenizer in (smol, spaced):
        whole, *parts = (len(tokenizer.encode(piece, add_special=False)) for piece in (text, text[:cut], text[cut:]))
        assert sum(parts) - whole <= SLICE_TOLERANCE


def test_half_a_surrogate_pair_is_a_request_error(smol: Tokenizer) -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        smol.encode("broken \ud83d half")


@examples(60)
# The vocabulary lacks some bytes; characters outside these categories do not need them.
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=40))
def test_text_survives_encoding_and_streaming(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text)
    assert smol.decode(ids, skip_special=False) == text
    assert streamed(smol.stream(skip_special=False), ids) == text
    assert b"".join(map(smol.token_bytes, ids)) == text.encode()


AnyIds = st.lists(
    st.one_of(st.integers(0, 600), st.integers(0, 49152), st.sampled_from([-1, 1 << 31, 1 << 70])), max_size=30
)


@examples(80)
@given(token_ids=AnyIds, skip_special=st.booleans())
def test_byte_streams_add_up_to_decode(smol: Tokenizer, token_ids: list[int], skip_special: bool) -> None:
    expected = smol.decode(token_ids, skip_special=skip_special)
    assert streamed(smol.stream(skip_special=skip_special), token_ids) == expected


@examples(150)
@given(
    token_ids=st.lists(st.one_of(st.integers(-1, 270), st.integers(255, 270), st.integers(190, 260)), max_size=16),
    skip_special=st.booleans(),
)
@example(token_ids=[262, 259, 263], skip_special=True)  # "a", an empty piece, " a": the space must stay
@example(token_ids=[262, 3 + 0x41, 3 + 0xE2, 264], skip_special=True)  # an invalid byte makes adjacent bytes invalid
def test_window_streams_add_up_to_decode(spaced: Tokenizer, token_ids: list[int], skip_special: bool) -> None:
    expected = spaced.decode(token_ids, skip_special=skip_special)
    assert streamed(spaced.stream(skip_special=skip_special), token_ids) == expected


def test_a_stream_returns_a_character_with_its_last_byte(smol: Tokenizer, spaced: Tokenizer) -> None:
    ids = smol.encode("👍")
    assert len(ids) > 1
    stream = smol.stream()
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["👍"]
    stream = spaced.stream()
    pushed = [stream.push(3 + byte) for byte in "€".encode()]
    assert pushed == ["", "", ""] and stream.push(spaced.encode("a", add_special=False)[0]) == "€ a"
    assert spaced.token_bytes(3 + 0xE2) == b"\xe2" and spaced.token_bytes(263) == b" a"


def test_streams_skip_special_tokens_only_on_request(smol: Tokenizer) -> None:
    ids = smol.encode("a<|im_end|>b")
    assert streamed(smol.stream(), ids) == "ab"
    assert streamed(smol.stream(skip_special=False), ids) == "a<|im_end|>b"


def gguf_with(pre: str, **changes: Any) -> GgufFile:
    """Returns a file that has only metadata: a vocabulary of bytes and a few merges."""
    alphabet = sorted(BYTE_OF, key=lambda character: BYTE_OF[character])
    tokens = [*alphabet, "12", "123", "he", "hel", "Ġhe", "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "h e", "he l", "Ġ he"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return GgufFile(Path("m.gguf"), metadata, {}, None)  # type: ignore[arg-type]


def test_the_qwen2_vocabulary_of_a_gguf_file_splits_words_like_transformers() -> None:
    file = gguf_with("qwen2")
    vocab = {token: index for index, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    oracle = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    ours = build_gguf_tokenizer(file)
    for text in [*TEXTS[:4], "hello 123 he'll 1234  x\r\n\r\n y", "e\u0301"]:
        assert ours.encode(text).ids == oracle.encode(text)


def test_each_gguf_vocabulary_splits_digits_in_its_own_way() -> None:
    token_counts = {
        pre: len(build_gguf_tokenizer(gguf_with(pre)).encode("1231").ids) for pre in ("gpt-2", "llama-bpe", "smollm")
    }
    assert token_counts == {"gpt-2": 2, "llama-bpe": 2, "smollm": 4}
    words = {
        pre: build_gguf_tokenizer(gguf_with(pre)).pre_tokenizer.pre_tokenize_str("12345")
        for pre in ("gpt-2", "llama-bpe", "qwen2")
    }
    assert {pre: [word for word, _ in pieces] for pre, pieces in words.items()} == {
        "gpt-2": ["12345"],
        "llama-bpe": ["123", "45"],
        "qwen2": ["1", "2", "3", "4", "5"],
    }


def test_bos_follows_the_setting_in_the_gguf_file_or_else_the_default_of_the_vocabulary() -> None:
    assert gguf_adds_bos(gguf_with("llama-bpe")) and not gguf_adds_bos(gguf_with("llama-bpe", add_bos_token=False))
    assert not gguf_adds_bos(gguf_with("smollm")) and gguf_adds_bos(gguf_with("smollm", add_bos_token=True))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (gguf_with("tekken"), "tokenizer.ggml.pre is 'tekken'"),
        (gguf_with("smollm", model="llama"), "tokenizer.ggml.model is 'llama'"),
        (gguf_with("smollm", merges=["zz yy"]), "do not fit"),
        (gguf_with("smollm", tokens=None), "tokenizer.ggml.tokens is missing"),
    ],
)
def test_unsupported_gguf_vocabularies_are_refused_by_name(file: GgufFile, words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        build_gguf_tokenizer(file)
    assert words in str(refusal.value)
    assert "--tokenizer DIR" in str(refusal.value) or "ggml.pre" not in words


def test_a_sentencepiece_directory_matches_transformers(tmp_path: Path, spaced: Tokenizer) -> None:
    spaced._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    transformers.LlamaConfig().save_pretrained(tmp_path)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = not_none(from_directory(tmp_path))
    for text in ["a b", "a  é€b", "🙂 a"]:
        ids = ours.encode(text)
        assert ids == oracle.encode(text)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == streamed(ours.stream(), ids)
