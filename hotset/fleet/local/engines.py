"""The engines of a deployment on this machine, and checks before they are started."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotset.base.config import EngineConfig
from hotset.base.devices import has_gpu_driver
from hotset.base.errors import ConfigError
from hotset.engine.model_checks import check_model
from hotset.models.spec import ModelSpec, dtype_name


@dataclass(frozen=True, slots=True)
class RoleEngine:
    """One engine of a deployment."""

    name: str  # like "prefill 1"
    config: EngineConfig


def check_engines(engines: Sequence[RoleEngine]) -> None:
    """Checks the engines against the model and this machine. Raises StartupError for mistakes that can be noticed
    before processes are started and torch is imported."""
    for config, name in {engine.config: engine.name for engine in reversed(engines)}.items():
        try:
            spec = check_model(config).spec
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    _check_dtypes(engines, spec)


def _check_dtypes(engines: Sequence[RoleEngine], spec: ModelSpec) -> None:
    """Raises ConfigError if engines would compute in different dtypes, because rows of one dtype cannot land in rows of
    another. Splits need no such check: rows of every split of the model can land in those of every other."""
    gpu_driver = has_gpu_driver()

    def dtype_of(config: EngineConfig) -> str:
        return dtype_name(config.dtype, spec, "cuda" if gpu_driver and config.device != "cpu" else "cpu")

    first, *others = engines
    for other in others:
        if dtype_of(other.config) != dtype_of(first.config):
            raise ConfigError(
                f"{first.name} would compute in {dtype_of(first.config)} and {other.name} in {dtype_of(other.config)}, "
                "so neither can use KV of the other; set --dtype"
            )
