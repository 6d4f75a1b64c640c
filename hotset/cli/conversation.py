"""`hotset chat`: a conversation that remembers its turns and gives up the oldest when the context is full."""

import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotset.base.errors import ContextLengthExceeded, RequestError
from hotset.base.sampling import SamplingParams
from hotset.cli.terminal import print_stream, remark
from hotset.engine.outputs import Delta

if TYPE_CHECKING:
    from hotset.engine.llm import LLM

COMMANDS = "/reset forgets the conversation, /system TEXT sets the system message, /exit leaves"
KEYS = "Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass(slots=True)
class Conversation:
    """The turns so far, oldest first, and the system message before them."""

    llm: "LLM"
    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self, lines: Iterable[str]) -> None:
        """Answers line after line, until `/exit` or the end of input."""
        for line in lines:
            if line == "/exit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._ask(line)

    def _obey(self, command: str) -> None:
        if command == "/reset":
            self.turns.clear()
            remark("(forgotten)")
        elif command == "/system" or command.startswith("/system "):
            self.system = command.removeprefix("/system").strip() or None
            remark("(system message set)" if self.system else "(system message removed)")
        else:
            remark(COMMANDS)

    def _ask(self, question: str) -> None:
        """Prints and keeps the answer. Takes a refused question back or, where nobody types, lets the error go up."""
        self.turns.append({"role": "user", "content": question})
        try:
            deltas = self._fitting_stream()
        except RequestError as error:
            self.turns.pop()
            if not sys.stdin.isatty():
                raise
            remark(f"error: {error}")
            return
        answer = print_stream(deltas)
        self.turns.append({"role": "assistant", "content": answer.text})
        if answer.finish_reason == "length":
            remark("(cut off: --max-tokens or the context is used up)")
        elif answer.finish_reason == "abort":
            remark("(stopped)")

    def _fitting_stream(self) -> Generator[Delta, None, None]:
        """The stream of the answer. Forgets as many of the oldest turns as must go for the newest question to fit."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        kept = self.turns
        while True:
            try:
                deltas = self.llm.stream_chat([*system, *kept], self.params)
                break
            except ContextLengthExceeded:
                if len(kept) == 1:
                    raise
                kept = kept[2:]
        if len(kept) < len(self.turns):
            remark("(the context is full: the oldest questions and their answers are forgotten)")
        self.turns = kept
        return deltas
