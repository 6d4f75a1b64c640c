"""Turns the tokens that the engine outputs into deltas of choices: text, log-probabilities, finish reasons."""

from collections.abc import Iterable, Sequence

from hotset.base.sampling import Alternatives
from hotset.engine.input_processor import Choice
from hotset.engine.outputs import AnswerLogprobs, Delta, PromptLogprobs
from hotset.engine.text import TextAssembler
from hotset.models.tokenizer import Tokenizer
from hotset.schedule.plan import LogprobColumns, TokenOutputs
from hotset.schedule.request import FinishReason


class ChoiceState:
    """Turns the tokens of one open choice into deltas."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer | None) -> None:
        self.index = choice.index
        self.ended = False
        params = choice.prompt.params
        self.cached_tokens = 0
        self._stop_token_ids = params.stop_token_ids
        stream = None if tokenizer is None else tokenizer.stream(skip_special=params.skip_special_tokens)
        self._text = TextAssembler(stream, params)
        self._prompt_ids = choice.prompt.token_ids
        # The log-probabilities of the prompt so far; None if they were not requested, or were returned already
        self._prompt_parts: list[LogprobColumns] | None = None if params.prompt_logprobs is None else []

    def add_prompt_logprobs(self, part: LogprobColumns) -> None:
        assert self._prompt_parts is not None, "log-probabilities of a prompt that were not requested, or come twice"
        self._prompt_parts.append(part)

    def push(self, token: int, alternatives: Alternatives | None, finish_reason: FinishReason | None) -> Delta:
        """Returns the delta of one token. A stop string in the text ends the choice, even if the scheduler has not
        ended the request."""
        is_stop = finish_reason == "stop"
        text = self._text.push(token, is_stop_token=is_stop)
        stop_reason: str | int | None = token if is_stop and token in self._stop_token_ids else None
        if finish_reason is not None:
            text += self._text.finish()
        if self._text.stopped_by is not None:
            finish_reason, stop_reason = "stop", self._text.stopped_by
        self.ended = finish_reason is not None
        logprobs = None if alternatives is None else AnswerLogprobs([alternatives])
        prompt_logprobs = self._take_prompt_logprobs()
        return Delta(
            index=self.index,
            text=text,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )

    def end(self, reason: FinishReason, error: str) -> Delta:
        """Returns the last delta of a choice that ended without a further token."""
        self.ended = True
        # A request that ends before its prompt is computed has only some of the log-probabilities, and reports none.
        prompt_logprobs = self._take_prompt_logprobs() if reason in ("length", "stop") else None
        return Delta(
            index=self.index,
            text=self._text.finish(),
            token_ids=(),
            finish_reason=reason,
            error=error,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the log-probabilities of the prompt, once, when they are complete."""
        parts, self._prompt_parts = self._prompt_parts, None
        return None if parts is None else PromptLogprobs(self._prompt_ids, parts)


class OutputProcessor:
    """Keeps the state of all open choices, by request id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, ChoiceState] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> list[str]:
        return list(self._open)

    def add(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._open[choice.request_id] = ChoiceState(choice, self._tokenizer)

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Removes choices. Returns the ids of those that were still open; the caller must abort them in the engine."""
        return [request_id for request_id in request_ids if self._open.pop(request_id, None) is not None]

    def process(self, outputs: TokenOutputs) -> tuple[list[tuple[str, Delta]], list[str]]:
        """Returns the deltas in order, each with its request id, and the ids of choices to abort.

        These are the choices that a stop string ended while the engine still runs them. The caller must abort them.
        """
        deltas: list[tuple[str, Delta]] = []
        stopped: list[str] = []
        # A finish reason belongs to the last token of its request. A request can have two tokens in one output: the
        # first token, which a prefill worker sends with the KV, and the token of the first decode step.
        last_token: dict[str, int] = {}
        if outputs.finished:
            last_token = {name: index for index, name in enumerate(outputs.request_ids) if name in outputs.finished}
        for request_id, cached_tokens in outputs.cached_tokens.items():
            if (choice := self._open.get(request_id)) is not None:
                choice.cached_tokens = cached_tokens
        for request_id, part in outputs.prompt_logprobs:
            if (choice := self._open.get(request_id)) is not None:
                choice.add_prompt_logprobs(part)
        for index, (request_id, token) in enumerate(zip(outputs.request_ids, outputs.token_ids, strict=True)):
            choice = self._open.get(request_id)
            if choice is None:
                continue
            reason = outputs.finished[request_id] if last_token.get(request_id) == index else None
            deltas.append((request_id, choice.push(token, outputs.alternatives.get(index), reason)))
            if choice.ended:
                del self._open[request_id]
                if reason is None:
                    stopped.append(request_id)
        for request_id, reason in outputs.finished.items():
            choice = self._open.pop(request_id, None)
            if choice is not None:
                deltas.append((request_id, choice.end(reason, outputs.errors.get(request_id, ""))))
        return deltas, stopped
