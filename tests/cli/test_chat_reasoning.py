"""`hotset chat` shows reasoning apart from the answer, and keeps both for the next question."""

import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from hotset.base.sampling import SamplingParams
from hotset.cli.terminal import DIM, NOT_DIM, Conversation
from hotset.engine.outputs import Delta
from hotset.models.answer_parser import ThinkParser


class ScriptedLlm:
    """An LLM that thinks, and gives the same answer to every question."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def stream_chat(self, messages: Sequence[Any], params: SamplingParams) -> Generator[Delta, None, None]:
        self.asked.append(list(messages))
        pieces = ["I a", "dd.</th", "ink>2", "!"]
        yield from (Delta(0, piece, (1,)) for piece in pieces)
        yield Delta(0, "", (2,), finish_reason="stop")

    def answer_parser(self, messages: Sequence[Any]) -> ThinkParser:
        return ThinkParser(in_reasoning=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_reasoning_goes_to_stderr_and_to_the_next_prompt(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = ScriptedLlm()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    Conversation(llm, SamplingParams()).run(["1 + 1?", "Sure?"])
    printed = capsys.readouterr()
    assert printed.out == "2!\n2!\n"
    shown = printed.err.replace(NOT_DIM + DIM, "")
    assert shown == 2 * (f"{DIM}I add.{NOT_DIM}\n" if terminal else "I add.\n")
    answer = {"role": "assistant", "content": "2!", "reasoning_content": "I add."}
    assert llm.asked[1] == [
        {"role": "user", "content": "1 + 1?"},
        answer,
        {"role": "user", "content": "Sure?"},
    ]
