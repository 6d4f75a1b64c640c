"""Log-probabilities in the two formats of the OpenAI API: one for chat and one for completions."""

import codecs
from collections.abc import Sequence

from hotset.engine.outputs import Logprob, TokenLogprobs
from hotset.models.tokenizer import Tokenizer
from hotset.serve.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no infinity; the OpenAI API writes this number instead


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], alternatives: int
) -> ChatLogprobs:
    """Returns one entry per token, with the `alternatives` most likely tokens at its position."""
    content = []
    for token, ranked in zip(token_ids, logprobs, strict=True):
        chosen = _entry(tokenizer, token, ranked[token])
        likeliest = [(candidate, logprob) for candidate, logprob in _by_rank(ranked) if logprob.rank <= alternatives]
        top = [_entry(tokenizer, candidate, logprob) for candidate, logprob in likeliest[:alternatives]]
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


class CompletionLogprobWriter:
    """Writes the log-probabilities of one choice in the completions format, which includes text offsets."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        # Tokens that are not part of the text do not advance the offset.
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._offset = 0
        # A character may span several tokens; it advances the offset at the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the entries of tokens that follow those of the previous call."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, ranked in zip(token_ids, logprobs, strict=True):
            written.tokens.append(self._name(token))
            written.token_logprobs.append(_finite(ranked[token]))
            top: dict[str, float] = {}
            for candidate, logprob in _by_rank(ranked):
                top.setdefault(self._name(candidate), _finite(logprob))
            written.top_logprobs.append(top)
            written.text_offset.append(self._offset)
            if self._tokenizer is not None and token not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return written

    def _name(self, token: int) -> str:
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


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)


def _entry(tokenizer: Tokenizer | None, token: int, logprob: Logprob) -> TokenLogprob:
    if tokenizer is None:
        return TokenLogprob(token=f"token_id:{token}", logprob=_finite(logprob), bytes=None)
    spelling = tokenizer.token_bytes(token)
    return TokenLogprob(token=spelling.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(spelling))
