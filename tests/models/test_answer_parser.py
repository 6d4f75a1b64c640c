"""Answers are divided into reasoning and content in the same way, however their text is cut into pieces."""

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from hotset.models.answer_parser import (
    MAX_LEADING_SPACES,
    AnswerParser,
    DividedText,
    PlainParser,
    ThinkParser,
    ends_in_reasoning,
)

# Texts of few characters, so that markers, halves of markers and lookalikes are frequent.
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "t", " ", "\n", "<<think", "é"])).map(
    "".join
)


def divided(parser: AnswerParser, *pieces: str) -> DividedText:
    return DividedText.of([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def by_hand(text: str, in_reasoning: bool) -> DividedText:
    """Divides a whole text at its markers."""
    begin = text.lstrip()
    if begin.startswith("<think>") and len(text) - len(begin) <= MAX_LEADING_SPACES:
        text, in_reasoning = begin.removeprefix("<think>"), True
    if not in_reasoning:
        return DividedText(reasoning="", content=text)
    reasoning, _, content = text.partition("</think>")
    return DividedText(reasoning, content)


@examples(40)
@given(text=TEXTS, in_reasoning=st.booleans(), cuts=st.lists(st.integers(0, 60)))
@example(text="a</think>b", in_reasoning=True, cuts=list(range(11)))
@example(text=" " * 40 + "<think>", in_reasoning=False, cuts=list(range(60)))
@example(text="\n<think>a</think>b</think>", in_reasoning=True, cuts=[])
@example(text="cut off within </thin", in_reasoning=True, cuts=[])
@example(text="write <think> first", in_reasoning=False, cuts=[])
@example(text="<thin", in_reasoning=False, cuts=[])
def test_cuts_in_a_text_change_neither_reasoning_nor_content(text: str, in_reasoning: bool, cuts: list[int]) -> None:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert divided(ThinkParser(in_reasoning=in_reasoning), *pieces) == by_hand(text, in_reasoning)
    assert divided(PlainParser(), *pieces) == DividedText(reasoning="", content=text)


@examples(40)
@given(text=TEXTS, in_reasoning=st.booleans())
def test_no_more_text_is_held_back_than_half_a_marker(text: str, in_reasoning: bool) -> None:
    parser = ThinkParser(in_reasoning=in_reasoning)
    shown = 0
    for end in range(1, len(text) + 1):
        shown += sum(len(part.text) for part in parser.push(text[end - 1]))
        so_far = by_hand(text[:end], in_reasoning)
        held = len(so_far.reasoning) + len(so_far.content) - shown
        assert 0 <= held < len("</think>") + (MAX_LEADING_SPACES if shown == 0 else 0)


@pytest.mark.parametrize(
    ("prompt", "continued", "open_"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>", "", True),
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<｜User｜>Hi<｜Assistant｜></think>", "", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("<|assistant|><think>I was", "<think>I was", True),
        ("<|assistant|><think>I was</think>The", "<think>I was</think>The", False),
        ("what is <think>?<|assistant|>It is", "It is", False),
        ("", "", False),
    ],
)
def test_the_prompt_shows_whether_the_answer_begins_in_reasoning(prompt: str, continued: str, open_: bool) -> None:
    assert ends_in_reasoning(prompt, continued) is open_
