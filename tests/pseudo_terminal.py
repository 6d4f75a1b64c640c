"""Runs a command on a pseudo-terminal, and shows what a terminal would show."""

import os
import pty
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ERASE_TO_END = "\x1b[K"
PARTS = re.compile(r"\x1b\[K|\r|\n|[^\x1b\r\n]+")


def screen(output: str) -> list[str]:
    """Returns the lines that a terminal shows after `output`. The only control sequence that it accepts is ESC [K."""
    assert "".join(PARTS.findall(output)) == output, f"unexpected control sequence in {output!r}"
    lines, column = [""], 0
    for part in PARTS.findall(output):
        if part == ERASE_TO_END:
            lines[-1] = lines[-1][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def run_on_terminal(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    on_output: Callable[[str], None] = lambda output: None,
) -> tuple[int, str]:
    """Runs a command whose stdout and stderr are one terminal. Returns its exit status and its output.

    Whenever more output arrives, `on_output` is called with all output so far.
    """
    controller, terminal = pty.openpty()
    output = ""
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, cwd=folder, env=environment) as process:
        os.close(terminal)
        try:
            while chunk := _read(controller):
                output += chunk.decode(errors="replace")
                on_output(output)
            process.wait(60)
        finally:
            process.kill()
            os.close(controller)
    return process.returncode, output


def _read(terminal: int) -> bytes:
    """Returns the next bytes of a pseudo-terminal, or none if its other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
