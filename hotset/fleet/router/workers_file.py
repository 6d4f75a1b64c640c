"""Reads the workers of a router from a file, again whenever it changes.

The program that starts and stops workers, for example `hotset cluster`, replaces the file. A restarted router finds the
current workers in it.
"""

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError

from hotset.base.errors import ConfigError
from hotset.fleet.router.config import worker_url
from hotset.fleet.router.fleet import MAX_WORKERS, Fleet, Role
from hotset.serve.bodies import StrictModel

logger = logging.getLogger("hotset.router")


class WorkersFile(StrictModel):
    """The contents of the file: the URLs of the workers of each role."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


def read_workers(path: Path) -> dict[str, Role]:
    """Returns the role of each worker by its URL. Raises ConfigError if the file cannot be used."""
    try:
        file = WorkersFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read --workers-file {path}: {error.strerror}") from None
    except ValidationError:
        raise ConfigError(
            f"--workers-file {path} must contain a JSON object like "
            '{"prefill": ["http://host:port"], "decode": ["http://host:port"]}'
        ) from None
    roles: dict[str, Role] = {worker_url(url): "prefill" for url in file.prefill}
    roles |= {worker_url(url): "decode" for url in file.decode}
    if len(roles) < len(file.prefill) + len(file.decode):
        raise ConfigError(f"--workers-file {path} names a worker twice; name each worker once")
    if len(roles) > MAX_WORKERS:
        raise ConfigError(f"--workers-file {path} names {len(roles)} workers; the limit is {MAX_WORKERS}")
    return roles


def apply_workers(fleet: Fleet, wanted: dict[str, Role]) -> None:
    """Adds and removes workers until the fleet has exactly `wanted`. Requests of removed workers continue."""
    known = {worker.url: worker.role for worker in fleet.workers}
    for url, role in known.items():
        if wanted.get(url) != role:
            fleet.remove(url)
    for url, role in wanted.items():
        if known.get(url) != role:
            fleet.add(url, role)


async def follow_workers_file(path: Path, fleet: Fleet, poll_seconds: float) -> None:
    """Applies each change of the file until the task is cancelled. A file that cannot be used changes nothing."""
    newest: tuple[int, int] | None = None  # None, so that the first poll reads the file, which may have changed
    while True:
        await asyncio.sleep(poll_seconds)
        version = _version(path)
        if version == newest:
            continue
        newest = version
        try:
            apply_workers(fleet, read_workers(path))
        except ConfigError as error:
            logger.error("%s; the router keeps its workers", error)


def _version(path: Path) -> tuple[int, int] | None:
    """Returns a value that changes when the file is written or replaced. Returns None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
