"""Logging of the processes that Hotset starts."""

import logging


def log_to_stderr() -> None:
    """Logs to standard error: Hotset from INFO, other packages from WARNING. Only processes that Hotset starts call
    this, because it changes the root logger."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)
