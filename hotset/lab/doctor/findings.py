"""What checks look at, and what they find."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hotset.base.config import EngineConfig
from hotset.base.host_checks import Finding, Level
from hotset.base.memory_shares import host_store_bytes
from hotset.base.serve_config import ServeConfig
from hotset.base.units import GIB

LEVELS: tuple[Level, ...] = get_args(Level)
CHECK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: this machine, for an engine with these settings."""

    config: EngineConfig
    serve: ServeConfig
    weights: tuple[Path, ...] = ()  # the files with the model's weights; none if no model was named
    gpus: tuple[int, ...] = ()  # numbers of the GPUs; none if the engine computes on the CPU
    ranks: int = 1  # processes that exchange data; those of one GPU are neighbours
    root: Path = Path("/")  # has the folders `proc` and `sys` of the machine

    @property
    def ranks_per_gpu(self) -> int:
        return self.config.ranks_per_gpu

    def store_bytes(self, free: int) -> int:
        """Returns the planned size of the host store, given the free host memory. 0 without tiers or without a GPU.

        The size of --host-kv-tokens depends on the model; the default size stands for it.
        """
        if self.config.tiers == "off" or not self.gpus:
            return 0
        return host_store_bytes(free) if self.config.host_kv_gib is None else int(self.config.host_kv_gib * GIB)


@dataclass(frozen=True, slots=True)
class Check:
    """A named function that finds something. It runs in another process, which is killed if it takes too long."""

    name: str
    function: Callable[[Subject], Sequence[Finding]]
    mend: str = "run the command that hotset doctor was asked to check, and report its error"  # if it does not finish
    seconds: float = CHECK_SECONDS
    alone: bool = False  # the process runs no other check: memory and GPUs are as free as for an engine


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The findings of one check."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]


def worst(findings: Iterable[Finding]) -> Level:
    """Returns the worst level of the findings, or "skipped" if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="skipped")


def show_seconds(seconds: float) -> str:
    """Formats a duration for messages: `0.00012 -> '120 us'`, `90 -> '1.5 min'`."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"
