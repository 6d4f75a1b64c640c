"""Reads JSON that is still being written, as strictly as RFC 8259.

After each wait for more text, the position of the source is after the last character that was read. All characters
before it can be the beginning of a JSON value. Malformed is raised at the first one that cannot.
"""

import re

from hotset.serve.tools.parsing import Malformed, Reading, Source

MAX_DEPTH = 100
MAX_DIGITS = 400  # of each part of a number: Python reads integers of at most 4,300 digits, clients fewer
WHITE_SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters that a string may contain unescaped
HEX = re.compile(r"[0-9a-fA-F]")
LITERALS = {"t": "true", "f": "false", "n": "null"}


def read_value(source: Source, depth: int = 0) -> Reading[None]:
    """Reads one value."""
    first = yield from source.peek()
    if first == '"':
        yield from read_string(source)
    elif first in "{[":
        yield from _read_members(source, "}" if first == "{" else "]", depth + 1)
    elif first in LITERALS:
        for letter in LITERALS[first]:
            yield from source.expect(letter)
    else:
        yield from _read_number(source)


def read_string(source: Source) -> Reading[None]:
    yield from source.expect('"')
    while True:
        yield from source.skip(PLAIN)
        if (yield from source.expect('"', "\\")) == '"':
            return
        if (yield from source.expect(*'"\\/bfnrtu')) == "u":
            for _ in range(4):
                if HEX.match((yield from source.peek())) is None:
                    raise Malformed
                source.at += 1


def skip_space(source: Source) -> Reading[None]:
    yield from source.skip(WHITE_SPACE)


def read_key(source: Source) -> Reading[None]:
    """Reads the key of a member, up to its value."""
    yield from read_string(source)
    yield from skip_space(source)
    yield from source.expect(":")
    yield from skip_space(source)


def _read_members(source: Source, closer: str, depth: int) -> Reading[None]:
    """Reads an object or a list, with the bracket at its position."""
    if depth > MAX_DEPTH:
        raise Malformed
    source.at += 1
    yield from skip_space(source)
    if (yield from source.peek()) == closer:
        source.at += 1
        return
    while True:
        if closer == "}":
            yield from read_key(source)
        yield from read_value(source, depth)
        yield from skip_space(source)
        if (yield from source.expect(",", closer)) == closer:
            return
        yield from skip_space(source)


def _read_number(source: Source) -> Reading[None]:
    if (yield from source.peek()) == "-":
        source.at += 1
    if (yield from source.peek()) == "0":
        source.at += 1
    else:
        yield from _read_digits(source)
    if (yield from source.peek()) == ".":
        source.at += 1
        yield from _read_digits(source)
    if (yield from source.peek()) in "eE":
        source.at += 1
        if (yield from source.peek()) in "+-":
            source.at += 1
        yield from _read_digits(source)


def _read_digits(source: Source) -> Reading[None]:
    for count in range(MAX_DIGITS):
        if not "0" <= (yield from source.peek()) <= "9":
            if count == 0:
                raise Malformed
            return
        source.at += 1
    raise Malformed
