"""Logging of the command line and of the child processes that it starts."""

import logging


def log_to_stderr(format: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Configures logging to standard error: messages of Hotset from level INFO, of other packages from WARNING.

    It changes the root logger, so only the command line and its child processes call it, never a program that uses
    `LLM`.
    """
    logging.basicConfig(format=format, level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)
