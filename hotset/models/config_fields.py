"""Reads the JSON files of a checkpoint, with errors that name file, field and value."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hotset.base.errors import CheckpointError


class ConfigFields:
    """Typed access to the fields of one JSON object. A null counts as absent, as in the `transformers` library.

    Every method that returns a typed value raises `CheckpointError`, with a message of one line, if the value has the
    wrong type, or if the field is absent, there is no default, and the result cannot be None.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns whether the field exists and is null."""
        return name in self._values and self._values[name] is None

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def section(self, name: str) -> "ConfigFields":
        """Returns the object under `name`, or an empty one if there is none."""
        value = self.get(name) or {}
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return ConfigFields(value, self._source, f"{self._prefix}{name}.")

    def refuse(self, name: str, supported: str) -> NoReturn:
        shown = repr(self.get(name))
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        raise CheckpointError(f"{self._source}: {self._prefix}{name} is {shown}; supported: {supported}")

    def missing(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self._source}: the field {self._prefix}{name} is missing")

    def count(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                self.missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.refuse(name, f"a whole number from {low}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float | None = 0.0) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                self.missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, "a finite number")
        if above is not None and value <= above:
            self.refuse(name, f"a number above {above:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name, above=None) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, default: str, supported: tuple[str, ...]) -> str:
        value = default if self.get(name) is None else self.get(name)
        if value not in supported:
            self.refuse(name, ", ".join(supported))
        return str(value)

    def layer_choices(self, name: str, length: int, supported: tuple[str, ...]) -> list[str] | None:
        """Returns one entry for each of `length` layers, or None if the field is absent. Ignores further entries."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(entry not in supported for entry in value[:length]):
            self.refuse(name, f"a list of {' or '.join(supported)}")
        if len(value) < length:
            raise CheckpointError(f"{self._source}: {self._prefix}{name} has {len(value)} entries for {length} layers")
        return list(value[:length])

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Returns one token id or a list of them as a tuple, or None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        listed = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in listed):
            self.refuse(name, "a token id or a list of them")
        return tuple(dict.fromkeys(listed))


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in `path`. Raises `CheckpointError` if the file is unreadable, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains no JSON object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Reads the object in `path`, or returns an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}
