"""Which transports UCX chose: it tells nobody but its own log."""

import ctypes
import logging
import os
import re
import tempfile
import threading
from typing import TextIO

log = logging.getLogger(__name__)

CHOSEN = re.compile(r" UCX +INFO +\S+ (?:intra|inter)-node cfg#\d+ (.*)")
TRANSPORT = re.compile(r"\w+/[\w:.]+")
COMPLAINT = re.compile(r" UCX +(?:WARN|ERROR|FATAL) +(.*)")


class UcxLog:
    """UCX's log, in a file of ours. To be made before UCX is loaded: it reads its settings from the environment, once.
    Where they say already what to log, they are left alone, and nothing is known here."""

    def __init__(self) -> None:
        self.transports: tuple[str, ...] = ()  # of the connections so far
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        if not {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys():
            handle, path = tempfile.mkstemp(prefix="hotset-ucx-", suffix=".log")
            self._file = os.fdopen(handle)
            self._path = path
            os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"] = path, "info"

    def loaded(self) -> None:
        """UCX has opened the file. Neither its name nor the settings are needed any longer."""
        if self._file:
            os.unlink(self._path)
            del os.environ["UCX_LOG_FILE"], os.environ["UCX_LOG_LEVEL"]

    def read(self) -> None:
        """Takes note of what has been written since; complaints go to our log."""
        with self._lock:
            if self._file is None:
                return
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library, and never flushes it
            lines = self._file.readlines()
            for found in filter(None, map(CHOSEN.search, lines)):
                self.transports = tuple(dict.fromkeys([*self.transports, *TRANSPORT.findall(found[1])]))
        for found in filter(None, map(COMPLAINT.search, lines)):
            log.warning("UCX: %s", found[1].strip())

    def close(self) -> None:
        self.read()
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None
