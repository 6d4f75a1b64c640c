"""Input and output at the terminal: streamed text, notes, Ctrl-C, and the conversation of `hotset chat`."""

import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from hotset.base.errors import ContextLengthExceeded, RequestError
from hotset.base.logs import print_note
from hotset.base.sampling import SamplingParams
from hotset.models.answer_parser import AnswerParser, DividedText, PlainParser, TextPart

if TYPE_CHECKING:  # these modules take longer to import than the rest of the command line
    from hotset.engine.llm import LLM
    from hotset.engine.outputs import Delta
    from hotset.schedule.request import FinishReason

CHAT_COMMANDS = "/reset clears the conversation, /system TEXT sets the system message, /exit quits"
DIM, NOT_DIM = "\x1b[2m", "\x1b[0m"
CHAT_KEYS = "Ctrl-C stops an answer, Ctrl-D quits"


@dataclass(frozen=True, slots=True)
class PrintedAnswer:
    """The text that was printed, and why it ended."""

    text: str
    reasoning: str
    finish_reason: "FinishReason | None"


def print_stream(deltas: "Generator[Delta, None, None]", parser: AnswerParser | None = None) -> PrintedAnswer:
    """Prints text as it arrives, and reasoning to stderr in a dim style. Ctrl-C aborts the request after the current
    delta."""
    parser = parser or PlainParser()
    parts: list[TextPart] = []
    finish_reason: FinishReason | None = None
    with _deferred_interrupt() as interrupted, closing(deltas):
        for delta in deltas:
            finish_reason = delta.finish_reason
            if interrupted.is_set() and finish_reason is None:
                finish_reason = "abort"
            for part in parser.push(delta.text) + (parser.finish() if finish_reason is not None else []):
                _print_part(part, parts[-1].channel if parts else part.channel)
                parts.append(part)
            if finish_reason == "abort":
                break
    print()
    text = DividedText.of(parts)
    return PrintedAnswer(text.content, text.reasoning, finish_reason)


def _print_part(part: TextPart, previous_channel: str) -> None:
    if part.channel == "content":
        if previous_channel == "reasoning":
            print(file=sys.stderr, flush=True)
        print(part.text, end="", flush=True)
    else:
        text = f"{DIM}{part.text}{NOT_DIM}" if sys.stderr.isatty() else part.text
        print(text, end="", file=sys.stderr, flush=True)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Makes Ctrl-C set the event instead of interrupting an engine step. A second Ctrl-C raises KeyboardInterrupt."""
    interrupted = threading.Event()

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def typed_lines() -> Iterator[str]:
    """Yields stripped lines from the terminal or a pipe until the end of input. Ctrl-C discards the current line."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # adds editing and history to input()
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            if interactive:
                print()
            return


def read_stdin() -> str:
    """Returns all of standard input, without the final newline that `echo` adds."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error


@dataclass(slots=True)
class Conversation:
    """The turns of a chat, oldest first, and the system message before them.

    When the context is full, the oldest turns are dropped.
    """

    llm: "LLM"
    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self, lines: Iterable[str]) -> None:
        """Answers each line until `/exit` or the end of input."""
        for line in lines:
            if line == "/exit":
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self._answer(line)

    def _run_command(self, command: str) -> None:
        if command == "/reset":
            self.turns.clear()
            print_note("(conversation cleared)")
        elif command == "/system" or command.startswith("/system "):
            self.system = command.removeprefix("/system").strip() or None
            print_note("(system message set)" if self.system else "(system message removed)")
        else:
            print_note(CHAT_COMMANDS)

    def _answer(self, question: str) -> None:
        """Prints the answer and keeps it as a turn.

        A rejected question is removed again. Its error is printed at a terminal, and raised if the input is a pipe.
        """
        self.turns.append({"role": "user", "content": question})
        try:
            deltas = self._stream_with_turns_that_fit()
        except RequestError as error:
            self.turns.pop()
            if not sys.stdin.isatty():
                raise
            print_note(f"error: {error}")
            return
        answer = print_stream(deltas, self.llm.answer_parser(self._with_system(self.turns)))
        reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        self.turns.append({"role": "assistant", "content": answer.text, **reasoning})
        if answer.finish_reason == "length":
            print_note("(cut off: --max-tokens was reached, or the context is full)")
        elif answer.finish_reason == "abort":
            print_note("(stopped)")

    def _with_system(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else turns

    def _stream_with_turns_that_fit(self) -> "Generator[Delta, None, None]":
        """Returns the stream of the answer. Drops the oldest turns until the newest question fits into the context."""
        kept = self.turns
        while True:
            try:
                deltas = self.llm.stream_chat(self._with_system(kept), self.params)
                break
            except ContextLengthExceeded:
                if len(kept) == 1:
                    raise
                kept = kept[2:]
        if len(kept) < len(self.turns):
            print_note("(the context is full: the oldest questions and answers were dropped)")
        self.turns = kept
        return deltas
