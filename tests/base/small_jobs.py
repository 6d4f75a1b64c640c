"""Jobs of workers in tests. Nothing is imported, so that a worker needs neither time nor memory to begin."""

from collections.abc import Mapping
from typing import Any


def names(prepared: Mapping[str, Any]) -> list[str]:
    return sorted(prepared)


def allocate(prepared: Mapping[str, Any], length: int) -> int:
    return len(bytes(length))


def loop(prepared: Mapping[str, Any]) -> None:
    while True:
        pass
