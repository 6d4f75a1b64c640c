"""What workers tell each other before they communicate: which software they run, and whether a set-up has worked."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from hotset import __version__
from hotset.base.devices import gpu_driver_version
from hotset.base.errors import ConfigError, StartupError
from hotset.engine.workers.messages import WorkerRank

AGREEMENT_SECONDS = 300.0  # time from the first worker's message to the last one's; nodes import at different speeds


def exchange(
    store: Any, key: str, number: int, members: Sequence[int], text: str, seconds: float = AGREEMENT_SECONDS
) -> list[str]:
    """Gives `text` to all `members`, which call this with the same `key`, and returns their texts in the order of
    `members`. Raises StartupError, which names those that are missing, after `seconds`."""
    keys = {member: f"{key}/{member}" for member in members}
    store.set(keys[number], text)
    try:
        store.wait([*keys.values()], timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [member for member in members if not store.check([keys[member]])]
        names = ", ".join(f"worker {member}" for member in missing)
        raise StartupError(f"{names} did not answer within {seconds:g} s ({key}): see the log of its node") from error
    return [store.get(keys[member]).decode() for member in members]


def software_of(device: torch.device, workers: int) -> dict[str, str]:
    """Returns what must be the same for all workers of an engine."""
    software = {"world size": str(workers), "Hotset": __version__, "torch": torch.__version__.partition("+")[0]}
    if device.type == "cuda":
        software["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        software["GPU driver"] = gpu_driver_version() or "unknown"
    return software


def check_same_software(
    store: Any, rank: WorkerRank, software: Mapping[str, str], seconds: float = AGREEMENT_SECONDS
) -> None:
    """Raises ConfigError if a worker runs other software than worker 0. Blocks until all workers have called this.

    Versions of NCCL that differ would wait for each other for ever, or exchange wrong bytes.
    """
    texts = exchange(store, "software", rank.number, range(rank.workers), json.dumps(dict(software)), seconds)
    first, *others = (json.loads(text) for text in texts)
    for number, other in enumerate(others, start=1):
        for name in first.keys() | other.keys():
            theirs, ours = (f"{name} {found.get(name, 'none')}" for found in (other, first))
            if theirs != ours:
                raise ConfigError(
                    f"worker {number} has {theirs}, but worker 0 has {ours}; all workers of an engine need the same: "
                    "install the same versions on all nodes"
                )
