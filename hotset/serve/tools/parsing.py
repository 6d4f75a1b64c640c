"""Finds the calls in the text of an answer while the text arrives.

A parser takes pieces of text. However the text is cut into pieces, the texts and calls that the parser returns add up
to the same answer. A call is returned when it is complete and valid. What looks like a call but is not one is text.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from hotset.serve.tools.calls import TOOL_NAME, CallArguments, CallBegins, Piece, TextPiece

# A value of a call can contain the marker that ends calls. After this many of them, the call counts as malformed.
MAX_QUOTED_CLOSERS = 16


class Malformed(Exception):
    """A text is not a call."""


class Unfinished(Malformed):
    """A text is not a call, but could be the beginning of one."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as a model wrote it."""

    name: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if TOOL_NAME.fullmatch(self.name) is None:
            raise Malformed

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON that UTF-8 can encode: a model can write escapes of lone surrogates."""
        text = json.dumps(self.arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = json.dumps(self.arguments)
        return text


class StreamParser(Protocol):
    """Parses the text of one answer."""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes. Holds back what may be a part of a call."""
        ...

    def finish(self) -> list[Piece]:
        """Ends the text and returns the pieces that were held back."""
        ...


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class PieceWriter:
    """Makes the pieces of one answer: numbers the calls, and drops white space around them, which is part of the
    format and not of the answer."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = 0
        self._spaces = ""  # white space that follows the pieces so far
        self._after_call = False

    def text(self, text: str) -> list[Piece]:
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._after_call = self._after_call and not kept
        return [TextPiece(kept)] if kept else []

    def call(self, call: ParsedCall) -> list[Piece]:
        index, self._calls = self._calls, self._calls + 1
        self._spaces, self._after_call = "", True
        return [CallBegins(index, self._new_id(), call.name), CallArguments(index, call.arguments_text)]

    def finish(self) -> list[Piece]:
        spaces, self._spaces = self._spaces, ""
        return [TextPiece(spaces)] if spaces and not self._after_call else []


class BlockParser:
    """Parses answers in which calls stand between two markers. `read` returns the calls of the text between them, and
    raises Malformed, or Unfinished if the closing marker may belong to a value."""

    def __init__(
        self, opener: str, closer: str, read: Callable[[str], list[ParsedCall]], new_id: Callable[[], str]
    ) -> None:
        self._opener = opener
        self._closer = closer
        self._read = read
        self._pieces = PieceWriter(new_id)
        self._held = ""  # begins with the opening marker if `_in_block`
        self._in_block = False
        self._search_from = 0  # no closing marker begins before this position, except those of `_quoted`
        self._quoted: list[int] = []  # ends of closing markers that may belong to a value

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[Piece]:
        return self._advance(final=True) + self._pieces.finish()

    def _advance(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            if not self._in_block and not self._find_opener(pieces, final=final):
                return pieces
            end = self._held.find(self._closer, self._search_from)
            if end < 0 and not final:
                self._search_from = max(self._search_from, len(self._held) - len(self._closer) + 1)
                return pieces
            if end < 0:
                self._reject(pieces, self._quoted[-1] if self._quoted else len(self._held))
            else:
                self._close(pieces, end)
        return pieces

    def _find_opener(self, pieces: list[Piece], *, final: bool) -> bool:
        start = self._held.find(self._opener)
        certain = start if start >= 0 else len(self._held) - (0 if final else overlap(self._held, self._opener))
        pieces += self._pieces.text(self._held[:certain])
        self._held = self._held[certain:]
        self._begin_block(start >= 0)
        return self._in_block

    def _close(self, pieces: list[Piece], end: int) -> None:
        """Reads the calls before the closing marker at `end`."""
        after = end + len(self._closer)
        try:
            calls = self._read(self._held[len(self._opener) : end])
        except Unfinished:
            if len(self._quoted) == MAX_QUOTED_CLOSERS:
                self._reject(pieces, after)
            else:
                self._quoted.append(after)
                self._search_from = after
        except Malformed:
            self._reject(pieces, after)
        else:
            for call in calls:
                pieces += self._pieces.call(call)
            self._held = self._held[after:]
            self._begin_block(False)

    def _reject(self, pieces: list[Piece], end: int) -> None:
        """Turns a malformed call that ends at `end` into text. A call may begin at an opening marker within it."""
        inner = self._held.rfind(self._opener, 1, end)
        cut = inner if inner > 0 else end
        pieces += self._pieces.text(self._held[:cut])
        self._held = self._held[cut:]
        self._begin_block(inner > 0)

    def _begin_block(self, in_block: bool) -> None:
        self._in_block = in_block
        self._search_from = len(self._opener)
        self._quoted = []


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest proper prefix of `marker` with which `text` ends."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def strict_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError if it is not JSON, also for NaN, which
    `json.loads` accepts."""
    return json.loads(text, parse_constant=_not_json)


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
