"""Time limits of hung engines and of stopping an engine. The CLI uses this module too, so it must not import torch."""

FIRST_STEP_SECONDS = 600.0  # additional time for the first step, which compiles kernels
STALL_MARGIN_SECONDS = 5.0  # time between the limits for a process without beats and for one that does not advance
STOP_SECONDS = 10.0  # time for a child process to finish its step and exit before it is killed
LOST_PARENT_SECONDS = 5.0  # time for an engine process to finish its step after its parent has died
DRAIN_SECONDS = 5.0  # minimum time for open handoffs to finish
ENDPOINT_SECONDS = 20.0  # time for the handoff endpoint to close after its drain
UNPINNED_BYTES_PER_SECOND = 1e9  # rate at which even a slow machine releases pinned memory


def closing_seconds(pinned_bytes: int, with_endpoint: bool) -> float:
    """Returns the time that closing an engine can take on a slow machine, in addition to the requested drain."""
    return (DRAIN_SECONDS + ENDPOINT_SECONDS if with_endpoint else 0.0) + pinned_bytes / UNPINNED_BYTES_PER_SECOND
