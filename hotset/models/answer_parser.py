"""Divides the text of an answer into reasoning and content while the text arrives.

A parser takes pieces of text and returns typed parts. However the text is cut into pieces, the parts of each channel
add up to the same text.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Channel = Literal["reasoning", "content"]

REASONING_START = "<think>"
REASONING_END = "</think>"
REASONING_MARKERS = (REASONING_START, REASONING_END)
# Tokens with which models write tool calls. Parsers of calls need them in the text of an answer.
TOOL_MARKERS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("｜DSML｜", "<|python_tag|>"),
)
SHOWN_MARKERS = frozenset(REASONING_MARKERS + TOOL_MARKERS)
MAX_LEADING_SPACES = 16  # white space before a <think> that begins an answer


@dataclass(frozen=True, slots=True)
class TextPart:
    """New text of one channel: what the model thinks, or what it answers."""

    channel: Channel
    text: str


class AnswerParser(Protocol):
    """Parses the text of one choice."""

    def push(self, text: str) -> list[TextPart]:
        """Returns the parts that `text` completes. Holds back the end of the text while it may begin a marker."""
        ...

    def finish(self) -> list[TextPart]:
        """Ends the text and returns the parts that were held back."""
        ...


class PlainParser:
    """The parser for models that do not mark their reasoning: all text is content."""

    def push(self, text: str) -> list[TextPart]:
        return _parts("content", text)

    def finish(self) -> list[TextPart]:
        return []


class ThinkParser:
    """The parser for models whose answers begin with reasoning between <think> and </think>.

    A prompt can already end with <think>. Then the answer begins within the reasoning, and a further <think> at its
    beginning is dropped. Otherwise the answer has reasoning only if it begins with <think>. All text after the first
    </think> is content, so an answer can quote the markers.
    """

    def __init__(self, *, in_reasoning: bool) -> None:
        self._channel: Channel = "reasoning" if in_reasoning else "content"
        self._may_start = True  # the answer may still begin with <think>
        self._held = ""

    def push(self, text: str) -> list[TextPart]:
        text, self._held = self._held + text, ""
        if self._may_start:
            begin = text.lstrip()
            if len(text) - len(begin) <= MAX_LEADING_SPACES:
                if len(begin) < len(REASONING_START) and REASONING_START.startswith(begin):
                    self._held = text
                    return []
                if begin.startswith(REASONING_START):
                    self._channel, text = "reasoning", begin.removeprefix(REASONING_START)
            self._may_start = False
        if self._channel == "content":
            return _parts("content", text)
        reasoning, marker, content = text.partition(REASONING_END)
        if marker:
            self._channel = "content"
            return _parts("reasoning", reasoning) + _parts("content", content)
        certain = len(text) - _overlap(text, REASONING_END)
        self._held = text[certain:]
        return _parts("reasoning", text[:certain])

    def finish(self) -> list[TextPart]:
        held, self._held = self._held, ""
        return _parts(self._channel, held)


@dataclass(frozen=True, slots=True)
class DividedText:
    """The text of several parts, by channel."""

    reasoning: str
    content: str

    @classmethod
    def of(cls, parts: Iterable[TextPart]) -> "DividedText":
        texts: dict[Channel, str] = {"reasoning": "", "content": ""}
        for part in parts:
            texts[part.channel] += part.text
        return cls(**texts)


def ends_in_reasoning(prompt: str, continued: str) -> bool:
    """Returns whether the answer to `prompt` begins within the reasoning.

    `continued` is the end of the prompt that belongs to the answer: the text of a message that the answer continues. If
    it is empty, the prompt must end with <think>; a <think> that a user wrote does not count.
    """
    tail = continued or prompt.rstrip()[-len(REASONING_START) :]
    return tail.rfind(REASONING_START) > tail.rfind(REASONING_END)


def _parts(channel: Channel, text: str) -> list[TextPart]:
    return [TextPart(channel, text)] if text else []


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the proper prefix of `marker` with which `text` ends, or 0. Markers contain their first
    character only once, so there is at most one such prefix."""
    start = text.rfind(marker[0], max(0, len(text) - len(marker) + 1))
    return len(text) - start if start >= 0 and marker.startswith(text[start:]) else 0
