"""How long an engine may take to end. Free of torch: whoever starts workers as processes of their own must know it."""

from hotset.handoff.agent import NOTIFY_SECONDS
from hotset.handoff.agent import STOP_SECONDS as AGENT_SECONDS
from hotset.transfer.lanes import CLOSE_S

STOP_SECONDS = 10.0  # for a child that was told to stop: a step that runs, and the end of Python; then it is killed
DRAIN_SECONDS = 5.0  # for handoffs, at the end, at the least
PORT_SECONDS = NOTIFY_SECONDS + AGENT_SECONDS + CLOSE_S  # that a port's `close` may take beyond its drain
UNPINNED_PER_SECOND = 1e9  # bytes, at the least


def closing_seconds(host_bytes: int, with_port: bool) -> float:
    """What closing an engine may take beyond the drain that it is given, on a slow machine."""
    return (DRAIN_SECONDS + PORT_SECONDS if with_port else 0.0) + host_bytes / UNPINNED_PER_SECOND
