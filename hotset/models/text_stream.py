"""Incremental detokenisation: the pieces of text add up to the text of all tokens decoded at once."""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """Turns the tokens of one answer into text, one at a time. Unknown token ids produce no text."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes: "" while bytes are held back."""
        ...

    def flush(self) -> str:
        """Ends the stream and returns the text held back, with U+FFFD for bytes that do not form a character."""
        ...


class ByteStream:
    """A stream for byte-level vocabularies, where every token is a string of bytes of the UTF-8 text."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """A stream for all other vocabularies. It decodes a short window of tokens again and returns the new text.

    The window starts with a token whose text was already returned, so that a decoder's treatment of the first token
    (such as dropping its space) cannot change new text. A run of byte tokens (`<0xE2>`) is held back until it ends,
    because only the whole run determines whether its bytes are characters.
    """

    def __init__(self, piece_of: Callable[[int], str | None], decode: Callable[[Sequence[int]], str]) -> None:
        self._piece_of = piece_of  # returns None for a token without text
        self._decode = decode
        self._window: list[int] = []
        self._emitted = ""  # the part of the window's text that was returned

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(piece):
            return ""
        text = self._emit()
        single = self._decode([token_id])
        if single:
            self._window, self._emitted = [token_id], single
        return text

    def flush(self) -> str:
        return self._emit()

    def _emit(self) -> str:
        text = self._decode(self._window)
        new, self._emitted = text[len(self._emitted) :], text
        return new
