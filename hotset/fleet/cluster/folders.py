"""Temporary folders of processes that may be killed. Making a folder removes those of processes that have ended."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "hotset-ray-"  # short, because Ray creates Unix sockets there, whose paths have at most 107 characters


def make_folder() -> Path:
    """Makes a temporary folder that belongs to this process, and removes the folders of processes that have ended.

    A lock, which the system releases when the process ends, shows that a folder is in use.
    """
    parent = Path(tempfile.gettempdir())
    for unused in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # the folder is in use, or belongs to another user
            os.close(_lock(unused))
            shutil.rmtree(unused, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    _lock(new)  # held until this process ends; the folder gets a name that others look for only after it is locked
    return new.rename(parent / new.name.removeprefix("."))


def _lock(folder: Path) -> int:
    """Locks a folder, and returns its open descriptor. Raises OSError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
