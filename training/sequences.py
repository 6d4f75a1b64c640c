"""Training sequences: records hidden in running text, and questions about them.

In an answer, a value follows its key exactly as in the record (` note k1 k2 v1 v2.` ... ` recall k1 k2` -> ` v1 v2`),
without a separator, because look-up heads then form far sooner. In the loss, answers have weight 1, and running text
has a small weight. Records and questions have weight 0, because they are random and cannot be predicted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MARKS = (  # the words that begin records and questions, and the word between two keys
    "note",
    "recall",
    "list",
    "and",
    "chain",
    "text",
    "copy",
    "count",
    "sum",
)
WORDS = Path(__file__).parents[1] / "hotset" / "lab" / "evaluate" / "words.txt"  # shared by training and evaluation
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
MAX_COUNT = 5  # the largest number in a record
HELD_OUT_EVERY = 13  # one key in 13 is used in evaluation only

TEXT_WEIGHT = 0.1  # the weight of running text in the loss
NEAR_MISSES = 0.3  # the share of new keys that have a word in common with an existing key
CHAINED = 0.2  # the share of values that are themselves keys
UPDATES = (0.0, 0.3, 0.6)  # the share of records that update an existing key; each sequence uses one of these shares
ASK_UPDATED = 0.5  # the share of recalls about an updated key, if there is one: the last value must win
# In sequences with chains of updates, some keys have three or four values:
CHAIN_UPDATES = 0.6  # the share of records that are updates
CHAIN_CONTINUES = 0.7  # the share of updates that change a key that was already updated
CHAIN_LENGTH = 3  # the maximum number of updates of one key
CHAIN_ASKED = 0.8  # the share of recalls about an updated key
QUESTIONS = {"recall": 0.55, "list": 0.17, "chain": 0.10, "copy": 0.06, "sum": 0.12}

Key = tuple[int, int]


class Lexicon:
    """The token ids of marks, words and signs.

    Each word with its leading space is one token, so sequences can be composed of tokens instead of text.
    """

    def __init__(self, tokenizer: Tokenizer, words: list[str]) -> None:
        def ids(text: str) -> list[int]:
            encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return encoded

        spaced = [ids(f" {word}") for word in words]
        assert all(len(tokens) == 1 for tokens in spaced), "every word must be one token"
        self.words: NDArray[np.int64] = np.array([tokens[0] for tokens in spaced])
        self.marks = {mark: ids(f" {mark}") for mark in MARKS}
        self.full_stop, self.semicolon = ids("."), ids(";")
        self.plus, self.equals = ids(" +"), ids(" =")
        self._numbers = [ids(f" {number}") for number in NUMBERS]
        assert all(len(tokens) == 1 for tokens in self._numbers[: MAX_COUNT + 1]), "counts must be one token each"
        self.bos: int = tokenizer.token_to_id("<|bos|>")
        self.end: int = tokenizer.token_to_id("<|end|>")
        self._number_of = {int(token): number for number, token in enumerate(self.words)}

    @classmethod
    def load(cls, folder: Path) -> "Lexicon":
        """Reads the folder that `prepare.py` wrote."""
        words = WORDS.read_text().split()
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), words)

    def held_out(self, key: Key) -> bool:
        """Returns whether only evaluation uses the key. `hotset/lab/evaluate/tasks.py` has the same rule."""
        return (self._number_of[key[0]] * 7919 + self._number_of[key[1]]) % HELD_OUT_EVERY == 0

    def number(self, number: int) -> list[int]:
        return self._numbers[number]


@dataclass
class Sequence:
    """The tokens written so far with their weights in the loss, and the contents of the records."""

    tokens: list[int]
    weights: list[float]
    chains: bool  # most updates change a key that was already updated
    updates: float  # the share of records that give an existing key a new value, before `updates_end`
    updates_end: int  # no record after this many tokens is an update
    keys: list[Key] = field(default_factory=list)
    updated: list[Key] = field(default_factory=list)  # keys that no recall has asked about since their update
    changed: Counter[Key] = field(default_factory=Counter)  # how often the value of each key changed
    values: dict[Key, Key] = field(default_factory=dict)
    passages: dict[Key, list[int]] = field(default_factory=dict)
    numbers: dict[Key, int] = field(default_factory=dict)

    def put(self, tokens: list[int], weight: float) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)


class Writer:
    """Writes sequences of exactly the requested length.

    `chains` is the share of sequences with chains of updates. Training begins with 0. Otherwise the attention heads
    learn to match only one word of the key, in the latest record with this word, which is correct often enough. If
    `evaluating`, all keys are keys that training never uses.
    """

    def __init__(
        self, lexicon: Lexicon, filler: NDArray[np.uint16], seed: int, chains: float, evaluating: bool = False
    ) -> None:
        self._lexicon = lexicon
        self._chains = chains
        self._filler = filler
        self._rng = np.random.default_rng(seed)
        self._evaluating = evaluating

    def write(self, length: int) -> tuple[list[int], list[float]]:
        rng = self._rng
        chains = rng.random() < self._chains
        updates = CHAIN_UPDATES if chains else float(rng.choice(UPDATES))
        updates_end = int(rng.random() * length)
        sequence = Sequence([self._lexicon.bos], [0.0], chains, updates, updates_end)
        longest_text = int(rng.choice([3, 16, 48])) * (1 if length < 2048 else 2)
        late = rng.random() < 0.4  # questions only near the end, as in evaluation
        while len(sequence.tokens) < length:
            may_ask = bool(sequence.keys) and (not late or len(sequence.tokens) > 0.75 * length)
            chance = rng.random()
            if may_ask and chance < (0.85 if late else 0.55):
                self._ask(sequence)
            elif chance < 0.88 or not sequence.keys:
                self._record(sequence)
            elif chance < 0.92:
                self._passage(sequence)
            else:
                self._number(sequence)
            if rng.random() < 0.6:
                count = int(rng.integers(1, longest_text))
                start = int(rng.integers(len(self._filler) - count))
                sequence.put(self._filler[start : start + count].tolist(), TEXT_WEIGHT)
        return sequence.tokens[:length], sequence.weights[:length]

    def _words(self, count: int) -> list[int]:
        words = self._lexicon.words
        chosen: list[int] = words[self._rng.integers(len(words), size=count)].tolist()
        return chosen

    def _pick(self, keys: list[Key]) -> Key:
        return keys[self._rng.integers(len(keys))]

    def _new_key(self, sequence: Sequence) -> Key:
        while True:
            first, second = self._words(2)
            if sequence.keys and self._rng.random() < NEAR_MISSES:
                known = self._pick(sequence.keys)
                first, second = (known[0], second) if self._rng.random() < 0.5 else (first, known[1])
            if self._lexicon.held_out((first, second)) == self._evaluating:
                return first, second

    def _changing_key(self, sequence: Sequence) -> Key:
        """Picks the key of an update."""
        continuing = [key for key, count in sequence.changed.items() if count < CHAIN_LENGTH] if sequence.chains else []
        return self._pick(continuing if continuing and self._rng.random() < CHAIN_CONTINUES else sequence.keys)

    def _record(self, sequence: Sequence) -> None:
        changing = bool(sequence.keys) and len(sequence.tokens) < sequence.updates_end
        update = changing and self._rng.random() < sequence.updates
        key = self._changing_key(sequence) if update else self._new_key(sequence)
        chained = len(sequence.keys) > 2 and self._rng.random() < CHAINED
        value = self._pick(sequence.keys) if chained else (0, 0)
        if not chained or value == key:
            first, second = self._words(2)
            value = first, second
        if key not in sequence.values:
            sequence.keys.append(key)
        else:
            sequence.changed[key] += 1
            if key not in sequence.updated:
                sequence.updated.append(key)
        sequence.values[key] = value
        sequence.put([*self._lexicon.marks["note"], *key, *value, *self._lexicon.full_stop], 0.0)

    def _passage(self, sequence: Sequence) -> None:
        key = self._new_key(sequence)
        if key not in sequence.values and key not in sequence.passages:
            words = sequence.passages[key] = self._words(int(self._rng.integers(4, 17)))
            sequence.put([*self._lexicon.marks["text"], *key, *words, *self._lexicon.full_stop], 0.0)

    def _number(self, sequence: Sequence) -> None:
        key = self._new_key(sequence)
        if key not in sequence.values and key not in sequence.numbers:
            number = sequence.numbers[key] = int(self._rng.integers(MAX_COUNT + 1))
            number_tokens = self._lexicon.number(number)
            sequence.put([*self._lexicon.marks["count"], *key, *number_tokens, *self._lexicon.full_stop], 0.0)

    def _ask(self, sequence: Sequence) -> None:
        kinds = list(QUESTIONS)
        kind = kinds[self._rng.choice(len(kinds), p=list(QUESTIONS.values()))]
        lexicon, marks = self._lexicon, self._lexicon.marks
        if kind == "recall" or len(sequence.keys) < 3:
            ask_updated = sequence.updated and self._rng.random() < (CHAIN_ASKED if sequence.chains else ASK_UPDATED)
            key = self._pick(sequence.updated if ask_updated else sequence.keys)
            if key in sequence.updated:  # a second question could be answered from the first answer
                sequence.updated.remove(key)
            self._question(sequence, [*marks["recall"], *key], [*sequence.values[key]])
        elif kind == "list":
            keys = [self._pick(sequence.keys) for _ in range(int(self._rng.integers(2, 4)))]
            listed = [token for key in keys for token in (*marks["and"], *key)][len(marks["and"]) :]
            answer = [token for key in keys for token in (*marks["and"], *key, *sequence.values[key])][
                len(marks["and"]) :
            ]
            self._question(sequence, [*marks["list"], *listed, *lexicon.semicolon], answer)
        elif kind == "chain":
            linked = [key for key in sequence.keys[-60:] if sequence.values[key] in sequence.values]
            if linked:
                key = self._pick(linked)
                middle = sequence.values[key]
                self._question(sequence, [*marks["chain"], *key], [*middle, *sequence.values[middle]])
        elif kind == "copy" and sequence.passages:
            key = self._pick(list(sequence.passages))
            self._question(sequence, [*marks["copy"], *key], sequence.passages[key])
        elif kind == "sum" and len(sequence.numbers) >= 2:
            keys = list(sequence.numbers)
            first, second = self._pick(keys), self._pick(keys)
            x, y = sequence.numbers[first], sequence.numbers[second]
            summands = [*first, *lexicon.number(x), *lexicon.plus, *second, *lexicon.number(y)]
            answer = [*summands, *lexicon.equals, *lexicon.number(x + y)]
            self._question(sequence, [*marks["sum"], *first, *marks["and"], *second, *lexicon.semicolon], answer)

    def _question(self, sequence: Sequence, question: list[int], answer: list[int]) -> None:
        sequence.put(question, 0.0)
        sequence.put([*answer, self._lexicon.end], 1.0)


def batches(writer: Writer, sequences: int, length: int) -> Iterator[tuple[NDArray[np.int16], NDArray[np.float16]]]:
    """Yields (tokens, weights), each [sequences, length], endlessly."""
    while True:
        written = [writer.write(length) for _ in range(sequences)]
        tokens = np.array([tokens for tokens, _ in written], dtype=np.int16)
        yield tokens, np.array([weights for _, weights in written], dtype=np.float16)
