"""`hotset doctor`: checks this machine for what an engine needs."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import MODEL_HELP
from hotset.base.errors import StartupError
from hotset.base.flags import EXIT_USAGE, ApiKeyFile, CliCommand, config_values, with_flags, with_key_from_file
from hotset.base.serve_config import ServeConfig
from hotset.base.status_line import StatusLine

if TYPE_CHECKING:
    from hotset.lab.doctor.findings import Subject


def add_doctor(app: typer.Typer) -> None:
    """Adds the command `doctor` to `app`."""
    app.command(
        "doctor",
        cls=CliCommand,
        epilog="Examples:\n\n"
        "[bold]hotset doctor[/bold]  checks this machine and all its GPUs\n\n"
        "[bold]hotset doctor /models/GLM-5.1 --gpus 0,1,2,3 --tensor-parallel-size 4[/bold]  checks what `hotset "
        "serve` with the same flags would use\n\n"
        "[bold]hotset doctor --json[/bold]  prints everything for a report",
    )(doctor)


@with_flags(EngineConfig, ServeConfig, without=("model",))
def doctor(
    model: Annotated[
        str | None, typer.Argument(help=f"{MODEL_HELP} Default: files of models are not checked.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as one JSON object.")] = False,
    api_key_file: ApiKeyFile = None,
    **values: Any,
) -> None:
    """Check this machine for what `hotset serve` with the same flags needs. Exits with 1 if something is broken."""
    from hotset.lab.doctor.checks import examine
    from hotset.lab.doctor.findings import worst
    from hotset.lab.doctor.report import WIDTH, print_results, to_json

    try:
        values = with_key_from_file(values, api_key_file) | ({} if model is None else {"model": model})
        subject = _subject(values, named=model is not None)
        with StatusLine("Checking") as line:
            results = examine(subject, line.show)
    except StartupError as error:  # 1 means that something is broken
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    if as_json:
        print(json.dumps(to_json(results), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        print_results(Console(width=None if sys.stdout.isatty() else WIDTH), results)
    if worst(finding for result in results for finding in result.findings) == "broken":
        raise typer.Exit(1)


def _subject(values: dict[str, Any], *, named: bool) -> "Subject":
    """Returns what the flags ask to check. Raises StartupError if they contradict each other, the model or the
    machine."""
    from hotset.engine.model_checks import check_gpu_flags, check_model
    from hotset.lab.doctor.findings import Subject
    from hotset.models.checkpoint.files import weight_files

    config = EngineConfig(**config_values(EngineConfig, values))
    weights: list[Any] = []
    if named:
        weights = weight_files(check_model(config).path) if config.load_format == "auto" else []
    else:
        check_gpu_flags(config)
    serve = ServeConfig(**config_values(ServeConfig, values))
    return Subject(config, serve, tuple(weights), ranks=config.workers)
