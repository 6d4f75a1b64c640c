"""Command-line flags, generated from the fields of the configurations. Engine flags are named like `LLM` keywords."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from hotset.base.config import CHAT_SETTINGS, EVENT_SETTINGS, HANDOFF_SETTINGS, EngineConfig, environment_defaults
from hotset.base.errors import ConfigError
from hotset.base.settings import flag_name, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Panels = Mapping[str, tuple[str, ...]]
CommandFunction = TypeVar("CommandFunction", bound=Callable[..., None])

# Settings that have no effect outside a server.
SERVER_ONLY_SETTINGS = ("role", *HANDOFF_SETTINGS, *EVENT_SETTINGS)
MAX_KEY_CHARACTERS = 4096
PICTURE_SUFFIXES = (".svg", ".html")
EXIT_USAGE = 2  # the exit status of a wrong command line
EXIT_INTERRUPTED = 130  # the exit status that shells expect from a command that Ctrl-C ended
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File that contains the API key, on one line. Default: see --api-key.", show_default=False),
]
# The settings in the order of `--help`. Those of BASICS are in its first panel.
OWN_OPTIONS = ""  # the place of the options that only one command has
BASICS = (
    "model",
    "url",
    "prefill",
    "decode",
    "host",
    "port",
    "api_key",
    "api_key_file",
    "served_model_name",
    OWN_OPTIONS,
    "allow_workers",
    "device",
    "max_model_len",
)
PANELS: Panels = {
    "Model": ("tokenizer", "dtype", "weight_dtype", "load_format", "pack_weights", "seed"),
    "Chat": (*CHAT_SETTINGS, "tool_format"),
    "KV cache": (
        "tiers",
        "gpu_memory_utilization",
        "device_kv_gib",
        "device_kv_tokens",
        "host_kv_gib",
        "host_kv_tokens",
        "prefix_cache",
        "hot_slots",
        "kv_dtype",
        "index_dtype",
        "page_rows",
    ),
    "KV events": EVENT_SETTINGS,
    "Batches and steps": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "plans_in_flight",
        "speculate",
        "speculate_by",
        "accept",
        "cuda_graphs",
        "step_timeout",
    ),
    "Several GPUs": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "pipeline_layers",
        "data_parallel_size",
        "executor",
        "ray_address",
        "gpus",
        "ranks_per_gpu",
        "collectives",
    ),
    "Prefill and decode workers": (
        "workers_file",
        "role",
        "control",
        "advertise",
        "handoff_secret",
        "transfer",
        "transfer_interface",
        "transfer_protocol",
        "staging_mib",
        "extend_locally",
    ),
    "Requests and connections": (
        "page",
        "otlp",
        "cors_origin",
        "max_body_mib",
        "max_queue",
        "max_concurrency",
        "max_connections",
        "receive_timeout_seconds",
        "send_timeout_seconds",
        "response_timeout_seconds",
        "idle_timeout_seconds",
        "poll_seconds",
        "health_timeout_seconds",
        "drain_seconds",
    ),
}
OTHER_PANEL = "Other settings"


def with_flags(
    *config_types: "type[DataclassInstance]", without: Collection[str] = (), panels: Panels = PANELS
) -> Callable[[CommandFunction], CommandFunction]:
    """Adds flags to a command that takes `**values`: one for each field of the types, except those in `without`.

    `--help` shows the command's arguments first, then BASICS, then the panels.
    """

    def add(command: CommandFunction) -> CommandFunction:
        signature = inspect.signature(command)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [flag for config_type in config_types for flag in _flags_of(config_type, panels)]
        flags = [flag for flag in flags if flag.name not in without]
        positions = {p.name: _position(p.name, OTHER_PANEL, panels) for p in flags} | {
            p.name: _position(p.name, OWN_OPTIONS, panels) for p in own
        }
        ordered = sorted((*own, *flags), key=lambda parameter: positions[parameter.name])
        command.__annotations__ = {p.name: p.annotation for p in ordered}
        vars(command)["__signature__"] = inspect.Signature(ordered)
        return command

    return add


def _flags_of(config_type: "type[DataclassInstance]", panels: Panels) -> Iterator[inspect.Parameter]:
    for setting in fields(config_type):
        name, help = f"--{flag_name(setting.name)}", setting.metadata["help"]
        if setting.type is bool:
            name += f"/--no-{flag_name(setting.name)}"
        option = typer.Option(name, help=help, rich_help_panel=_panel_of(setting.name, panels))
        kind, default = setting.type, setting.default
        if (metavar := setting.metadata["metavar"]) is not None:
            kind, default = list[str] | None, None
            option.metavar, option.show_default = metavar, False
        hint: Any = Annotated[kind, option]
        yield inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _panel_of(name: str, panels: Panels) -> str | None:
    """Returns the panel of a setting. None is the first panel."""
    if name in BASICS:
        return None
    return next((panel for panel, names in panels.items() if name in names), OTHER_PANEL)


def _position(name: str, unlisted: str, panels: Panels) -> int:
    """Returns the position of a parameter in `--help`. One that is not listed takes the position of `unlisted`."""
    order = [*BASICS, *(listed for names in panels.values() for listed in names), OTHER_PANEL]
    return order.index(name if name in order else unlisted)


def config_values(config_type: "type[DataclassInstance]", values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a configuration: the flags that are not None, else the environment's values.

    The environment's values are not defaults of the flags, because `--help` prints defaults and some are secrets.
    """
    names = {setting.name for setting in fields(config_type)}
    given = {name: value for name, value in values.items() if value is not None}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    environment = environment_defaults()
    if config_type is EngineConfig and flags.get("role", "both") == "both":
        environment.pop("handoff_secret", None)  # the secret is for prefill and decode workers only
    return {name: value for name, value in (environment | flags).items() if name in names}


def with_key_from_file(values: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Returns the flags' values with the API key from `file`, if it is given.

    Raises ConfigError if the file has no key or if --api-key is given too. Warns about --api-key, which every user of
    the machine can read in the list of processes.
    """
    if file is None:
        if values["api_key"]:
            print(
                "warning: other users of this machine can see --api-key in the list of processes; use --api-key-file "
                "or the environment variable HOTSET_API_KEY",
                file=sys.stderr,
            )
        return values
    if values["api_key"] is not None:
        raise ConfigError("--api-key and --api-key-file both give the API key; leave one of them out")
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigError(f"cannot read --api-key-file {file}: {reason}") from None
    if not key.isprintable() or not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise ConfigError(f"--api-key-file {file} must contain the API key on one line, and nothing else")
    return {**values, "api_key": key}


def check_output_file(flag: str, file: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raises ConfigError if the directory of a file does not exist, or if its name ends in none of the suffixes."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: the directory {file.absolute().parent} does not exist")
    if suffixes and file.suffix not in suffixes:
        raise ConfigError(f"{flag} {file}: the name must end in {' or '.join(suffixes)}")


def given_flags(words: Sequence[str], *config_types: "type[DataclassInstance]") -> dict[str, Any]:
    """Parses flags of the configurations, and returns those that were given, by the names of their fields.

    Raises ConfigError if the words are not flags with valid values.
    """

    def receive(**values: Any) -> None:
        pass

    parser = typer.Typer(add_completion=False, context_settings={"help_option_names": []})
    parser.command()(with_flags(*config_types)(receive))
    command: Any = typer.main.get_command(parser)
    context = command.make_context("", [], resilient_parsing=True)
    try:
        context = command.make_context("", list(words))
    except Exception as error:
        if getattr(error, "exit_code", None) != EXIT_USAGE:
            raise
        typed_words = [word.partition("=")[0] for word in words]
        raise ConfigError(_usage_message(error, typed_words, command, context)) from None
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name).name == "COMMANDLINE"
    }


class CliCommand(TyperCommand):
    """A command that answers a wrong command line in plain text, with the nearest existing flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _usage_errors_printed(self, ctx, args):
            return super().parse_args(ctx, args)


class CliGroup(TyperGroup):
    """A group of commands that answers a wrong command line in plain text, with the nearest flag or command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _usage_errors_printed(self, ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _usage_errors_printed(self, ctx, args):
            return super().resolve_command(ctx, args)


@contextmanager
def _usage_errors_printed(command: Any, ctx: Any, args: Sequence[str]) -> Iterator[None]:
    """Prints the error of a wrong command line in plain text, and exits with status 2.

    Typer would frame the error with rich, whose import takes a quarter of the time until the error appears. Typer
    bundles a copy of click, and not all versions export the classes of its errors, so they are found by name.
    """
    typed_words = [word.partition("=")[0] for word in args]  # parsing empties `args`
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", None) != EXIT_USAGE or type(error).__name__ in ("Exit", "NoArgsIsHelpError"):
            raise
        print("error:", _usage_message(error, typed_words, command, ctx), file=sys.stderr)
        print(f"{ctx.get_usage()}\nTry '{ctx.command_path} --help' for help.", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None


def _usage_message(error: Any, typed_words: Sequence[str], command: Any, ctx: Any) -> str:
    """Returns the message of click's error for a wrong command line, on one line."""
    message: str = error.format_message()
    if hasattr(error, "possibilities"):  # only the error for an unknown flag has this attribute
        message = _unknown_flag(error.option_name, typed_words, command, ctx)
    return " ".join(message.split())


def _unknown_flag(name: str, typed_words: Sequence[str], command: Any, ctx: Any) -> str:
    """Returns the message for a flag that does not exist, with the one flag that is nearest to it."""
    # click reads `-port` as `-p -o -r -t` and reports `-p`, so the typed word is looked up again.
    typed = name if name in typed_words else next((word for word in typed_words if word.startswith(name)), name)
    options = command.get_params(ctx)
    known = [flag for option in options for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")]
    match = nearest(typed, known)
    return f"No such option: {typed}" + (f"; did you mean {match}?" if match else "")
