"""Where log lines of our own processes go."""

import logging


def log_to_stderr() -> None:
    """Our own lines from INFO on, everybody else's from WARNING on. For processes that are ours from their start."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)
