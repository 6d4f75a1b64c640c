"""Finds the calls in the text of an answer while the text arrives.

A parser reads the text character by character, and every decision depends only on the characters before. The texts and
calls that the parser returns therefore add up to the same answer, however the text is cut into pieces.

A call of one of the tools is returned while it grows, from the moment at which its name is known and its arguments
begin. The last brace of the arguments is returned when the call is complete: arguments are JSON if and only if their
call is complete. What looks like a call but is not one is text. If a part of it was already returned as a call,
`CallBreaks` says so.
"""

import json
import re
import uuid
from collections.abc import Callable, Collection, Generator
from math import isinf
from typing import Any, NoReturn, TypeVar

from hotset.serve.tools.calls import TOOL_NAME, CallArguments, CallBegins, CallBreaks, CallEnds, Piece, TextPiece

SPACE = re.compile(r"\s*")
T = TypeVar("T")
Reading = Generator[None, None, T]  # reads text, yields when it needs more, and returns what it has read


class Malformed(Exception):
    """The text is not a call. The character at the position of the source does not fit, or the answer has ended."""


class Source:
    """The text of an answer, which grows, and the position up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False

    def more(self) -> Reading[None]:
        """Waits for more text. Raises Malformed if the answer has ended."""
        if self.has_ended:
            raise Malformed
        yield

    def peek(self) -> Reading[str]:
        """Returns the next character, and does not read it."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def skip(self, pattern: re.Pattern[str] = SPACE) -> Reading[None]:
        """Reads all characters that match. `pattern` must match the empty text, and every beginning of a text that it
        matches."""
        while True:
            matched = pattern.match(self.text, self.at)
            assert matched is not None, "the pattern matches the empty text"
            self.at = matched.end()
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def expect(self, *literals: str) -> Reading[str]:
        """Reads one of several texts, none of which begins with another one, and returns it."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.at += len(literal)
                    return literal
            begun = self.text[self.at : self.at + max(map(len, literals))]
            if not any(literal.startswith(begun) for literal in literals):
                raise Malformed
            yield from self.more()

    def until(self, end: str, limit: int | None = None) -> Reading[str]:
        """Reads a text of at most `limit` characters and the `end` after it. Returns the text."""
        start, search_from = self.at, self.at
        last = None if limit is None else start + limit + len(end)
        while (found := self.text.find(end, search_from, last)) < 0:
            if last is not None and len(self.text) >= last:
                raise Malformed
            search_from = max(start, len(self.text) - len(end) + 1)
            yield from self.more()
        self.at = found + len(end)
        return self.text[start:found]


class CallWriter:
    """Makes the pieces of one answer. It numbers the calls, and drops white space around them, which is part of the
    format and not of the answer."""

    def __init__(self, source: Source, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._source = source
        self._pieces: list[Piece] = []
        self._calls = 0  # the number of calls that have ended or were broken off
        self._spaces = ""  # white space after the pieces so far
        self._after_call = False
        self._name: str | None = None  # of the call that is being written
        self._arguments = ""  # of this call, not yet in pieces
        self._is_shown = False  # whether a part of this call is in pieces
        self.start = 0  # the text before this position has become pieces
        self._shown_to = 0  # the text before this position is in pieces, as arguments of this call

    def take(self) -> list[Piece]:
        """Returns the pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def text(self, end: int) -> None:
        """Makes the text up to `end` a part of the answer, and forgets it."""
        source = self._source
        text = self._spaces + source.text[self.start : end]
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._after_call = self._after_call and not kept
        if kept:
            self._pieces.append(TextPiece(kept))
        source.text, source.at = source.text[end:], max(0, source.at - end)
        self.start = self._shown_to = 0

    def drop(self) -> None:
        """Forgets the text that was read: it belongs to calls that have ended."""
        self._source.text, self._source.at = self._source.text[self._source.at :], 0
        self.start = 0

    def begin(self, name: str) -> None:
        """Begins a call. Raises Malformed if no tool can have this name."""
        if TOOL_NAME.fullmatch(name) is None:
            raise Malformed
        self._name, self._arguments, self._is_shown = name, "", False

    @property
    def has_begun(self) -> bool:
        return self._name is not None

    def arguments(self, text: str, shown_to: int) -> None:
        """Adds `text`, which was read from the source before `shown_to`, to the arguments. Arguments of a call that
        names none of the tools are kept until the call is complete."""
        self._arguments += text
        if self._name in self.names:
            self._shown_to = shown_to
            self._show()

    def end(self, arguments: str) -> None:
        """Ends a call with the last part of its arguments."""
        self._arguments += arguments
        self._show()
        self._pieces.append(CallEnds(self._calls))
        self._calls += 1
        self._name, self._spaces, self._after_call = None, "", True
        self.start = self._source.at

    def break_off(self, end: int) -> None:
        """Makes the text up to `end` a part of the answer although it looks like a call."""
        is_shown = self._name is not None and self._is_shown
        self._name = None
        if not is_shown:
            self.text(end)
            return
        text = self._source.text
        source, unsent = self._spaces + text[self.start : end], text[min(self._shown_to, end) : end]
        self._pieces.append(CallBreaks(self._calls, source, unsent))
        self._calls += 1
        self._spaces, self._after_call = "", False
        self.start = end
        self.text(end)

    def finish(self) -> None:
        """Adds the white space at the end of an answer, unless a call precedes it."""
        if self._spaces and not self._after_call:
            self._pieces.append(TextPiece(self._spaces))
        self._spaces = ""

    def _show(self) -> None:
        if not self._is_shown:
            assert self._name is not None, "a call has begun"
            self._is_shown = True
            self._pieces.append(CallBegins(self._calls, f"call_{uuid.uuid4().hex[:24]}", self._name))
        if self._pieces and isinstance(last := self._pieces[-1], CallArguments):
            self._pieces[-1] = CallArguments(self._calls, last.text + self._arguments)
        elif self._arguments:
            self._pieces.append(CallArguments(self._calls, self._arguments))
        self._arguments = ""


CallReader = Callable[[Source, CallWriter], Reading[None]]


class CallParser:
    """Parses the text of one answer. Calls begin with the marker `opener`. If `at_start`, they may also begin the
    answer without it. `read_calls` reads the calls from there on, and raises Malformed where the text is not a call."""

    def __init__(self, opener: str, read_calls: CallReader, names: Collection[str], *, at_start: bool) -> None:
        self._opener = opener
        self._read_calls = read_calls
        self._source = Source()
        self._writer = CallWriter(self._source, names)
        self._reading = self._read_answer(at_start)

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes. Holds back what may be a part of a marker."""
        self._source.text += text
        next(self._reading)
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Ends the text and returns the pieces that were held back."""
        self._source.has_ended = True
        for _ in self._reading:
            raise AssertionError("nothing waits for more text after the end")
        self._writer.finish()
        return self._writer.take()

    def _read_answer(self, in_calls: bool) -> Reading[None]:
        while in_calls or (yield from self._read_text()):
            in_calls = False
            try:
                yield from self._read_calls(self._source, self._writer)
            except Malformed:
                # A call may begin at an opening marker within the malformed one.
                inner = self._source.text.rfind(self._opener, self._writer.start + 1, self._source.at)
                self._writer.break_off(inner if inner > 0 else self._source.at)
                self._source.at = 0
            else:
                self._writer.drop()

    def _read_text(self) -> Reading[bool]:
        """Reads text up to a marker. Returns whether there is one."""
        source, opener = self._source, self._opener
        while True:
            found = source.text.find(opener)
            held = 0 if source.has_ended else overlap(source.text, opener)
            self._writer.text(found if found >= 0 else len(source.text) - held)
            if found >= 0 or source.has_ended:
                return found >= 0
            yield


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest proper prefix of `marker` with which `text` ends."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def strict_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError if it is not JSON, also for NaN and for
    numbers that no float can hold, which `json.loads` accepts."""
    return json.loads(text, parse_constant=_not_json, parse_float=_finite)


def json_text(value: Any) -> str:
    """Returns JSON that UTF-8 can encode: a model can write escapes of lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text


def _finite(number: str) -> float:
    value = float(number)
    return _not_json(number) if isinf(value) else value


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
