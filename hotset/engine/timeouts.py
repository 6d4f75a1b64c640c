"""How long an engine may take to stop. This module needs no torch, because the CLI uses it too."""

from hotset.handoff.agent import NOTIFY_SECONDS
from hotset.handoff.agent import STOP_SECONDS as AGENT_SECONDS
from hotset.transfer.lanes import CLOSE_S

STOP_SECONDS = 10.0  # that a child gets to finish its step and exit, before it is killed
DRAIN_SECONDS = 5.0  # the minimum that open handoffs get to finish
ENDPOINT_SECONDS = (
    NOTIFY_SECONDS + AGENT_SECONDS + CLOSE_S
)  # that the handoff endpoint may take to close after its drain
UNPINNED_PER_SECOND = 1e9  # bytes of pinned memory that even a slow machine releases in a second


def closing_seconds(host_bytes: int, with_endpoint: bool) -> float:
    """Returns the time that closing an engine may take on a slow machine, in addition to its drain."""
    return (DRAIN_SECONDS + ENDPOINT_SECONDS if with_endpoint else 0.0) + host_bytes / UNPINNED_PER_SECOND
