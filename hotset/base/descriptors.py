"""The limit of open files, which is also the limit of open connections."""

import contextlib
import os
import resource
import sys


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit of open files to its hard limit. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system may refuse; then the old limit remains
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Returns the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def free_descriptors() -> int:
    """Returns how many more files this process can open."""
    return descriptor_limit() - len(os.listdir("/proc/self/fd"))
