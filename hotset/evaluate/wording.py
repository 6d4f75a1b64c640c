"""The words of records and questions: those that the demo model learned, whose every word is one of its tokens."""

import gzip
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

HELD_OUT_IN = 13  # one key in so many is never shown in training; evaluation uses no others
STRIDE = 7919
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LARGEST_COUNT = 5  # of a record: up to here each number is one token, as words are, so it is looked up as they are

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """A sentence that answers a question, and the share of the filler that stands before it."""

    text: str
    depth: float


@cache
def words() -> tuple[str, ...]:
    return tuple(_resource("words.txt").read_text(encoding="ascii").split())


@cache
def filler() -> tuple[str, ...]:
    """Running text, word by word, each with the space or line end before it; the first line is the licence notice."""
    text = gzip.decompress(_resource("filler.txt.gz").read_bytes()).decode("ascii")
    return tuple(re.findall(r"\s\S+", text[text.index("\n") :]))


def held_out(key: Key) -> bool:
    """Evaluation alone uses this key."""
    numbers = _numbers()
    return (numbers[key[0]] * STRIDE + numbers[key[1]]) % HELD_OUT_IN == 0


@cache
def _numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(words())}


def _resource(name: str) -> Traversable:
    return resources.files("hotset.evaluate") / name


class Keys:
    """Draws held-out keys, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[Key] = set()

    def draw(self) -> Key:
        return self._first_free(lambda: (self._word(), self._word()))

    def near(self, key: Key) -> Key:
        """A key that shares one word, in its place, with `key`."""
        if self._rng.random() < 0.5:
            return self._first_free(lambda: (key[0], self._word()))
        return self._first_free(lambda: (self._word(), key[1]))

    def _first_free(self, propose: Callable[[], Key]) -> Key:
        while True:
            key = propose()
            if held_out(key) and key not in self._taken:
                self._taken.add(key)
                return key

    def _word(self) -> str:
        return self._rng.choice(words())


def spoken(parts: Sequence[str]) -> str:
    return "".join(f" {part}" for part in parts)


def note(key: Key, value: Sequence[str]) -> str:
    return spoken(["note", *key, *value]) + "."


def passage(key: Key, text: Sequence[str]) -> str:
    return spoken(["text", *key, *text]) + "."


def number(key: Key, value: int) -> str:
    return spoken(["count", *key, NUMBERS[value]]) + "."
