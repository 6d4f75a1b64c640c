"""Logging of servers and of the child processes that Hotset starts."""

import logging


def log_to_stderr() -> None:
    """Configures logging to standard error: messages of Hotset from level INFO, of other packages from WARNING.

    It changes the root logger, so only servers and child processes call it, never a program that uses `LLM`.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)
