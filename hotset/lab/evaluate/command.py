"""`hotset eval`: measures how well a model answers. Prints a table and optionally writes JSON to a file."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.flags import (
    SERVER_ONLY_SETTINGS,
    CliCommand,
    CliGroup,
    check_output_file,
    config_values,
    with_flags,
)
from hotset.base.serve_config import ServeConfig
from hotset.base.settings import flag_name
from hotset.base.status_line import StatusLine, TaskProgress
from hotset.engine.local import open_llm
from hotset.lab.evaluate.tasks import MIN_LENGTH, TASKS

if TYPE_CHECKING:
    from hotset.lab.evaluate.retrieval import Backend, EvaluationPlan, EvaluationReport

app = typer.Typer(cls=CliGroup, no_args_is_help=True, help="Measure how well a model answers.")


@app.callback()
def evaluation() -> None:
    """Measure how well a model answers."""


@app.command(
    cls=CliCommand,
    epilog="Examples:\n\n[bold]hotset eval retrieval --model models/demo-dsa --lengths 1024,4096[/bold]\n\n"
    "[bold]hotset eval retrieval --url http://127.0.0.1:8000 --json accuracy.json[/bold]",
)
@with_flags(EngineConfig, without=("seed", *SERVER_ONLY_SETTINGS))
def retrieval(
    url: Annotated[
        str | None,
        typer.Option(
            help="Base URL of a running server to evaluate, like http://127.0.0.1:8000. Default: load --model here."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token for --url. Default: the environment variable HOTSET_API_KEY.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Context lengths to test, separated by commas: tokens of prompt and answer together.")
    ] = "1024,2048",
    tasks: Annotated[str, typer.Option(help="Tasks to test, separated by commas.")] = ",".join(TASKS),
    questions: Annotated[
        int, typer.Option(help="Number of questions per length, divided as evenly as possible among the tasks.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the questions; the same seed creates the same questions.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file, as JSON.")
    ] = None,
    **values: Any,
) -> None:
    """Ask for facts hidden in long texts, and count the correct answers."""
    from hotset.lab.evaluate.retrieval import EvaluationPlan

    plan = EvaluationPlan(_task_names(tasks), _token_counts(lengths), questions, seed)
    if questions < 1:
        raise ConfigError(f"--questions must be at least 1, got {questions}")
    check_output_file("--json", json_file)
    with _open_backend(values, url, config_values(ServeConfig, {"api_key": api_key}).get("api_key")) as backend:
        report = _evaluate(backend, plan)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    _print_table(report)


def _task_names(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise ConfigError(f"--tasks {text!r}: choose from {', '.join(TASKS)}")
    return names


def _token_counts(text: str) -> list[int]:
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--lengths {text!r}: expected whole numbers separated by commas, like 1024,2048") from error
    if min(numbers) < MIN_LENGTH:
        raise ConfigError(f"--lengths {text!r}: the minimum is {MIN_LENGTH} tokens")
    return numbers


@contextmanager
def _open_backend(values: dict[str, Any], url: str | None, api_key: str | None) -> "Iterator[Backend]":
    from hotset.lab.evaluate.retrieval import LocalBackend, ServerBackend

    if url is not None:
        ignored = [
            f"--{flag_name(setting.name)}"
            for setting in fields(EngineConfig)
            if values.get(setting.name, setting.default) != setting.default
        ]
        if ignored:
            raise ConfigError(
                f"--url evaluates a running server, where {', '.join(ignored)} has no effect; leave it out"
            )
        with closing(ServerBackend(url, api_key)) as server:
            yield server
        return
    with open_llm(values) as llm:
        yield LocalBackend(llm)


def _evaluate(backend: "Backend", plan: "EvaluationPlan") -> "EvaluationReport":
    from hotset.lab.evaluate.retrieval import evaluate

    title, total = f"Asking {backend.name}", plan.questions * len(plan.lengths)
    asked = 0
    with StatusLine(title) as status:

        def on_answers(count: int) -> None:
            nonlocal asked
            asked += count
            status.show(TaskProgress(title, asked, total))

        return evaluate(backend, plan, on_answers)


def _print_table(report: "EvaluationReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from hotset.lab.evaluate.retrieval import bucket_names

    table = Table(title=f"Retrieval accuracy of {report.model} by depth (0 is the oldest text)")
    table.add_column("task")
    for heading in ("length", "asked", "accuracy", *bucket_names()):
        table.add_column(heading, justify="right")
    for task, length in report.cells():
        score = report.score(task, length)
        by_depth = [_format_accuracy(report.score(task, length, n).accuracy) for n in range(len(bucket_names()))]
        table.add_row(task, str(length), str(score.asked), _format_accuracy(score.accuracy), *by_depth)
    total = report.score()
    table.add_section()
    table.add_row("all", "", str(total.asked), _format_accuracy(total.accuracy))
    Console().print(table)


def _format_accuracy(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.3f}"
