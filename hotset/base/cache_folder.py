"""Folders in which Hotset keeps files that it could make again: where they are, and whether they can be trusted."""

import os
import stat
from pathlib import Path

VARIABLE = "HOTSET_CACHE_DIR"


def cache_folder(name: str) -> Path:
    """Returns the path of the cache `name`: in HOTSET_CACHE_DIR if it is set, else in the folder `hotset` of
    XDG_CACHE_HOME, which is `~/.cache` by default. It may not exist."""
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser() / name
    common = os.environ.get("XDG_CACHE_HOME")
    # The specification says that paths that are not absolute are ignored.
    base = Path(common) if common and Path(common).is_absolute() else Path.home() / ".cache"
    return base / "hotset" / name


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can use. Raises OSError if that is not possible, or if what is there belongs
    to another user, is a link, or can be used by others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{folder} is not a folder") from None
        if found.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"other users can open {folder}; run: chmod 700 {folder}") from None
