"""`hotset serve --disaggregate`: reads the number of engines of each role and their settings, checks the engines, and
starts them."""

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.base.config import COMMON_SETTINGS, EngineConfig
from hotset.base.devices import has_gpu_driver
from hotset.base.errors import ConfigError
from hotset.base.flags import config_values, given_flags
from hotset.base.listeners import bound_socket
from hotset.base.packages import check_packages
from hotset.base.serve_config import ServeConfig
from hotset.base.settings import flag_name
from hotset.engine.model_checks import check_model
from hotset.fleet.local.shares import RoleEngine
from hotset.models.spec import ModelSpec, dtype_name

MAX_ENGINES = 64


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The number of engines of each role."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "EngineCounts":
        """Parses a text like "2P1D". Raises ConfigError for any other text, for a role without engines, and for more
        than MAX_ENGINES engines in total."""
        match = re.fullmatch(r"([0-9]{1,3})P([0-9]{1,3})D", text, re.IGNORECASE)
        counts = None if match is None else cls(int(match[1]), int(match[2]))
        if counts is None or not (counts.prefill and counts.decode and counts.prefill + counts.decode <= MAX_ENGINES):
            raise ConfigError(
                f"--disaggregate takes the numbers of prefill and decode engines, like 1P1D or 2P1D, got {text!r}; "
                f"the limit is {MAX_ENGINES} engines in total"
            )
        return counts


def serve_disaggregated(
    values: Mapping[str, Any],
    serve_config: ServeConfig,
    counts: str,
    prefill_args: Sequence[str],
    decode_args: Sequence[str],
) -> int:
    """Runs `hotset serve --disaggregate COUNTS` and returns its exit code. Raises StartupError, if possible before
    torch is imported.
    """
    engines = role_engines(EngineCounts.parse(counts), values, prefill_args, decode_args)
    check_packages("server", "serve")
    check_engines(engines)
    with bound_socket(serve_config.host, serve_config.port) as listener:
        from hotset.fleet.local.deployment import run

        return run(engines, serve_config, listener)


def role_engines(
    counts: EngineCounts, values: Mapping[str, Any], prefill_args: Sequence[str], decode_args: Sequence[str]
) -> list[RoleEngine]:
    """Returns the engines, prefill engines first. All of them get the same handoff secret.

    `values` are the flags that apply to every engine. `prefill_args` and `decode_args` are texts with flags that
    override `values`: one text for all engines of the role, or one for each engine. Raises ConfigError for flags that
    are unknown, that one engine cannot set, or that do not suit the engine's role.
    """
    if values["role"] != "both":
        raise ConfigError("--disaggregate starts engines of both roles; leave --role out")
    if values["gpus"] is not None:
        raise ConfigError(
            "--gpus names the GPUs of one engine; give it in --prefill-args or --decode-args, or choose the GPUs that "
            "all engines divide with CUDA_VISIBLE_DEVICES"
        )
    common = {"handoff_secret": secrets.token_hex(16)} | config_values(EngineConfig, {**values, "role": "prefill"})
    engines = []
    for role, count, texts in (("prefill", counts.prefill, prefill_args), ("decode", counts.decode, decode_args)):
        for number, flags in enumerate(_flags_of_engines(role, count, texts), 1):
            name = f"{role} {number}"
            try:
                config = EngineConfig(**{**common, **flags, "role": role})
                _check_ports(config)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            engines.append(RoleEngine(name, config))
    return engines


def _flags_of_engines(role: str, count: int, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the flags of each engine of a role."""
    flag = f"--{role}-args"
    if len(texts) not in (0, 1, count):
        raise ConfigError(
            f"{flag} is given {len(texts)} times, but --disaggregate starts {count} {role} "
            f"{'engine' if count == 1 else 'engines'}; give it once for all of them, or once for each"
        )
    parsed = [_parse_flags(flag, text) for text in texts]
    return parsed if len(parsed) == count else (parsed or [{}]) * count


def _parse_flags(flag: str, text: str) -> dict[str, Any]:
    """Returns the settings in the value of --prefill-args or --decode-args."""
    try:
        given = given_flags(shlex.split(text), EngineConfig, ServeConfig)
    except (ConfigError, ValueError) as error:  # ValueError: a quotation that does not end
        raise ConfigError(f"{flag} {text!r}: {error}") from None
    server_settings = ServeConfig.__dataclass_fields__
    for name in given:
        if name in server_settings or name in COMMON_SETTINGS:
            advice = "leave it out" if name in ("model", "role") else "give it to hotset serve itself"
            raise ConfigError(f"{flag} {text!r}: --{flag_name(name)} cannot be set for one engine; {advice}")
    return given


def _check_ports(config: EngineConfig) -> None:
    """Rejects fixed ports, which several engines cannot share."""
    for name in ("control", "advertise", "kv_events", "kv_events_replay"):
        address = getattr(config, name)
        if address is not None and not address.endswith(":0"):
            raise ConfigError(f"--disaggregate gives each engine its own ports; use port 0 in --{flag_name(name)}")


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
    another. Splits need no such check, because rows of any split of the model can land in any other split."""
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
