"""The spec of an application on a cluster: which engines and routers run, with which settings and resources."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hotset.base.config import COMMON_SETTINGS, EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.serve_config import ServeConfig
from hotset.base.settings import flag_name, nearest
from hotset.fleet.router.config import RouterConfig

Role = Literal["prefill", "decode", "router"]
EngineRole = Literal["prefill", "decode"]
ENGINE_ROLES: tuple[EngineRole, ...] = get_args(EngineRole)
MAX_PROCESSES = 256  # of one role
# Settings that the cluster chooses for each process, and what to write in the spec instead.
CHOSEN_SETTINGS = {
    "model": "give it as `model` of the spec",
    "tensor_parallel_size": "give it as `split: {tensor: N}`",
    "pipeline_parallel_size": "give it as `split: {pipeline: N}`",
    "data_parallel_size": "give it as `split: {data: N}`",
    **dict.fromkeys(("executor", "ray_address"), "each engine of an application runs on one node"),
    "gpus": "Ray assigns whole GPUs to each engine, so that no two engines share one",
    "drain_seconds": "give it as `drain-seconds` of the spec",
    "port": "give it as `routers: {port: N}`",
    "host": "engines listen at the address of their node; give that of the routers as `routers: {host: ADDRESS}`",
    "api_key": "give `hotset cluster up` --api-key-file, or set HOTSET_API_KEY",
    **dict.fromkeys(
        ("role", "control", "advertise", "handoff_secret", "prefill", "decode", "workers_file", "allow_workers"),
        "the cluster sets it; leave it out",
    ),
}
PositiveSeconds = Annotated[float, Field(gt=0, le=86400)]
Flags = Mapping[str, Any]


class SpecPart(BaseModel):
    """A part of the spec. Its fields are written with dashes, like flags."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Split(SpecPart):
    """How the ranks of one engine divide the model."""

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)


class Resources(SpecPart):
    """The resources of its node that one process takes, in the units of Ray."""

    cpus: float | None = Field(default=None, ge=0)  # default: one for each rank of an engine, and one for a router
    gpus: float | None = Field(default=None, ge=0)  # default: as many as the split needs
    memory_gib: float | None = Field(default=None, gt=0)
    custom: dict[str, float] = {}


class Engines(SpecPart):
    """The engines of one role. `flags` are flags of `hotset serve`, without their dashes."""

    count: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    split: Split = Split()
    flags: Flags = {}
    resources: Resources = Resources()


class Routers(SpecPart):
    """The routers. All of them listen at the same `port` of different nodes; port 0 is any free port."""

    count: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    host: str | None = None  # default: the address by which Ray knows the node
    port: int = Field(default=8000, ge=0, le=65535)
    flags: Flags = {}
    resources: Resources = Resources()


class Target(SpecPart):
    """The target of autoscaling for a role. Engines are added and removed so that each given measure stays at its
    value per engine."""

    min: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    max: int = Field(ge=1, le=MAX_PROCESSES)
    waiting_requests: float | None = Field(default=None, gt=0)
    waiting_tokens: float | None = Field(default=None, gt=0)
    kv_usage: float | None = Field(default=None, gt=0, le=1)
    tier_pressure: float | None = Field(default=None, gt=0, le=1)
    up_seconds: PositiveSeconds = 10.0  # engines are added if they were too few for this time
    down_seconds: PositiveSeconds = 300.0  # one engine is removed if there was one too many for this time

    @property
    def measures(self) -> dict[str, float]:
        """The wanted value of each measure that is given."""
        names = ("waiting_requests", "waiting_tokens", "kv_usage", "tier_pressure")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Targets(SpecPart):
    prefill: Target | None = None
    decode: Target | None = None


class Restart(SpecPart):
    """When a process counts as failed, and how long its replacement waits."""

    silent_seconds: PositiveSeconds = 6.0  # a ready process that does not answer for this time is killed
    start_seconds: PositiveSeconds = 3600.0  # time for a process to become ready
    backoff_seconds: PositiveSeconds = 1.0  # doubled with every failure of the same process in a row
    max_backoff_seconds: PositiveSeconds = 60.0
    head_seconds: PositiveSeconds = 30.0  # processes end if the Ray head does not answer for this time


class ClusterSpec(SpecPart):
    """An application on a cluster."""

    name: str = Field(default="hotset", pattern=r"^[a-z0-9-]{1,40}$")
    model: str = Field(min_length=1)
    flags: Flags = {}  # of all engines
    prefill: Engines = Engines()
    decode: Engines = Engines()
    routers: Routers = Routers()
    target: Targets = Targets()
    restart: Restart = Restart()
    drain_seconds: PositiveSeconds = 600.0  # time for the requests of a process that is removed

    def engines(self, role: EngineRole) -> Engines:
        return self.prefill if role == "prefill" else self.decode

    def target_of(self, role: EngineRole) -> Target | None:
        return self.target.prefill if role == "prefill" else self.target.decode

    def counts(self) -> dict[Role, int]:
        """The number of processes of each role at the start."""
        return {"prefill": self.prefill.count, "decode": self.decode.count, "router": self.routers.count}

    def engine_settings(self, role: EngineRole) -> dict[str, Any]:
        """The settings of `hotset serve` for one engine, except its addresses and secrets."""
        engines = self.engines(role)
        split = engines.split
        return {
            **{name.replace("-", "_"): value for name, value in (*self.flags.items(), *engines.flags.items())},
            "role": role,
            "tensor_parallel_size": split.tensor,
            "pipeline_parallel_size": split.pipeline,
            "data_parallel_size": split.data,
            "drain_seconds": self.drain_seconds,
        }

    def router_settings(self) -> dict[str, Any]:
        """The settings of `hotset router`, except its workers and secrets."""
        return {
            **{name.replace("-", "_"): value for name, value in self.routers.flags.items()},
            **({} if self.routers.host is None else {"host": self.routers.host}),
            "port": self.routers.port,
            "drain_seconds": self.drain_seconds,
        }

    def demand(self, role: Role) -> dict[str, float]:
        """The resources of one process, by Ray's names."""
        if role == "router":
            resources, ranks, gpus = self.routers.resources, 1, 0
        else:
            config = self.engine_config(role)
            resources, ranks = self.engines(role).resources, config.workers
            gpus = 0 if config.device == "cpu" else ranks // config.ranks_per_gpu
        demand = {"CPU": float(ranks) if resources.cpus is None else resources.cpus, **resources.custom}
        if gpus:
            demand["GPU"] = float(gpus)
        if resources.memory_gib is not None:
            demand["memory"] = resources.memory_gib * (1 << 30)
        return {name: amount for name, amount in demand.items() if amount}

    def engine_config(self, role: EngineRole, **chosen: Any) -> EngineConfig:
        """The configuration of an engine of a role. `chosen` are its address, interface and secret.

        Raises ConfigError if settings are invalid or contradict each other.
        """
        settings = _settings_of(EngineConfig, self.engine_settings(role))
        if not chosen:  # this machine may not have the interface, which belongs to the engine's node
            settings.pop("transfer_interface", None)
        return EngineConfig(**{**settings, "model": self.model, **chosen})


def load_spec(path: Path) -> ClusterSpec:
    """Reads and checks a spec. Raises ConfigError, with the path of the field, if it cannot be used.

    The name of a model directory is relative to the working directory.
    """
    try:
        loaded = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not a text file'}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that does not exist
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    try:
        spec = parse_spec(loaded)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    directory = Path(spec.model).expanduser()
    return spec.model_copy(update={"model": str(directory.resolve())}) if directory.exists() else spec


def parse_spec(value: Any) -> ClusterSpec:
    """Checks the contents of a spec. Raises ConfigError that names the first mistake."""
    try:
        spec = ClusterSpec.model_validate(value)
    except ValidationError as error:
        raise ConfigError(_message(error)) from None
    for place, flags in _flags_of(spec):
        _check_flags(place, flags)
    for role in ENGINE_ROLES:
        try:
            ServeConfig(**_settings_of(ServeConfig, spec.engine_settings(role)))
            config = spec.engine_config(role)
        except ConfigError as error:
            raise ConfigError(f"{role}: {error}") from None
        _check_gpus(spec, role, config)
        _check_target(spec, role)
    try:
        RouterConfig(**spec.router_settings())
    except ConfigError as error:
        raise ConfigError(f"routers: {error}") from None
    if spec.routers.resources.gpus:
        raise ConfigError("routers.resources.gpus: a router uses no GPU; leave it out")
    return spec


def _settings_of(config_type: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {declared.name for declared in fields(config_type)}
    return {name: value for name, value in settings.items() if name in names}


def _flags_of(spec: ClusterSpec) -> Iterator[tuple[str, Flags]]:
    yield "flags", spec.flags
    yield "prefill.flags", spec.prefill.flags
    yield "decode.flags", spec.decode.flags
    yield "routers.flags", spec.routers.flags


def _check_flags(place: str, flags: Flags) -> None:
    """Raises ConfigError if a flag does not exist, has a value of the wrong type, or cannot be set here."""
    config_types: tuple[type, ...] = (RouterConfig,) if place == "routers.flags" else (EngineConfig, ServeConfig)
    known = {flag_name(declared.name): declared for config_type in config_types for declared in fields(config_type)}
    for name, value in flags.items():
        if name not in known:
            match = nearest(name, known)
            command = "hotset router" if place == "routers.flags" else "hotset serve"
            raise ConfigError(
                f"{place}: {command} has no flag {name!r}" + (f"; did you mean {match!r}?" if match else "")
            )
        setting = known[name].name
        if setting in CHOSEN_SETTINGS:
            raise ConfigError(f"{place}.{name} cannot be set here; {CHOSEN_SETTINGS[setting]}")
        if place in ("prefill.flags", "decode.flags") and setting in COMMON_SETTINGS:
            raise ConfigError(f"{place}.{name} must be the same for all engines; give it in `flags` of the spec")
        try:
            value_type: Any = known[name].type
            TypeAdapter(value_type).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{place}.{name}: {_reason(error.errors()[0])}") from None


def _check_gpus(spec: ClusterSpec, role: EngineRole, config: EngineConfig) -> None:
    """Raises ConfigError unless each engine gets the whole GPUs that its ranks need."""
    given, needed = spec.engines(role).resources.gpus, spec.demand(role).get("GPU", 0.0)
    if config.device is not None and ":" in config.device:
        raise ConfigError(
            f"{role}: device {config.device} names one GPU of a machine, but Ray assigns GPUs; use 'cuda'"
        )
    if given is None or given == needed:
        return
    if given != int(given):
        raise ConfigError(
            f"{role}.resources.gpus is {given:g}: two engines would share one GPU; give each engine whole GPUs"
        )
    why = "device is cpu" if config.device == "cpu" else f"{config.workers} ranks, {config.ranks_per_gpu} on each GPU"
    raise ConfigError(f"{role}.resources.gpus is {given:g}, but the split needs {needed:g} ({why}); leave it out")


def _check_target(spec: ClusterSpec, role: EngineRole) -> None:
    target, count = spec.target_of(role), spec.engines(role).count
    if target is None:
        return
    if not target.measures:
        raise ConfigError(
            f"target.{role} has no measure to follow; give waiting-requests, waiting-tokens, kv-usage or tier-pressure"
        )
    if not target.min <= count <= target.max:
        raise ConfigError(
            f"{role}.count is {count}, but target.{role} allows {target.min} to {target.max}; change one of them"
        )


def _message(error: ValidationError) -> str:
    # An unknown field explains why a field is missing, so it comes first.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown field {place!r}; {_advice(first['loc'])}"
    if first["type"] == "missing":
        return f"{place!r} is missing"
    return f"{place or 'the spec'}: {_reason(first)}"


def _reason(error: Any) -> str:
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {str(error['input'])[:80]!r}"


def _advice(place: tuple[int | str, ...]) -> str:
    """Returns which fields may be written instead of an unknown field."""
    part: type[BaseModel] = ClusterSpec
    for name in place[:-1]:
        found = next(field.annotation for field in part.model_fields.values() if field.alias == name)
        part = next(kind for kind in (found, *get_args(found)) if isinstance(kind, type) and issubclass(kind, SpecPart))
    known = [field.alias or name for name, field in part.model_fields.items()]
    match = nearest(str(place[-1]), known)
    return f"did you mean {match!r}?" if match else f"the fields are {', '.join(known)}"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """Reads YAML, refuses repeated keys, and reads only true and false as booleans, like YAML 1.2.

    PyYAML itself would keep the last of repeated keys, and read `tiers: off` as False.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{repeated!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
