"""Turns the tokens of one choice into text that can be sent, and detects stop strings."""

from hotset.base.sampling import SamplingParams
from hotset.models.text_stream import TextStream


class _StopString:
    """Matches one stop string against a text, character by character (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # the longest proper prefix text[:matched] that the text so far ends with
        self._fallback = [0] * len(text)  # [i]: length of the longest proper prefix that text[: i + 1] ends with
        for i in range(1, len(text)):
            self._fallback[i] = self._extended(self._fallback[i - 1], text[i])

    def step(self, character: str) -> bool:
        """Takes the next character. Returns True if it completes the stop string, so the text ends here."""
        self.matched = self._extended(self.matched, character)
        return self.matched == len(self.text)

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


class TextAssembler:
    """Assembles the text of one choice, and returns each piece as soon as it is certain.

    The text ends at the first character that completes a stop string; if it completes several, the longest counts.
    So the end depends on the text alone, not on how tokens divide it, and is found without looking ahead. Text that
    may still become part of a stop string is held back. All pieces together are the choice's text.
    """

    def __init__(self, stream: TextStream | None, params: SamplingParams) -> None:
        """Owns `stream` from now on. None means that there is no tokenizer; then the text stays empty."""
        self.stopped_by: str | None = None
        self._stream = stream
        self._include_stop = params.include_stop_str_in_output
        self._stops = [_StopString(text) for text in params.stop]
        self._held = ""  # not returned yet: the longest prefix of a stop string that the text so far ends with
        self._finished = False

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str:
        """Returns the text that this token makes certain, and "" after the text has ended.

        The text of a stop token is dropped, unless the request includes stop strings in the output.
        """
        if self._stream is None or self._ended or (is_stop_token and not self._include_stop):
            return ""
        return self._release(self._stream.push(token_id))

    def finish(self) -> str:
        """Returns the rest of the text when no token follows, which may still complete a stop string. Later calls
        return ""."""
        if self._stream is None or self._ended:
            return ""
        released = self._release(self._stream.flush())
        self._finished = True
        rest, self._held = self._held, ""
        return released + rest

    @property
    def _ended(self) -> bool:
        return self._finished or self.stopped_by is not None

    def _release(self, piece: str) -> str:
        if not self._stops:
            return piece
        text = self._held + piece
        for at in range(len(self._held), len(text)):
            completed = [stop.text for stop in self._stops if stop.step(text[at])]
            if completed:
                self.stopped_by = max(completed, key=len)
                self._held = ""
                end = at + 1
                return text[:end] if self._include_stop else text[: end - len(self.stopped_by)]
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]
