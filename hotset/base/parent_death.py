"""Signals that Linux sends to a process when its parent dies."""

import ctypes
import os
import signal

PARENT_VARIABLE = "HOTSET_PARENT_PROCESS"  # environment variable with the id of the process that started a command
PR_SET_PDEATHSIG = 1  # Linux's prctl option that sets the signal a child receives when its parent dies
LIBC = ctypes.CDLL(None)  # loaded now, because a child must not load libraries between fork and exec


def resume_if_parent_dies(parent: int | None = None) -> None:
    """Makes Linux send SIGCONT to this process when its parent dies. If `parent` is given and has died, exits.

    SIGCONT makes a stopped process run again, so that it can notice the end of its parent. A running process ignores
    the signal.
    """
    _signal_if_parent_dies(signal.SIGCONT, parent)


def kill_if_parent_dies(parent: int) -> None:
    """Makes Linux kill this process when its parent dies. Exits if the parent is no longer `parent`."""
    _signal_if_parent_dies(signal.SIGKILL, parent)


def _signal_if_parent_dies(number: signal.Signals, parent: int | None) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it died before
        os._exit(1)


def terminate_if_parent_dies() -> None:
    """Makes this process receive SIGTERM when its parent, which PARENT_VARIABLE names, dies, even if this process is
    stopped. Does nothing without that variable.

    Linux sends SIGCONT (see `resume_if_parent_dies`), because a stopped process does not see SIGTERM.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return

    def terminate_if_orphaned(*_: object) -> None:
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGCONT, terminate_if_orphaned)
    terminate_if_orphaned()  # the parent may have died before
