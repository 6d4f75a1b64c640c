"""Text out of tokens, one at a time. The pieces add up to what decoding all tokens at once gives."""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """Turns the tokens of one answer into text as they come. Any token id is taken; unknown ones give nothing."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: "" while a character is still missing bytes."""
        ...

    def flush(self) -> str:
        """Ends the stream. What was held back, with U+FFFD for bytes that never became a character."""
        ...


class ByteStream:
    """For byte-level vocabularies, where every token is a string of bytes of the UTF-8 text."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For every other vocabulary: decodes a short window of tokens again and gives what is new in it.

    The window opens with a token whose text was given already, so that a decoder's treatment of the first token (such
    as dropping its space) cannot touch new text. A run of byte tokens (`<0xE2>`) is held until it ends: whether its
    bytes are characters is decided over the whole run.
    """

    def __init__(self, piece_of: Callable[[int], str | None], decode: Callable[[Sequence[int]], str]) -> None:
        self._piece_of = piece_of  # None: a token that leaves no trace in the text
        self._decode = decode
        self._window: list[int] = []
        self._given = ""  # the part of the window's text that went out

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(piece):
            return ""
        text = self._give()
        alone = self._decode([token_id])
        if alone:
            self._window, self._given = [token_id], alone
        return text

    def flush(self) -> str:
        return self._give()

    def _give(self) -> str:
        text = self._decode(self._window)
        new, self._given = text[len(self._given) :], text
        return new
