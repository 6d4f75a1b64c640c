"""JSON files that come with a checkpoint."""

import json
from pathlib import Path
from typing import Any

from hotset.base.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. `CheckpointError`, naming it, if it is unreadable, broken, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; an empty object where there is no such file."""
    return read_json(path) if path.is_file() else {}
