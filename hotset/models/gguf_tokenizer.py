"""Rebuilds the tokenizer in the metadata of a GGUF file for the `tokenizers` library."""

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hotset.base.errors import CheckpointError
from hotset.models.checkpoint.gguf_file import GgufFile
from hotset.models.config_fields import ConfigFields

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is split into words before merging. The two patterns differ in the maximum number of digits of a word.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> pre_tokenizers.PreTokenizer:
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])


PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": _single_digits,
    "llama-bpe": lambda: _split_by(_LLAMA3_WORDS),
    "qwen2": lambda: _split_by(_QWEN2_WORDS),
}
ADDS_BOS_BY_DEFAULT = ("llama-bpe",)
IGNORES_MERGES = ("llama-bpe",)  # a word that is itself a token becomes that token; its merges are ignored
NORMALISES_TO_NFC = ("qwen2",)  # Unicode normal form C, before the split into words


def build_gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE from the vocabulary. Raises `CheckpointError`, with advice, for other kinds."""
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    _check_kind(file, pre)
    tokens = _texts(file, "tokens")
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _texts(file, "merges")]
    try:
        model = models.BPE(
            {token: index for index, token in enumerate(tokens)}, merges, ignore_merges=pre in IGNORES_MERGES
        )
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file.path}: the vocabulary and its merges do not fit: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    if pre in NORMALISES_TO_NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = _metadata_list(file, "token_type") if "tokenizer.ggml.token_type" in file.metadata else []
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED)]
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token, kind in added if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token, kind in added if kind != CONTROL])
    return tokenizer


def gguf_adds_bos(file: GgufFile) -> bool:
    """Returns whether a prompt starts with the beginning-of-text token."""
    default = file.metadata.get("tokenizer.ggml.pre") in ADDS_BOS_BY_DEFAULT
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` and the like, by the names that chat templates use."""
    tokens, fields = _texts(file, "tokens"), ConfigFields(file.metadata, str(file.path))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.count(f"tokenizer.ggml.{key}_token_id", len(tokens), low=0) for name, key in names.items()}
    return {name: tokens[token] for name, token in ids.items() if token < len(tokens)}


def _check_kind(file: GgufFile, pre: str) -> None:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2', or give --tokenizer DIR"
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {known}, or give --tokenizer DIR"
        )


def _texts(file: GgufFile, name: str) -> list[str]:
    texts = _metadata_list(file, name)
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} is not a list of texts")
    return texts


def _metadata_list(file: GgufFile, name: str) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} is missing")
    return value
