"""Command-line flags made from the fields of the configuration: they bear the names of `LLM`'s keywords."""

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer

from hotset.base.config import EngineConfig, ServeConfig, environment_defaults, flag_name, settings

ConfigType = type[EngineConfig] | type[ServeConfig]
Command = TypeVar("Command", bound=Callable[..., None])

PANELS: dict[ConfigType, str] = {EngineConfig: "Engine", ServeConfig: "Server"}


def with_flags(*config_types: ConfigType, without: str | None = None) -> Callable[[Command], Command]:
    """Gives a command that takes `**values` one flag for each field of the configurations, except field `without`."""

    def add(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [flag for config_type in config_types for flag in _flags_of(config_type) if flag.name != without]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
        vars(command)["__signature__"] = inspect.Signature([*own, *flags])
        return command

    return add


def _flags_of(config_type: ConfigType) -> Iterator[inspect.Parameter]:
    for setting in settings(config_type):
        name = f"--{flag_name(setting.name)}"
        option = typer.Option(name, help=setting.metadata["help"], rich_help_panel=PANELS[config_type])
        hint: Any = Annotated[setting.type, option]
        yield inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=hint)


def given(config_type: ConfigType, values: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a configuration: the flags that were given, else what the environment says.

    The environment's values are no defaults of the flags, because `--help` prints defaults and one of them is a secret.
    """
    names = {setting.name for setting in settings(config_type)}
    merged = environment_defaults() | {name: value for name, value in values.items() if value is not None}
    return {name: value for name, value in merged.items() if name in names}
