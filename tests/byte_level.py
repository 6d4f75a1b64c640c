"""Byte-level tokenizers for models without files."""

from collections.abc import Sequence

import tokenizers

BYTES = tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))  # the letter that stands for each byte


def byte_level(pieces: Sequence[str] = BYTES) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose tokens are these pieces, without merges. The caller adds special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
