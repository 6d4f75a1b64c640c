"""Turns the tokens of one choice into text, and detects stop strings."""

from hotset.base.sampling import SamplingParams
from hotset.models.text_stream import TextStream


class _StopString:
    """Searches for one stop string in the output, character by character (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest prefix of `text` with which the output ends so far
        # _fallback[i]: length of the longest proper prefix of text[: i + 1] that is also a suffix of text[: i + 1]
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            self._fallback[i] = self._extended(self._fallback[i - 1], text[i])

    def step(self, character: str) -> bool:
        """Adds the next character of the output. Returns True if it completes the stop string."""
        self.matched = self._extended(self.matched, character)
        return self.matched == len(self.text)

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


class TextAssembler:
    """Assembles the text of one choice, and returns each piece as soon as later tokens cannot change it.

    The first character that completes a stop string ends the text. If it completes several, the longest counts. The
    text ends before the stop string, or after it with `include_stop_str_in_output`. The end therefore depends only on
    the text, not on how tokens divide it, and it is found without looking ahead. Text that may be the beginning of a
    stop string is held back. The pieces, concatenated, are the choice's text.
    """

    def __init__(self, stream: TextStream | None, params: SamplingParams) -> None:
        """Takes ownership of `stream`. If it is None, because the model has no tokenizer, the text stays empty."""
        self.stopped_by: str | None = None
        self._stream = stream
        self._include_stop = params.include_stop_str_in_output
        self._stops = [_StopString(text) for text in params.stop]
        self._held = ""  # the end of the text that is not returned yet, because it is a prefix of a stop string
        self._finished = False

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str:
        """Adds a token. Returns the text that later tokens cannot change any more, or "" if the text has already ended.

        The text of a stop token is dropped, unless the request sets `include_stop_str_in_output`.
        """
        if self._stream is None or self._ended or (is_stop_token and not self._include_stop):
            return ""
        return self._release(self._stream.push(token_id))

    def finish(self) -> str:
        """Ends the text after the last token, and returns the text that was held back. The last characters of the
        stream can still complete a stop string. Later calls return ""."""
        if self._stream is None or self._ended:
            return ""
        released = self._release(self._stream.flush())
        self._finished = True
        held, self._held = self._held, ""
        return released + held

    @property
    def _ended(self) -> bool:
        return self._finished or self.stopped_by is not None

    def _release(self, piece: str) -> str:
        if not self._stops:
            return piece
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            completed = [stop.text for stop in self._stops if stop.step(text[index])]
            if completed:
                self.stopped_by = max(completed, key=len)
                self._held = ""
                end = index + 1
                return text[:end] if self._include_stop else text[: end - len(self.stopped_by)]
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]
