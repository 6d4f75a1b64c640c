"""Command-line flags made from the fields of the configuration: they bear the names of `LLM`'s keywords."""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from hotset.base.config import OF_WORKERS, EngineConfig, ServeConfig, environment_defaults, flag_name
from hotset.serve.router.config import RouterConfig

ConfigType = type[EngineConfig] | type[ServeConfig] | type[RouterConfig]
Command = TypeVar("Command", bound=Callable[..., None])

# Settings that mean something to servers only.
OF_SERVERS = ("role", *OF_WORKERS)
PANELS: dict[ConfigType, str] = {EngineConfig: "Engine", ServeConfig: "Server", RouterConfig: "Router"}


def with_flags(*config_types: ConfigType, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Gives a command that takes `**values` one flag for each field of the configurations, except those `without`."""

    def add(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [flag for config_type in config_types for flag in _flags_of(config_type) if flag.name not in without]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
        vars(command)["__signature__"] = inspect.Signature([*own, *flags])
        return command

    return add


def _flags_of(config_type: ConfigType) -> Iterator[inspect.Parameter]:
    for setting in fields(config_type):
        name = f"--{flag_name(setting.name)}"
        option = typer.Option(name, help=setting.metadata["help"], rich_help_panel=PANELS[config_type])
        hint: Any = Annotated[setting.type, option]
        yield inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=hint)


def given(config_type: ConfigType, values: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a configuration: the flags that were given, else what the environment says.

    The environment's values are no defaults of the flags, because `--help` prints defaults and one of them is a secret.
    """
    names = {setting.name for setting in fields(config_type)}
    flags = {name: value for name, value in values.items() if value is not None}
    around = environment_defaults()
    if flags.get("role", "both") == "both":
        around.pop("handoff_secret", None)  # meant for the workers that share this environment
    return {name: value for name, value in (around | flags).items() if name in names}


class ManyAddresses(TyperCommand):
    """Takes several words after one flag: `--prefill A B` is `--prefill A --prefill B`."""

    MANY = ("--prefill", "--decode")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word
            elif flag in self.MANY and spread[-1] != flag:
                spread.append(flag)
            spread.append(word)
        return super().parse_args(ctx, spread)
