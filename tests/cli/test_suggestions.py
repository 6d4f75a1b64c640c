"""The error for an unknown flag, command or keyword suggests the most similar one that exists, if one is similar
enough."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hotset import LLM
from hotset.base.errors import ConfigError
from hotset.cli import app

WIDE = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields `group` and all commands below it, each as a pair of the words that select the command and the command."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL_COMMANDS = dict(commands(typer.main.get_command(app)))


def usage_error(*arguments: str) -> str:
    """Returns the usage error for a command line, on one line."""
    result = CliRunner().invoke(app, list(arguments), env=WIDE)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    error, usage, hint = result.stderr.splitlines()
    assert error.startswith("error: ") and usage.startswith("Usage: ") and hint.endswith("--help' for help.")
    return " ".join((error, usage, hint))


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=lambda path: " ".join(path) or "hotset")
def test_every_command_suggests_the_nearest_flag_for_a_misspelt_one(path: tuple[str, ...]) -> None:
    flags = [name for option in ALL_COMMANDS[path].params for name in option.opts if name.startswith("--")]
    flag = max(flags, key=len, default="--help")
    assert f"No such option: {flag}x; did you mean {flag}?" in usage_error(*path, f"{flag}x")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["serve", "--tensor-paralel-size", "2"], "--tensor-paralel-size; did you mean --tensor-parallel-size?"),
        (["serve", "--max_model_len=9"], "--max_model_len; did you mean --max-model-len?"),
        (["serve", "--Port", "1"], "--Port; did you mean --port?"),
        (["serve", "-port", "1"], "-port; did you mean --port?"),
        (["serve", "model", "--kv-gib", "1"], "--kv-gib; did you mean --host-kv-gib?"),
        (["router", "--prefills", "http://a:1", "http://b:1"], "--prefills; did you mean --prefill?"),
        (["chat", "--max_tokens", "4"], "--max_tokens; did you mean --max-tokens?"),
    ],
)
def test_only_the_nearest_flag_is_suggested(arguments: list[str], answer: str) -> None:
    assert f"No such option: {answer}" in usage_error(*arguments)


def test_a_flag_unlike_any_other_gets_no_suggestion() -> None:
    for flag in ("--xyzzy", "-z"):
        answer = usage_error("info", flag)
        assert f"No such option: {flag}" in answer and "did you mean" not in answer


@pytest.mark.parametrize(
    ("typed", "suggested"), [(["serv"], "serve"), (["evaluate"], "eval"), (["eval", "retrieve"], "retrieval")]
)
def test_the_nearest_command_is_suggested(typed: list[str], suggested: str) -> None:
    answer = usage_error(*typed)
    assert f"No such command '{typed[-1]}'" in answer and f"Did you mean '{suggested}'?" in answer


def test_llm_suggests_the_nearest_keyword_for_a_misspelt_one() -> None:
    with pytest.raises(ConfigError, match="has no setting 'tensor_paralel_size'; did you mean 'tensor_parallel_size'"):
        LLM("embedded", tensor_paralel_size=2)
    with pytest.raises(ConfigError, match="has no setting 'max-model-len'; did you mean 'max_model_len'"):
        LLM("embedded", **{"max-model-len": 80})
    with pytest.raises(ConfigError, match="has no setting 'xyzzy'; the settings are model, tokenizer, device, "):
        LLM("embedded", xyzzy=1)
