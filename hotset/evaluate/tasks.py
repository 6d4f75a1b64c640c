"""Retrieval questions: records hidden in running text among many like them, and one question at the very end.

    lookup   ` recall k k` -> ` v v`: what the note on a key says
    several  ` list k k and k k;` -> ` k k v v and k k v v`
    last     ` recall k k` after further notes on the same key: the last one counts
    chain    ` chain k k` -> ` m m v v`: the value is itself a key, whose value follows
    copy     ` copy k k` -> the passage under that key
    sum      ` sum k k and k k;` -> ` k k three + k k five = eight`: arithmetic over two numbers

Nothing here knows a model: text in and out, and a function that counts tokens.
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

HELD_OUT_IN = 13  # one key in so many is never shown in training; evaluation uses no others
STRIDE = 7919
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LARGEST_COUNT = 5  # of a record: up to here each number is one token, as words are, so it is looked up as they are
TOKENS_PER_RECORD = 40
SHORTEST = 256  # below this, records alone would fill the context
NEAR_MISSES = 0.3  # of the distractors: they share a word with another key
NEAR_THE_ASKED = 24  # the first so many distractors are the near misses of a key that is asked about
VALUES_THAT_ARE_KEYS = 0.2  # of the distractors: decoys for chains
CLOSE_ENOUGH = 3  # tokens below the wanted length at which the fitting stops

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


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt without the model's own special tokens, and the whole of its right answer."""

    task: str
    length: int  # tokens of prompt and answer together, rounded up to what was wanted
    depth: float  # share of the context before the first record that the answer needs: 0 oldest, 1 newest
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Needles:
    """What a task hides, and what it asks; the first record is the one whose depth counts."""

    records: Sequence[Record]
    keys: Sequence[Key]  # that distractors may resemble
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Layout:
    """One question before its filler is measured out."""

    task: str
    needles: Needles
    records: Sequence[Record]  # needles and distractors, in order of depth
    filler_start: int

    def prompt(self, filler_words: int) -> str:
        """The prompt with so much filler: each record stands where its depth says."""
        text = filler()
        parts, done = [], 0
        for record in self.records:
            due = int(record.depth * filler_words)
            parts += [text[(self.filler_start + n) % len(text)] for n in range(done, due)]
            parts.append(record.text)
            done = due
        parts += [text[(self.filler_start + n) % len(text)] for n in range(done, filler_words)]
        return "".join(parts) + self.needles.question


def make_questions(
    tasks: Sequence[str], length_tokens: int, count: int, seed: int, count_tokens: Callable[[str], int]
) -> list[Question]:
    """`count` questions, dealt evenly to `tasks`; the same for the same arguments.

    Prompt, answer and end token together take at most `length_tokens`, and hardly less. `count_tokens` counts what the
    model will see of a prompt. ConfigError for a task that does not exist or a length too short to hide anything in.
    """
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"there is no task {task!r}; choose from {', '.join(TASKS)}")
    if length_tokens < SHORTEST:
        raise ConfigError(f"a length of {length_tokens} tokens is too short; the shortest is {SHORTEST}")
    rng = random.Random(f"{seed}/{length_tokens}")
    layouts = [_lay_out(tasks[n % len(tasks)], length_tokens, rng) for n in range(count)]
    longest_answer = max((count_tokens(layout.needles.answer) + 1 for layout in layouts), default=0)
    return [_measured(layout, length_tokens, length_tokens - longest_answer, count_tokens) for layout in layouts]


def _lay_out(task: str, length_tokens: int, rng: random.Random) -> Layout:
    keys = Keys(rng)
    needles = TASKS[task](keys, rng)
    missing = length_tokens // TOKENS_PER_RECORD - len(needles.records)
    records = [*needles.records, *_distractors(missing, needles.keys, keys, rng)]
    return Layout(task, needles, sorted(records, key=lambda record: record.depth), rng.randrange(len(filler())))


def _distractors(count: int, asked: Sequence[Key], keys: Keys, rng: random.Random) -> list[Record]:
    known: list[Key] = []
    records = []
    for nth in range(count):
        models = asked if nth < NEAR_THE_ASKED or not known else known
        key = keys.near(rng.choice(models)) if rng.random() < NEAR_MISSES else keys.draw()
        kind = rng.random()
        if kind < 0.06:
            text = passage(key, _some_words(rng, 4, 12))
        elif kind < 0.14:
            text = number(key, rng.randint(0, LARGEST_COUNT))
        else:
            decoy = known and rng.random() < VALUES_THAT_ARE_KEYS
            text = note(key, rng.choice(known) if decoy else _some_words(rng, 2, 2))
            known.append(key)
        records.append(Record(text, rng.random()))
    return records


def _measured(layout: Layout, length: int, limit: int, count_tokens: Callable[[str], int]) -> Question:
    """The question with as much filler as fits: bisection, guided by how many tokens a word took so far."""
    fits, fit_tokens = 0, count_tokens(layout.prompt(0))
    if fit_tokens > limit:
        raise ConfigError(f"a length of {length} tokens is too short for this tokenizer; ask for a longer one")
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


def _lookup(keys: Keys, rng: random.Random) -> Needles:
    key, value = keys.draw(), _some_words(rng, 2, 2)
    return Needles([Record(note(key, value), rng.random())], [key], spoken(["recall", *key]), spoken(value))


def _several(keys: Keys, rng: random.Random) -> Needles:
    asked = [keys.draw() for _ in range(rng.randint(2, 3))]
    values = [_some_words(rng, 2, 2) for _ in asked]
    records = [Record(note(key, value), rng.random()) for key, value in zip(asked, values, strict=True)]
    question = " list" + " and".join(spoken(key) for key in asked) + ";"
    answer = " and".join(spoken([*key, *value]) for key, value in zip(asked, values, strict=True))
    return Needles(records, asked, question, answer)


def _last(keys: Keys, rng: random.Random) -> Needles:
    key, value, depth = keys.draw(), _some_words(rng, 2, 2), rng.random()
    stale = [Record(note(key, _some_words(rng, 2, 2)), depth * rng.random()) for _ in range(rng.randint(1, 3))]
    return Needles([Record(note(key, value), depth), *stale], [key], spoken(["recall", *key]), spoken(value))


def _chain(keys: Keys, rng: random.Random) -> Needles:
    key, middle, value = keys.draw(), keys.draw(), _some_words(rng, 2, 2)
    links = [Record(note(key, middle), rng.random()), Record(note(middle, value), rng.random())]
    return Needles(links, [key, middle], spoken(["chain", *key]), spoken([*middle, *value]))


def _copy(keys: Keys, rng: random.Random) -> Needles:
    key, text = keys.draw(), _some_words(rng, 4, 12)
    return Needles([Record(passage(key, text), rng.random())], [key], spoken(["copy", *key]), spoken(text))


def _sum(keys: Keys, rng: random.Random) -> Needles:
    one, other = keys.draw(), keys.draw()
    x, y = rng.randint(0, LARGEST_COUNT), rng.randint(0, LARGEST_COUNT)
    records = [Record(number(one, x), rng.random()), Record(number(other, y), rng.random())]
    question = spoken(["sum", *one, "and", *other]) + ";"
    answer = spoken([*one, NUMBERS[x], "+", *other, NUMBERS[y], "=", NUMBERS[x + y]])
    return Needles(records, [one, other], question, answer)


def _some_words(rng: random.Random, least: int, most: int) -> list[str]:
    return [rng.choice(words()) for _ in range(rng.randint(least, most))]


TASKS: dict[str, Callable[[Keys, random.Random], Needles]] = {
    "lookup": _lookup,
    "several": _several,
    "last": _last,
    "chain": _chain,
    "copy": _copy,
    "sum": _sum,
}
