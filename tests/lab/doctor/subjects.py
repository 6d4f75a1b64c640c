"""Machines and configurations for the checks of `hotset doctor`."""

from typing import Any

from hotset.base.config import EngineConfig
from hotset.base.serve_config import ServeConfig
from hotset.lab.doctor.findings import Subject


def subject(*, settings: dict[str, Any] | None = None, serve: dict[str, Any] | None = None, **fields: Any) -> Subject:
    """Returns a subject with settings of an engine and of a server, and with further fields."""
    return Subject(EngineConfig(**(settings or {})), ServeConfig(**(serve or {"port": 0})), **fields)
