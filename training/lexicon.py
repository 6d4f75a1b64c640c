"""The words of the tasks as token ids: each is one token with its leading space, so tokens compose as text does."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MARKS = ("note", "recall", "list", "and", "chain", "text", "copy", "count", "sum")
WORDS = Path(__file__).parents[1] / "hotset" / "evaluate" / "words.txt"  # one list for training and evaluation
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LARGEST_COUNT = 5  # of a record
HELD_OUT_EVERY = 13  # one key in so many is for evaluation alone

Key = tuple[int, int]


class Lexicon:
    """Token ids of marks, words and signs."""

    def __init__(self, tokenizer: Tokenizer, words: list[str]) -> None:
        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return found

        spoken = [ids(f" {word}") for word in words]
        assert all(len(each) == 1 for each in spoken), "every word must be one token"
        self.words: NDArray[np.int64] = np.array([each[0] for each in spoken])
        self.marks = {mark: ids(f" {mark}") for mark in MARKS}
        self.full_stop, self.semicolon = ids("."), ids(";")
        self.plus, self.equals = ids(" +"), ids(" =")
        self._numbers = [ids(f" {number}") for number in NUMBERS]
        assert all(len(each) == 1 for each in self._numbers[: LARGEST_COUNT + 1]), "counts must be one token each"
        self.bos: int = tokenizer.token_to_id("<|bos|>")
        self.end: int = tokenizer.token_to_id("<|end|>")
        self._number_of = {int(token): number for number, token in enumerate(self.words)}

    @classmethod
    def load(cls, folder: Path) -> "Lexicon":
        """From the folder that `prepare.py` wrote."""
        words = WORDS.read_text().split()
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), words)

    def held_out(self, key: Key) -> bool:
        """Keys that only evaluation uses. `hotset/evaluate/tasks.py` knows the same rule."""
        return (self._number_of[key[0]] * 7919 + self._number_of[key[1]]) % HELD_OUT_EVERY == 0

    def say(self, number: int) -> list[int]:
        return self._numbers[number]
