"""Retrieval questions: records hidden in running text among many similar records, and one question at the end.

    lookup   ` recall k k` -> ` v v`: the value of the note on a key
    several  ` list k k and k k;` -> ` k k v v and k k v v`
    last     ` recall k k` after several notes on the same key -> the value of the last one
    chain    ` chain k k` -> ` m m v v`: the value is itself a key, whose value follows
    copy     ` copy k k` -> the passage under that key
    sum      ` sum k k and k k;` -> ` k k three + k k five = eight`: arithmetic over two numbers

This module does not depend on a model: it needs only a function that counts the tokens of a text. Every word of a
record or a question is one token of the demo model, which was trained with these words.
"""

import gzip
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from hotset.base.errors import ConfigError

HELD_OUT_EVERY = 13  # one key in 13 is never shown in training; evaluation uses only these
STRIDE = 7919  # a prime, so that held-out keys are spread over all pairs of words
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
MAX_COUNT = 5  # the largest number in a record; like other words, the words for 0 to 5 are one token each
TOKENS_PER_RECORD = 40  # a prompt has one record for every 40 tokens of its length
MIN_LENGTH = 256  # records without filler would fill a shorter prompt
NEAR_MISSES = 0.3  # the share of distractors whose key has a word in common with another key
NEAR_QUESTION_KEYS = 24  # near misses among the first 24 distractors resemble a key of the question
VALUES_THAT_ARE_KEYS = 0.2  # the share of the distractors' notes whose value is a key: decoys for chains
CLOSE_ENOUGH = 3  # no more filler is added to a prompt that is at most this many tokens below the limit

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """A sentence with a key and a value, and the share of the filler text before it."""

    text: str
    depth: float


@cache
def words() -> tuple[str, ...]:
    return tuple(_resource("words.txt").read_text(encoding="ascii").split())


@cache
def filler() -> tuple[str, ...]:
    """Returns the words of the filler text, each with the space or line end before it, without the licence notice."""
    text = gzip.decompress(_resource("filler.txt.gz").read_bytes()).decode("ascii")
    return tuple(re.findall(r"\s\S+", text[text.index("\n") :]))


def held_out(key: Key) -> bool:
    """Returns whether training never uses this key."""
    numbers = _numbers()
    return (numbers[key[0]] * STRIDE + numbers[key[1]]) % HELD_OUT_EVERY == 0


@cache
def _numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(words())}


def _resource(name: str) -> Traversable:
    return resources.files("hotset.lab.evaluate") / name


class KeySampler:
    """Draws held-out keys, each at most once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drawn: set[Key] = set()

    def draw(self) -> Key:
        return self._first_unused(lambda: (self._word(), self._word()))

    def draw_similar(self, key: Key) -> Key:
        """Draws a key that has the same first or the same second word as `key`."""
        if self._rng.random() < 0.5:
            return self._first_unused(lambda: (key[0], self._word()))
        return self._first_unused(lambda: (self._word(), key[1]))

    def _first_unused(self, propose: Callable[[], Key]) -> Key:
        while True:
            key = propose()
            if held_out(key) and key not in self._drawn:
                self._drawn.add(key)
                return key

    def _word(self) -> str:
        return self._rng.choice(words())


def spaced(parts: Sequence[str]) -> str:
    return "".join(f" {part}" for part in parts)


def note(key: Key, value: Sequence[str]) -> str:
    return spaced(["note", *key, *value]) + "."


def passage(key: Key, text: Sequence[str]) -> str:
    return spaced(["text", *key, *text]) + "."


def number(key: Key, value: int) -> str:
    return spaced(["count", *key, NUMBERS[value]]) + "."


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt without the model's own special tokens, and its complete correct answer."""

    task: str
    length: int  # the requested length: an upper bound of the tokens of prompt and answer
    depth: float  # the share of the filler before `Needles.records[0]`: 0 is oldest, 1 newest
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Needles:
    """The records that a question is about, and the question. Its depth is that of `records[0]`."""

    records: Sequence[Record]
    keys: Sequence[Key]  # distractors may resemble these
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Layout:
    """One question without its filler."""

    task: str
    needles: Needles
    records: Sequence[Record]  # needles and distractors, in order of depth
    filler_start: int

    def prompt(self, filler_words: int) -> str:
        """Returns the prompt with `filler_words` words of filler and each record at its depth."""
        text = filler()
        parts, placed = [], 0
        for record in self.records:
            end = int(record.depth * filler_words)
            parts += [text[(self.filler_start + n) % len(text)] for n in range(placed, end)]
            parts.append(record.text)
            placed = end
        parts += [text[(self.filler_start + n) % len(text)] for n in range(placed, filler_words)]
        return "".join(parts) + self.needles.question


def make_questions(
    tasks: Sequence[str], length_tokens: int, count: int, seed: int, count_tokens: Callable[[str], int]
) -> list[Question]:
    """Makes `count` questions, which alternate between `tasks`. The same arguments make the same questions.

    Prompt, answer and end token together have at most `length_tokens` tokens, usually a few less. `count_tokens` counts
    the tokens of a prompt, including special tokens. Raises ConfigError for an unknown task or a length that is too
    short.
    """
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"task {task!r} does not exist; choose from {', '.join(TASKS)}")
    if length_tokens < MIN_LENGTH:
        raise ConfigError(f"a length of {length_tokens} tokens is too short; the shortest is {MIN_LENGTH}")
    rng = random.Random(f"{seed}/{length_tokens}")
    layouts = [_make_layout(tasks[n % len(tasks)], length_tokens, rng) for n in range(count)]
    longest_answer = max((count_tokens(layout.needles.answer) + 1 for layout in layouts), default=0)
    return [_fit_filler(layout, length_tokens, length_tokens - longest_answer, count_tokens) for layout in layouts]


def _make_layout(task: str, length_tokens: int, rng: random.Random) -> Layout:
    keys = KeySampler(rng)
    needles = TASKS[task](keys, rng)
    distractors = length_tokens // TOKENS_PER_RECORD - len(needles.records)
    records = [*needles.records, *_distractors(distractors, needles.keys, keys, rng)]
    return Layout(task, needles, sorted(records, key=lambda record: record.depth), rng.randrange(len(filler())))


def _distractors(count: int, question_keys: Sequence[Key], keys: KeySampler, rng: random.Random) -> list[Record]:
    earlier_keys: list[Key] = []
    records = []
    for nth in range(count):
        similar_to = question_keys if nth < NEAR_QUESTION_KEYS or not earlier_keys else earlier_keys
        key = keys.draw_similar(rng.choice(similar_to)) if rng.random() < NEAR_MISSES else keys.draw()
        kind = rng.random()
        if kind < 0.06:
            text = passage(key, _some_words(rng, 4, 12))
        elif kind < 0.14:
            text = number(key, rng.randint(0, MAX_COUNT))
        else:
            decoy = earlier_keys and rng.random() < VALUES_THAT_ARE_KEYS
            text = note(key, rng.choice(earlier_keys) if decoy else _some_words(rng, 2, 2))
            earlier_keys.append(key)
        records.append(Record(text, rng.random()))
    return records


def _fit_filler(layout: Layout, length: int, limit: int, count_tokens: Callable[[str], int]) -> Question:
    """Adds filler until the prompt has almost `limit` tokens, by interpolation search over the number of words."""
    fits, fit_tokens = 0, count_tokens(layout.prompt(0))
    if fit_tokens > limit:
        raise ConfigError(f"a length of {length} tokens is too short for this tokenizer; choose a longer one")
    too_many, excess_tokens = limit, max(limit + 1, 2 * limit)
    while too_many - fits > 1 and limit - fit_tokens > CLOSE_ENOUGH:
        per_word = (excess_tokens - fit_tokens) / (too_many - fits)
        step = int((limit - fit_tokens) / per_word)
        trial = min(max(fits + step, fits + 1), too_many - 1)
        tokens = count_tokens(layout.prompt(trial))
        if tokens <= limit:
            fits, fit_tokens = trial, tokens
        else:
            too_many, excess_tokens = trial, tokens
    depth = layout.needles.records[0].depth
    return Question(layout.task, length, depth, layout.prompt(fits), layout.needles.answer)


def _lookup(keys: KeySampler, rng: random.Random) -> Needles:
    key, value = keys.draw(), _some_words(rng, 2, 2)
    return Needles([Record(note(key, value), rng.random())], [key], spaced(["recall", *key]), spaced(value))


def _several(keys: KeySampler, rng: random.Random) -> Needles:
    chosen = [keys.draw() for _ in range(rng.randint(2, 3))]
    values = [_some_words(rng, 2, 2) for _ in chosen]
    records = [Record(note(key, value), rng.random()) for key, value in zip(chosen, values, strict=True)]
    question = " list" + " and".join(spaced(key) for key in chosen) + ";"
    answer = " and".join(spaced([*key, *value]) for key, value in zip(chosen, values, strict=True))
    return Needles(records, chosen, question, answer)


def _last(keys: KeySampler, rng: random.Random) -> Needles:
    key, value, depth = keys.draw(), _some_words(rng, 2, 2), rng.random()
    stale = [Record(note(key, _some_words(rng, 2, 2)), depth * rng.random()) for _ in range(rng.randint(1, 3))]
    return Needles([Record(note(key, value), depth), *stale], [key], spaced(["recall", *key]), spaced(value))


def _chain(keys: KeySampler, rng: random.Random) -> Needles:
    key, middle, value = keys.draw(), keys.draw(), _some_words(rng, 2, 2)
    links = [Record(note(key, middle), rng.random()), Record(note(middle, value), rng.random())]
    return Needles(links, [key, middle], spaced(["chain", *key]), spaced([*middle, *value]))


def _copy(keys: KeySampler, rng: random.Random) -> Needles:
    key, text = keys.draw(), _some_words(rng, 4, 12)
    return Needles([Record(passage(key, text), rng.random())], [key], spaced(["copy", *key]), spaced(text))


def _sum(keys: KeySampler, rng: random.Random) -> Needles:
    first, second = keys.draw(), keys.draw()
    x, y = rng.randint(0, MAX_COUNT), rng.randint(0, MAX_COUNT)
    records = [Record(number(first, x), rng.random()), Record(number(second, y), rng.random())]
    question = spaced(["sum", *first, "and", *second]) + ";"
    answer = spaced([*first, NUMBERS[x], "+", *second, NUMBERS[y], "=", NUMBERS[x + y]])
    return Needles(records, [first, second], question, answer)


def _some_words(rng: random.Random, low: int, high: int) -> list[str]:
    return [rng.choice(words()) for _ in range(rng.randint(low, high))]


TASKS: dict[str, Callable[[KeySampler, random.Random], Needles]] = {
    "lookup": _lookup,
    "several": _several,
    "last": _last,
    "chain": _chain,
    "copy": _copy,
    "sum": _sum,
}
