"""Calls that a model writes as JSON objects: those of Qwen3 and of Llama 3."""

import re
from collections.abc import Callable, Collection
from typing import Any

from hotset.serve.tools.calls import Piece
from hotset.serve.tools.parsing import Malformed, ParsedCall, PieceWriter, Unfinished, overlap, strict_json

PYTHON_TAG = "<|python_tag|>"
STRUCTURAL = re.compile(r'[{}\[\]"\\]')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
# A call without a marker is an object whose first key is one of these.
BARE_BEGINNINGS = ('{"name"', '{"type"', '{"parameters"', '{"arguments"')
LEAD = re.compile(r"[\s;]*(<\|python_tag\|>)?\s*")  # what precedes a call


def read_json_call(body: str) -> list[ParsedCall]:
    """Reads the one call between the markers of Qwen3."""
    try:
        return [call_of(strict_json(body))]
    except (ValueError, RecursionError):
        # A quotation mark that is left over opens a string that the closing marker belongs to.
        raise (Unfinished if '"' in STRING.sub("", body) else Malformed) from None


def call_of(value: Any) -> ParsedCall:
    """Returns the call that a JSON value describes. Raises Malformed if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Malformed
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text, as it is in the API
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError):
            raise Malformed from None
    if not isinstance(arguments, dict):
        raise Malformed
    return ParsedCall(value["name"], arguments)


class ObjectScanner:
    """Finds the end of a JSON object in a text that grows. The text begins with {."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Returns the position after the object, or None if the text ends before it."""
        while (found := STRUCTURAL.search(text, self._position)) is not None:
            self._position = found.end()
            character = found[0]
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._position += character == "\\"  # the next character is escaped
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._position
        self._position = max(self._position, len(text))
        return None


class LlamaParser:
    """Parses answers of Llama 3: calls are JSON objects, separated by semicolons. They follow <|python_tag|>, or the
    answer begins with them. Without the marker, an object is a call only if it names one of the tools."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names = frozenset(names)
        self._pieces = PieceWriter(new_id)
        self._held = ""
        self._in_calls = True  # `_held` may begin with a call, after LEAD
        self._marked = False
        self._scanner = ObjectScanner()

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[Piece]:
        pieces = self._advance(final=True) + self._pieces.text(self._held)
        self._held = ""
        return pieces + self._pieces.finish()

    def _advance(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held and (self._read_call(pieces) if self._in_calls else self._read_text(pieces, final=final)):
            pass
        return pieces

    def _read_text(self, pieces: list[Piece], *, final: bool) -> bool:
        """Returns whether a marker was found, which begins a call."""
        start = self._held.find(PYTHON_TAG)
        certain = start if start >= 0 else len(self._held) - (0 if final else overlap(self._held, PYTHON_TAG))
        self._show(pieces, certain)
        self._in_calls = start >= 0
        return self._in_calls

    def _read_call(self, pieces: list[Piece]) -> bool:
        """Reads one call, or finds that there is none. Returns False if that needs more text."""
        lead = LEAD.match(self._held)
        assert lead is not None, "it matches the empty text"
        rest = self._held[lead.end() :]
        marked = self._marked or lead[1] is not None
        if PYTHON_TAG.startswith(rest):
            return False
        if not rest.startswith("{") or not (marked or _may_be_bare(rest)):
            self._show(pieces, lead.end())
            self._in_calls = self._marked = False
            return True
        end = self._scanner.end(rest)
        if end is None:
            return False
        self._scanner = ObjectScanner()
        try:
            call = call_of(strict_json(rest[:end]))
            if not marked and call.name not in self._names:
                raise Malformed
        except (Malformed, ValueError, RecursionError):
            self._show(pieces, lead.end() + end)
            self._in_calls = self._marked = False
        else:
            pieces += self._pieces.call(call)
            self._held, self._marked = rest[end:], marked
        return True

    def _show(self, pieces: list[Piece], characters: int) -> None:
        pieces += self._pieces.text(self._held[:characters])
        self._held = self._held[characters:]


def _may_be_bare(text: str) -> bool:
    """Returns whether a call without a marker may begin with `text`."""
    begun = "".join(text[:64].split())
    return any(begun.startswith(beginning) or beginning.startswith(begun) for beginning in BARE_BEGINNINGS)
