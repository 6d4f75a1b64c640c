"""Log-probabilities in the two shapes that the OpenAI API knows."""

import codecs
from collections.abc import Sequence

from hotset.engine.outputs import Logprob, TokenLogprobs
from hotset.models.tokenizer import Tokenizer
from hotset.serve.protocol import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no infinity; the OpenAI API writes this number instead


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], alternatives: int
) -> ChatLogprobs:
    """One entry per token, each with its `alternatives` likeliest rivals (itself included where it is one of them)."""
    content = []
    for token, ranked in zip(token_ids, logprobs, strict=True):
        chosen = _entry(tokenizer, token, ranked[token])
        likeliest = [(other, found) for other, found in _by_rank(ranked) if found.rank <= alternatives][:alternatives]
        top = [_entry(tokenizer, other, found) for other, found in likeliest]
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


class CompletionLogprobWriter:
    """Log-probabilities of one choice in the older shape, which also wants each token's offset in the text."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        # Tokens that the text does not show take up no room in it.
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._offset = 0
        # A character may be spread over tokens: it counts for the token that completes it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The entries of tokens that follow those of the last call."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, ranked in zip(token_ids, logprobs, strict=True):
            written.tokens.append(self._name(token))
            written.token_logprobs.append(_finite(ranked[token]))
            top: dict[str, float] = {}
            for other, found in _by_rank(ranked):
                top.setdefault(self._name(other), _finite(found))
            written.top_logprobs.append(top)
            written.text_offset.append(self._offset)
            if self._tokenizer is not None and token not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return written

    def _name(self, token: int) -> str:
        """The token's text; bytes that are no text by themselves are spelt out, so that names stay distinct."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        spelling = self._tokenizer.token_bytes(token)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _by_rank(ranked: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(ranked.items(), key=lambda item: (item[1].rank, item[0]))


def _finite(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)


def _entry(tokenizer: Tokenizer | None, token: int, found: Logprob) -> TokenLogprob:
    if tokenizer is None:
        return TokenLogprob(token=f"token_id:{token}", logprob=_finite(found), bytes=None)
    spelling = tokenizer.token_bytes(token)
    return TokenLogprob(token=spelling.decode("utf-8", "replace"), logprob=_finite(found), bytes=list(spelling))
