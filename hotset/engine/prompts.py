"""Prompts as people give them: text, or token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotset.base.errors import RequestError
from hotset.models.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The prompt's token ids. RequestError if it is neither text nor ids, or text without a tokenizer."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            ids = list(prompt["prompt_token_ids"])
            if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
                raise RequestError("prompt_token_ids must be whole numbers", param="prompt_token_ids")
            return ids
        prompt = prompt.get("prompt", prompt)
    if not isinstance(prompt, str):
        raise RequestError('a prompt is text, {"prompt": ...} or {"prompt_token_ids": [...]}', param="prompt")
    if tokenizer is None:
        raise RequestError('this model came without a tokenizer; give {"prompt_token_ids": [...]}', param="prompt")
    return tokenizer.encode(prompt)
