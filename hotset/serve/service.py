"""What every endpoint needs: the engine, the settings, the metrics, and the checks that come before generating."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hotset.base.config import ServeConfig
from hotset.base.errors import EngineStopped, QueueFull, RequestError, UnknownModel, WrongRole
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.outputs import EngineStats
from hotset.models.tokenizer import Tokenizer
from hotset.serve.metrics import Metrics
from hotset.serve.protocol import PREFILL_HEADER, ChatMessage, SamplingFields, WorkerState

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


class Load:
    """How much work is here, for routers to compare. Never waits for the engine, which may be in a long step."""

    def __init__(self) -> None:
        self.waiting_tokens = 0
        self._stats = EngineStats()
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Counts so many prompt tokens as waiting until the yielded function is called, or the block is left."""
        left = tokens
        self.waiting_tokens += tokens

        def started() -> None:
            nonlocal left
            self.waiting_tokens -= left
            left = 0

        try:
            yield started
        finally:
            started()

    def stats(self, client: EngineClient) -> EngineStats:
        """What the engine last said of itself, and asks it again."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(client))
        return self._stats

    async def _ask(self, client: EngineClient) -> None:
        try:
            self._stats = await client.stats()
        except EngineStopped:
            self._stats = EngineStats()


@dataclass(frozen=True)
class Service:
    """One served model. Borrows the engine's client; whoever started that closes it."""

    client: EngineClient
    config: ServeConfig
    aliases: frozenset[str] = frozenset()
    metrics: Metrics = field(default_factory=Metrics)
    load: Load = field(default_factory=Load)
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

    def check_role(self) -> None:
        """Refuses completions at a prefill worker: its answers go to decode workers."""
        if self.client.role == "prefill":
            raise WrongRole(
                "this is a prefill worker, which answers no completions; send them to a router (hotset router) or to a "
                "decode worker"
            )

    def prefill_at(self, headers: Mapping[str, str]) -> str | None:
        """The worker that is to compute a request's prompt, where a router has named one. The engine's intake checks
        the address."""
        named = headers.get(PREFILL_HEADER)
        if named is None:
            return None
        if self.client.role != "decode":
            raise WrongRole(f"{PREFILL_HEADER} is for decode workers, and this server is none; leave it out")
        return named

    def state(self) -> WorkerState:
        """What a router is told. EngineStopped where no request would be answered."""
        if not self.client.alive:
            raise EngineStopped("the engine has stopped")
        stats = self.load.stats(self.client)
        return WorkerState(
            role=self.client.role,
            control=self.client.control,
            model=self.model_name,
            waiting_tokens=max(self.load.waiting_tokens, stats.tokens_to_prefill),
            waiting=max(stats.waiting, self.client.waiting),
            running=stats.running,
        )

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
