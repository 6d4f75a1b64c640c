"""What every endpoint needs: the engine, the settings, the metrics, and the checks that come before generating."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hotset.base.config import ServeConfig
from hotset.base.errors import EngineStopped, QueueFull, RequestError, UnknownModel
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.models.tokenizer import Tokenizer
from hotset.serve.metrics import Metrics
from hotset.serve.protocol import ChatMessage, SamplingFields

# Fields that mean the same, under the same name, in a request's body and in SamplingParams.
SHARED_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(frozen=True)
class Service:
    """One served model. Borrows the engine's client; whoever started that closes it."""

    client: EngineClient
    config: ServeConfig
    aliases: frozenset[str] = frozenset()
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.client.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; RequestError where it has none."""
        if self.client.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", code="no_tokenizer")
        return self.client.tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name and name not in self.aliases:
            raise UnknownModel(f"there is no model {name!r} here; this server has {self.model_name!r}", param="model")

    def check_open(self, choices: int = 1) -> None:
        """Refuses a request for `choices` choices that the engine cannot take on now.

        Where nothing waits, a request is let in however many choices it has: it would be no more welcome later.
        """
        if not self.client.alive:
            raise EngineStopped("the engine has stopped")
        waiting = self.client.waiting
        limit = self.config.max_queue
        if waiting and waiting + choices > limit:
            raise QueueFull(f"{waiting} choices wait already, and the queue of {limit} lacks room; come back later")

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. In a thread, without the GIL: megabytes of text must not stall the other requests."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation up to the point where the model is to speak."""
        turns = [{"role": message.role, "content": message.text} for message in messages]
        text = await asyncio.to_thread(self.tokenizer.render_chat, turns)
        return await asyncio.to_thread(lambda: self.tokenizer.encode(text, add_special=False))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await asyncio.to_thread(lambda: self.tokenizer.decode(token_ids, skip_special=False))

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Refuses ids outside the vocabulary. Prompts need no such check here: the engine's intake makes it."""
        vocab = self.client.model.vocab
        wrong = next((token for token in token_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            message = f"{param} holds token id {wrong}, but the vocabulary ends at {vocab - 1}"
            raise RequestError(message, param=param, code="invalid_token_id")

    def sampling_params(self, body: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """`body` as the engine wants it: the client's values, else the model's own defaults, else OpenAI's."""
        values: dict[str, Any] = dict(self.client.defaults)
        values.update({name: getattr(body, name) for name in SHARED_FIELDS if getattr(body, name) is not None})
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias or None)
