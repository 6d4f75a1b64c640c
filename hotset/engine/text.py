"""From the tokens of one choice to the text that may be shown, with stop strings."""

from hotset.base.sampling import SamplingParams
from hotset.models.text_stream import TextStream


class _StopString:
    """Follows one stop string through a text, character by character (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # the text so far ends with text[:matched], and with no longer proper prefix
        self._fallback = [0] * len(text)  # [i]: length of the longest prefix that also ends text[: i + 1], itself aside
        for i in range(1, len(text)):
            self._fallback[i] = self._extended(self._fallback[i - 1], text[i])

    def step(self, character: str) -> bool:
        """Takes the next character; True: it completes the stop string, and the text ends here."""
        self.matched = self._extended(self.matched, character)
        return self.matched == len(self.text)

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


class TextAssembler:
    """The text of one choice, handed out in pieces as soon as each is certain.

    The text ends at the first character that completes a stop string; if it completes several, the longest of them
    counts. So the cut depends on the text alone, not on how tokens divide it, and is known without looking ahead.
    Text that may yet become part of a stop string is held back. All pieces together are the choice's text.
    """

    def __init__(self, stream: TextStream | None, params: SamplingParams) -> None:
        """`stream` belongs to this assembler from now on; None: there is no tokenizer, and the text stays empty."""
        self.stopped_by: str | None = None
        self._stream = stream
        self._include_stop = params.include_stop_str_in_output
        self._stops = [_StopString(text) for text in params.stop]
        self._held = ""  # not shown yet: the longest prefix of a stop string that ends the text so far
        self._finished = False

    def push(self, token_id: int, *, is_stop_token: bool = False) -> str:
        """The text that this token makes certain. A stop token's own text is dropped, unless the request asked to
        include it. After the text has ended, always ""."""
        if self._stream is None or self._ended or (is_stop_token and not self._include_stop):
            return ""
        return self._shown(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest, when no token follows; this may still complete a stop string. Later calls give ""."""
        if self._stream is None or self._ended:
            return ""
        shown = self._shown(self._stream.flush())
        self._finished = True
        rest, self._held = self._held, ""
        return shown + rest

    @property
    def _ended(self) -> bool:
        return self._finished or self.stopped_by is not None

    def _shown(self, piece: str) -> str:
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
