"""How settings are declared and checked. The command line derives its flags from the declarations."""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin

from hotset.base.errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int | None = None,
    positive: bool = False,
    handoff_only: bool = False,
    metavar: str | None = None,
) -> Any:
    """Declares a field with the help text of its flag and the values that `check_settings` accepts.

    A Literal needs no `choices`. `positive` means a finite number above 0. `handoff_only` marks a setting that only
    prefill and decode workers have. `metavar` marks a setting that takes several texts, and stands for one of
    them in the help.
    """
    rules = {"choices": choices, "minimum": minimum, "maximum": maximum, "positive": positive}
    return field(default=default, metadata={"help": help, "handoff_only": handoff_only, "metavar": metavar, **rules})


def check_settings(config: Any) -> None:
    """Raises ConfigError for the first field whose value breaks the rules of its declaration."""
    for declared in fields(config):
        value, rules, flag = getattr(config, declared.name), declared.metadata, flag_name(declared.name)
        if value is None and declared.default is None:
            continue
        choices = rules["choices"] or _literal_values(declared.type)
        if choices and value not in choices:
            listed = ", ".join(map(repr, choices))
            raise ConfigError(f"--{flag} must be one of {listed}, got {value!r}")
        if rules["maximum"] is not None and not rules["minimum"] <= value <= rules["maximum"]:
            raise ConfigError(f"--{flag} must lie in [{rules['minimum']}, {rules['maximum']}], got {value}")
        if rules["minimum"] is not None and not value >= rules["minimum"]:
            raise ConfigError(f"--{flag} must be at least {rules['minimum']}, got {value}")
        if rules["positive"] and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag} must be a finite number above 0, got {value}")


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    """Returns the values of a Literal, which may be a member of a union."""
    literals = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
    return tuple(value for literal in literals for value in get_args(literal))


def flag_name(field_name: str) -> str:
    """Returns the flag of a field, without its dashes: `device_kv_gib -> device-kv-gib`."""
    return field_name.replace("_", "-")


def flag_words(field_name: str, value: Any) -> tuple[str, ...]:
    """Returns the words of a command line that set a field: `seed, 3 -> --seed 3`, `page, False -> --no-page`."""
    if isinstance(value, bool):
        return (f"--{'' if value else 'no-'}{flag_name(field_name)}",)
    return (f"--{flag_name(field_name)}", str(value))


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to the misspelt name `unknown`, or None if no name is similar."""
    plain = {name.replace("_", "-").lower(): name for name in known}
    matches = difflib.get_close_matches(unknown.replace("_", "-").lower(), plain, n=1)
    return plain[matches[0]] if matches else None


def check_setting_names(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError if a name is not in `known`. The message suggests the most similar known name."""
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return
    match = nearest(unknown, known)
    advice = f"did you mean {match!r}?" if match else f"the settings are {', '.join(known)}"
    raise ConfigError(f"{owner} has no setting {unknown!r}; {advice}")
