"""Compiled kernels on disk, so that NVRTC compiles each of them once per machine and user.

A file begins with the SHA-256 of the rest, so damaged files are noticed. It is written under another name and then
renamed, so a process sees either a whole file or none, and several processes can write the same one. A program that
does not come from this user is never loaded.
"""

import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hotset.base.cache_folder import cache_folder, make_private

LOGGER = logging.getLogger("hotset.kernels")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledFiles:
    """A folder of compiled kernels. If it cannot be used, every kernel is compiled, and the log says so once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is `cache_folder("kernels")` by default. It is created when the first kernel is written."""
        self._folder = folder
        self._warned = False

    @property
    def folder(self) -> Path:
        return self._folder or cache_folder("kernels")

    def read(self, key: str) -> bytes | None:
        """Returns the kernel that `write` has stored under `key`. None if there is none, or if it is damaged."""
        try:
            path = self.folder / key
            if not path.parent.is_dir():
                return None
            make_private(path.parent)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                    raise PermissionError(f"other users can write to {path}")
                stored = file.read()
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            self._warn(error)
            return None
        digest, compiled = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        return compiled if hashlib.sha256(compiled).digest() == digest else None

    def write(self, key: str, compiled: bytes) -> None:
        """Stores a kernel under `key`, a name of a file."""
        try:
            make_private(self.folder)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(hashlib.sha256(compiled).digest() + compiled)
                os.rename(temporary, self.folder / key)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except (OSError, RuntimeError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            LOGGER.warning("compiled kernels are not kept, so every start compiles them again: %s", error)
        self._warned = True


def key_of(source: Path, include_folders: Sequence[Path], facts: Iterable[object]) -> str:
    """Returns a name for the kernel that a compiler makes of a file: a hash of the file, of all files that it includes,
    and of `facts`, which are everything else on which the result depends."""
    digest = hashlib.sha256(repr(tuple(facts)).encode())
    for path in _with_included(source, include_folders):
        text = path.read_bytes()
        digest.update(f"\n{path.name} {len(text)}\n".encode() + text)
    return f"{source.parent.name}-{source.stem}-{digest.hexdigest()[:40]}.cubin"


def _with_included(source: Path, include_folders: Sequence[Path]) -> list[Path]:
    """Returns the file, and those that it includes, directly or not, each once and in the order of reading. Headers of
    the compiler are left out."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text()):
            places = [folder / name for folder in (path.parent, *include_folders)]
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return list(found)
