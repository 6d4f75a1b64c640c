"""Questions have the wording that the model learned, the requested length and depth, and one correct answer."""

import re
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hotset.base.errors import ConfigError
from hotset.lab.evaluate.tasks import NUMBERS, TASKS, Question, held_out, make_questions, words

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-dsa"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
LENGTH = 1024
RECORD = re.compile(r" (note|text|count) (\w+) (\w+)((?: \w+)+)\.")


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def count_tokens(text: str) -> int:
    return 1 + len(tokens_of(text))


@cache
def ask(task: str, length: int = LENGTH) -> list[Question]:
    return make_questions([task], length, 12 if length == LENGTH else 2, 0, count_tokens)


def records(question: Question) -> list[tuple[str, tuple[str, str], list[str]]]:
    """Returns kind, key and value of each record. Sentences with words outside the list are running text."""
    vocabulary = set(words()) | set(NUMBERS)
    matches = [(m[1], (m[2], m[3]), m[4].split()) for m in RECORD.finditer(question.prompt)]
    return [r for r in matches if {*r[1], *r[2]} <= vocabulary and held_out(r[1])]


ASKED = {
    "several": re.compile(r" list (\w+ \w+(?: and \w+ \w+){1,2});$"),
    "sum": re.compile(r" sum (\w+ \w+ and \w+ \w+);$"),
    "lookup": re.compile(r" recall (\w+ \w+)$"),
    "last": re.compile(r" recall (\w+ \w+)$"),
    "chain": re.compile(r" chain (\w+ \w+)$"),
    "copy": re.compile(r" copy (\w+ \w+)$"),
}


def asked_keys(question: Question) -> list[tuple[str, str]]:
    match = ASKED[question.task].search(question.prompt)
    assert match is not None, question.prompt[-80:]
    pairs = [pair.split() for pair in match[1].split(" and ")]
    return [(first, second) for first, second in pairs]


def test_every_word_is_one_token_so_that_text_and_tokens_agree() -> None:
    assert all(len(tokens_of(f" {word}")) == 1 for word in words())
    assert len(set(words())) == len(words()) == 972


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 4096])
def test_prompt_has_the_requested_length_including_the_answer(task: str, length: int) -> None:
    for question in ask(task, length):
        tokens = count_tokens(question.prompt)
        assert 0.98 * length <= tokens
        assert tokens + count_tokens(question.answer) <= length


@pytest.mark.parametrize("task", TASKS)
def test_the_record_is_at_the_reported_depth(task: str) -> None:
    for question in ask(task):
        key = " ".join(asked_keys(question)[0])
        offset = max(question.prompt.rfind(f" {kind} {key} ") for kind in ("note", "text", "count"))
        assert abs(offset / len(question.prompt) - question.depth) < 0.08


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_the_only_record_under_its_key(task: str) -> None:
    for question in ask(task):
        values: dict[tuple[str, str], list[str]] = {}
        for _kind, key, value in records(question):
            assert task == "last" or key not in values, f"{key} has two records"
            values[key] = value  # a later record of the same key wins
        keys = asked_keys(question)
        found_values = [" ".join(values[key]) for key in keys]
        if task == "several":
            expected = " and ".join(f"{' '.join(key)} {value}" for key, value in zip(keys, found_values, strict=True))
        elif task == "chain":
            first, second = values[keys[0]]
            expected = f"{found_values[0]} {' '.join(values[first, second])}"
        elif task == "sum":
            summands = " + ".join(f"{' '.join(key)} {value}" for key, value in zip(keys, found_values, strict=True))
            expected = f"{summands} = {NUMBERS[sum(map(NUMBERS.index, found_values))]}"
        else:
            expected = found_values[0]
        assert question.answer == f" {expected}"


@pytest.mark.parametrize("task", TASKS)
def test_keys_are_held_out_and_have_near_misses(task: str) -> None:
    for question in ask(task):
        keys = asked_keys(question)
        assert all(held_out(key) for key in keys)
        found = records(question)
        assert len(found) >= LENGTH // 40 - 1
        assert any((key[0] == asked[0]) != (key[1] == asked[1]) for _, key, _ in found for asked in keys)
        # A sentence that looks like a record must not have a training key. Running text contains no such sentence.
        stray = [m[0] for m in RECORD.finditer(question.prompt) if {m[2], m[3], *m[4].split()} <= set(words())]
        assert len(stray) <= len(found)


def test_the_same_seed_gives_the_same_questions_and_another_gives_others() -> None:
    tasks, count = list(TASKS), len(TASKS) + 1
    first = make_questions(tasks, LENGTH, count, 3, count_tokens)
    assert first == make_questions(tasks, LENGTH, count, 3, count_tokens)
    other = make_questions(tasks, LENGTH, count, 4, count_tokens)
    assert not {question.prompt for question in first} & {question.prompt for question in other}
    assert [question.task for question in first] == [*tasks, tasks[0]]


@pytest.mark.parametrize(("task", "length"), [("riddle", 1024), ("lookup", 255)])
def test_unknown_task_or_short_length_is_refused_by_name(task: str, length: int) -> None:
    with pytest.raises(ConfigError, match=r"riddle|255"):
        make_questions([task], length, 1, 0, count_tokens)
