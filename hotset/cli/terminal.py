"""Reading from and writing to the terminal: streamed text, remarks, typed lines, Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType

from hotset.base.errors import RequestError
from hotset.engine.outputs import Delta
from hotset.schedule.request import FinishReason


@dataclass(frozen=True, slots=True)
class Printed:
    text: str
    finish_reason: FinishReason | None


def print_stream(deltas: Generator[Delta, None, None]) -> Printed:
    """Prints text as it comes. Ctrl-C ends it between two deltas and aborts the request."""
    text = ""
    finish_reason: FinishReason | None = None
    with _noted_interrupt() as interrupted, closing(deltas):
        for delta in deltas:
            print(delta.text, end="", flush=True)
            text, finish_reason = text + delta.text, delta.finish_reason
            if interrupted.is_set() and finish_reason is None:
                finish_reason = "abort"
                break
    print()
    return Printed(text, finish_reason)


@contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that it never strikes in the middle of an engine step; a second one raises as usual."""
    pressed = threading.Event()

    def note_it(signum: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def typed_lines() -> Iterator[str]:
    """Lines from a person or a pipe, stripped, until the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() editing and history
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
    """All of standard input, less the line end that `echo` adds."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error


def remark(text: str) -> None:
    """A remark of ours beside the model's text: dim, on stderr."""
    from rich.console import Console

    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
