"""Log-probabilities in the two formats of the OpenAI API, for chat and for completions, and vLLM's for prompts."""

import codecs
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import starmap

from hotset.engine.outputs import Logprob, TokenLogprobs
from hotset.models.tokenizer import Tokenizer
from hotset.serve.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptTokenLogprob, TokenLogprob

CACHED_NAMES = 1 << 10  # names of tokens that are kept, because the same tokens occur at many positions
MIN_LOGPROB = -9999.0  # JSON has no infinity; the OpenAI API writes this number instead


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], alternatives: int
) -> ChatLogprobs:
    """Returns one entry per token, with the `alternatives` most likely tokens at its position."""

    def entry(token: int, ranked: TokenLogprobs) -> ChatTokenLogprob:
        likeliest = [(candidate, logprob) for candidate, logprob in _by_rank(ranked) if logprob.rank <= alternatives]
        top = [_entry(tokenizer, candidate, logprob) for candidate, logprob in likeliest[:alternatives]]
        return ChatTokenLogprob(**_entry(tokenizer, token, ranked[token]), top_logprobs=top)

    return ChatLogprobs(content=starmap(entry, zip(token_ids, logprobs, strict=True)))


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Iterable[TokenLogprobs | None], alternatives: int
) -> Iterator[dict[str, PromptTokenLogprob] | None]:
    """Yields one entry per token of a prompt: the token itself, then the `alternatives` likeliest tokens."""

    @lru_cache(CACHED_NAMES)
    def name_of(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(token): PromptTokenLogprob(logprob=_finite(value), rank=value.rank, decoded_token=name_of(token))
                for number, (token, value) in enumerate(entry.items())
                if number == 0 or value.rank <= alternatives
            }
        )


class CompletionLogprobWriter:
    """Writes the log-probabilities of one choice in the completions format, which includes text offsets."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._name = lru_cache(CACHED_NAMES)(self._name_of)
        # Tokens that are not part of the text do not advance the offset.
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._offset = 0
        self._start_text(0)

    def write_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """Returns the entries of an echoed prompt, whose text comes before the text of the answer."""
        written = self.write(token_ids, logprobs)
        self._start_text(len(text))
        return written

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Returns the entries of the next tokens, which follow the tokens of the previous call."""
        offsets = array("q")
        for token in token_ids:
            offsets.append(self._offset)
            if self._tokenizer is not None and token not in self._hidden:
                self._offset += len(self._visible(token, self._tokenizer))
        return CompletionLogprobs(
            tokens=map(self._name, token_ids),
            token_logprobs=starmap(_own, zip(token_ids, logprobs, strict=True)),
            top_logprobs=starmap(self._top, zip(token_ids, logprobs, strict=True)),
            text_offset=iter(offsets),
        )

    def _top(self, token: int, ranked: TokenLogprobs | None) -> dict[str, float] | None:
        if ranked is None:
            return None
        top: dict[str, float] = {}
        for candidate, logprob in _by_rank(ranked):
            if logprob.rank <= self._alternatives or candidate == token:
                top.setdefault(self._name(candidate), _finite(logprob))
        return top

    def _start_text(self, offset: int) -> None:
        self._offset = offset
        self._at_start = True
        # A character may span several tokens; it advances the offset at the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _visible(self, token: int, tokenizer: Tokenizer) -> str:
        """Returns the characters that the token completes. Some tokenizers drop the space at the start of a text."""
        text = self._decoder.decode(tokenizer.token_bytes(token))
        if self._at_start and text.startswith(" ") and tokenizer.decode([token], skip_special=False)[:1] != " ":
            text = text[1:]
        self._at_start = False
        return text

    def _name_of(self, token: int) -> str:
        """Returns the token's text. A token that is not valid UTF-8 is escaped as a whole, to keep names distinct."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        spelling = self._tokenizer.token_bytes(token)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _by_rank(ranked: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(ranked.items(), key=lambda item: (item[1].rank, item[0]))


def _own(token: int, ranked: TokenLogprobs | None) -> float | None:
    return None if ranked is None else _finite(ranked[token])


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)


def _entry(tokenizer: Tokenizer | None, token: int, logprob: Logprob) -> TokenLogprob:
    if tokenizer is None:
        return TokenLogprob(token=f"token_id:{token}", logprob=_finite(logprob), bytes=None)
    spelling = tokenizer.token_bytes(token)
    return TokenLogprob(token=spelling.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(spelling))
