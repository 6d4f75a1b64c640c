"""The offline API: `LLM(...).generate(prompts, SamplingParams(...))` runs the engine in this process."""

import itertools
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import fields
from types import TracebackType
from typing import Any

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import ConfigError, EngineStopped, RequestError
from hotset.base.request_options import RequestOptions, TiersChoice
from hotset.base.sampling import SamplingParams
from hotset.base.settings import check_setting_names
from hotset.base.status_line import StatusLine, ignore_progress
from hotset.base.structure import needs_tokenizer
from hotset.engine.build import build_engine
from hotset.engine.frontend import Prompt, cache_salt_of, load_frontend, token_ids_of
from hotset.engine.input_processor import Choice, InputProcessor
from hotset.engine.output_processor import OutputProcessor
from hotset.engine.outputs import CompletionOutput, Delta, EngineStats, RequestOutput
from hotset.models.answer_parser import AnswerParser, ends_in_reasoning
from hotset.models.chat_prompt import ChatOptions, Message
from hotset.models.tokenizer import Tokenizer


class LLM:
    """A model and its engine. `settings` are fields of `EngineConfig`, named like the flags of the command line.

    >>> llm = LLM("embedded")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str = EMBEDDED, *, progress: bool = True, **settings: Any) -> None:
        """Loads the model. Raises `StartupError` with a one-line message if that fails.

        If `progress` is True, shows a bar on a terminal, and logs a line every ten seconds elsewhere.
        """
        known_names = [*(setting.name for setting in fields(EngineConfig)), "progress"]
        check_setting_names("LLM", settings, known_names)
        config = EngineConfig(model=model, **settings)
        if config.role != "both":
            raise ConfigError(f"role {config.role!r} is for servers: hotset serve --role {config.role}")
        front = load_frontend(config)
        with StatusLine("Loading the model") if progress else nullcontext() as status:
            self._engine = build_engine(config, show=status.show if status else ignore_progress)
        self._closed = False
        self.card = front.card(self._engine.card)
        self.tokenizer: Tokenizer | None = front.tokenizer
        self.defaults: dict[str, Any] = front.defaults
        self._input_processor = InputProcessor(self.card, config.seed)
        self._outputs = OutputProcessor(front.tokenizer)
        self._structure_checks = front.structure_checks(self.card.vocab)
        self._inbox: dict[str, list[Delta]] = {}  # choice id -> deltas that were not yielded yet
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tiers: TiersChoice = "auto",
    ) -> list[RequestOutput]:
        """Returns the answers in the order of the prompts. All prompts are checked before the first is computed.

        A prompt is text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`. The last two may have a "cache_salt":
        only prompts with the same salt reuse each other's prefixes.

        `tiers` selects where KV is stored: 'resident' (all of it on the device), 'tiered' (only hot rows and index keys
        on the device) or 'auto' (the engine decides).
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        accepted = [
            self._accept(prompt, its_params, tiers)
            for prompt, its_params in zip(batch, self._params_for(batch, params), strict=True)
        ]
        submitted = [choice for choices in accepted for choice in choices]
        collected = {choice.request_id: CompletionOutput(choice.index) for choice in submitted}
        for request_id, delta in self._deltas(submitted):
            collected[request_id].extend(delta)
        return [self._output(prompt, choices, collected) for prompt, choices in zip(batch, accepted, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        tiers: TiersChoice = "auto",
        options: ChatOptions | None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to one conversation, or to a list of conversations.

        `options` decide how a conversation becomes a prompt, for instance whether the model thinks. The text of an
        answer includes its reasoning; `answer_parser` separates the two.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self._chat_ids(conversation, options)} for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, tiers)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, tiers: TiersChoice = "auto"
    ) -> Generator[Delta, None, None]:
        """Yields the deltas of one prompt's choices as they arrive. The request is checked at once, but submitted only
        when the first delta is requested. Closing the iterator aborts the request."""
        choices = self._accept(prompt, params or SamplingParams(), tiers)

        def deltas() -> Generator[Delta, None, None]:
            with closing(self._deltas(choices)) as numbered:
                for _, delta in numbered:
                    yield delta

        return deltas()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tiers: TiersChoice = "auto",
        options: ChatOptions | None = None,
    ) -> Generator[Delta, None, None]:
        """Yields the deltas of the answer to one conversation."""
        return self.stream({"prompt_token_ids": self._chat_ids(messages, options)}, params, tiers)

    def answer_parser(self, messages: Sequence[Message], options: ChatOptions | None = None) -> AnswerParser:
        """Returns a parser that separates the reasoning in one answer to a conversation from its content."""
        options = options or ChatOptions()
        prompt = self._chat_tokenizer.render_chat(messages, options)
        in_reasoning = ends_in_reasoning(prompt, messages[-1]["content"] if options.continue_final_message else "")
        return self._chat_tokenizer.answer_parser(in_reasoning=in_reasoning)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def audit(self) -> None:
        """Checks that every page and seat is free or has exactly one owner. Raises AssertionError if not."""
        self._engine.audit()

    def close(self) -> None:
        """Aborts every request and releases the memory. Idempotent. Later requests raise `EngineStopped`."""
        if not self._closed:
            self._closed = True
            self._abandon(self._outputs.ids)
            self._engine.close()
            if self.tokenizer is not None:
                self.tokenizer.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params_for(
        self, batch: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise RequestError(
                f"got {len(batch)} prompts but {len(params)} SamplingParams; give one for all prompts, or one for each",
                param="params",
            )
        return params

    @property
    def _chat_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", param="messages")
        return self.tokenizer

    def _chat_ids(self, messages: Sequence[Message], options: ChatOptions | None) -> list[int]:
        text = self._chat_tokenizer.render_chat(messages, options)
        return self._chat_tokenizer.encode(text, add_special=False, max_tokens=self.card.max_model_len)

    def _accept(self, prompt: Prompt, params: SamplingParams, tiers: TiersChoice) -> list[Choice]:
        token_ids = token_ids_of(prompt, self.tokenizer, self.card.max_model_len)
        self._check_open()
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if params.structure is not None:
            if self._structure_checks is None:
                raise needs_tokenizer()
            self._structure_checks.check(params.structure)
        options = RequestOptions(tiers=tiers, cache_salt=cache_salt_of(prompt))
        return self._input_processor.accept(f"llm-{next(self._numbers)}", token_ids, params, options)

    def _step(self) -> None:
        deltas, stopped = self._outputs.process(self._engine.step())
        for request_id in stopped:
            self._engine.abort(request_id, "stop")
        for request_id, delta in deltas:
            self._inbox.setdefault(request_id, []).append(delta)

    def _deltas(self, choices: Sequence[Choice]) -> Generator[tuple[str, Delta], None, None]:
        """Submits choices, and yields their deltas with their request ids. Closing it aborts choices that are open."""
        open_ids = {choice.request_id for choice in choices}
        self._outputs.add(choices)
        for choice in choices:
            self._engine.add(choice)
        try:
            while open_ids:
                for request_id in [*filter(open_ids.__contains__, self._inbox)]:
                    for delta in self._inbox.pop(request_id, ()):
                        if delta.finish_reason is not None:
                            open_ids.remove(request_id)
                        yield request_id, delta
                if open_ids:
                    self._check_open()
                    self._step()
        finally:
            self._abandon(open_ids)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM was closed")

    def _abandon(self, request_ids: Collection[str]) -> None:
        """Aborts choices. If no other choice is open, also commits the plans in flight, which frees all pages."""
        for request_id in self._outputs.forget(request_ids):
            self._engine.abort(request_id)
        for request_id in request_ids:
            self._inbox.pop(request_id, None)
        while not len(self._outputs) and not self._engine.idle:
            self._engine.step()

    def _output(
        self, prompt: Prompt, choices: Sequence[Choice], collected: Mapping[str, CompletionOutput]
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        outputs = [collected[choice.request_id] for choice in choices]
        return RequestOutput(
            request_id=choices[0].request_id.rpartition("/")[0],
            prompt=text,
            prompt_token_ids=list(choices[0].prompt.token_ids),
            outputs=outputs,
            prompt_logprobs=outputs[0].prompt_logprobs,
            num_cached_tokens=outputs[0].cached_tokens,
        )
