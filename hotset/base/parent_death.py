"""Signals that Linux sends to a process when its parent dies."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # Linux's prctl option that sets the signal a child receives when its parent dies


def resume_if_parent_dies() -> None:
    """Makes Linux send SIGCONT to this process when its parent dies.

    A process that is stopped then runs again and can notice the end of its parent. Others ignore the signal.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
