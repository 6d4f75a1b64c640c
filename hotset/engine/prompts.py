"""Prompts as people give them: text, or token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotset.base.errors import RequestError
from hotset.models.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The prompt's token ids. RequestError if it is neither text nor ids, or text without a tokenizer."""
    if isinstance(prompt, Mapping):
        if list(prompt) == ["prompt_token_ids"]:
            return _checked_ids(prompt["prompt_token_ids"])
        prompt = prompt["prompt"] if list(prompt) == ["prompt"] else prompt
    if not isinstance(prompt, str):
        raise RequestError('a prompt is text, {"prompt": ...} or {"prompt_token_ids": [...]}', param="prompt")
    if tokenizer is None:
        raise RequestError('this model came without a tokenizer; give {"prompt_token_ids": [...]}', param="prompt")
    return tokenizer.encode(prompt)


def _checked_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise RequestError("prompt_token_ids must be a list of whole numbers", param="prompt_token_ids")
    return list(ids)
