"""Trees of files that stand for /proc and /sys of a machine."""

from collections.abc import Mapping
from pathlib import Path


def write_files(root: Path, files: Mapping[str, object]) -> Path:
    """Writes the files, whose names are relative to `root`, and returns `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root
