"""Messages of the command line and of the child processes that it starts: logging, and notes at the terminal."""

import logging


def log_to_stderr(format: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Configures logging to standard error: messages of Hotset from level INFO, of other packages from WARNING.

    It changes the root logger, so only the command line and its child processes call it, never a program that uses
    `LLM`.
    """
    logging.basicConfig(format=format, level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)


def print_note(text: str) -> None:
    """Prints a message of the program, not of the model, to stderr in a dim style."""
    from rich.console import Console

    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
