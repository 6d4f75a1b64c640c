"""`hotset bench`: measures a running server over HTTP, prints tables, and optionally writes JSON and a picture."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.base.descriptors import raise_descriptor_limit
from hotset.base.errors import MissingDependency
from hotset.base.flags import (
    EXIT_INTERRUPTED,
    PICTURE_SUFFIXES,
    ApiKeyFile,
    CliCommand,
    check_output_file,
    config_values,
    with_flags,
    with_key_from_file,
)
from hotset.base.logs import log_to_stderr
from hotset.base.status_line import StatusLine, TaskProgress
from hotset.lab.bench.config import BenchConfig

if TYPE_CHECKING:
    from rich.console import Console

    from hotset.lab.bench.benchmark import BenchReport
    from hotset.lab.bench.runner import Tally

DEFAULT_URL = "http://127.0.0.1:8000"
BENCH_PANELS = {
    "Load": ("concurrency", "rate", "burstiness", "num_requests", "duration", "warmup", "request_timeout"),
    "Requests": (
        "endpoint",
        "prompt_format",
        "input_tokens",
        "output_tokens",
        "prefix_tokens",
        "dataset",
        "trace",
        "trace_speed",
        "scale_lengths",
        "temperature",
        "extra_body",
        "seed",
    ),
    "Results": ("slo", "json_file", "plot_file"),
}


def add_bench(app: typer.Typer) -> None:
    """Adds the command `bench` to `app`."""
    app.command(
        "bench",
        cls=CliCommand,
        epilog="Examples:\n\n"
        "[bold]hotset bench[/bold]  measures the server at http://127.0.0.1:8000 with 4 requests at a time\n\n"
        "[bold]hotset bench --concurrency 1,4,16 --input-tokens 1024 --plot sweep.svg[/bold]  compares three loads\n\n"
        "[bold]hotset bench http://gpu:8000 --rate 2 --duration 60 --slo ttft:500,tpot:50[/bold]  sends two requests "
        "per second for a minute, and counts those that are fast enough\n\n"
        "[bold]hotset bench --trace trace.jsonl --scale-lengths 0.1 --json result.json[/bold]  replays a trace",
    )(bench)


@with_flags(BenchConfig, panels=BENCH_PANELS)
def bench(
    url: Annotated[
        str, typer.Argument(help="URL of any OpenAI-compatible server: Hotset, vLLM, SGLang.")
    ] = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write settings, figures and every request to this file, as JSON.",
            rich_help_panel="Results",
        ),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw the results to this file: .svg, or .html for a browser.", rich_help_panel="Results"
        ),
    ] = None,
    **values: Any,
) -> None:
    """Measure throughput and latency of a running server."""
    values = with_key_from_file(values, api_key_file)
    config = BenchConfig(**config_values(BenchConfig, values))
    check_output_file("--json", json_file)
    check_output_file("--plot", plot_file, PICTURE_SUFFIXES)
    import asyncio  # at the top of the file, it would slow down all other commands

    try:
        from hotset.lab.bench import plot, tables
        from hotset.lab.bench.svg import write_picture
    except ModuleNotFoundError as error:
        if error.name not in ("aiohttp", "yarl"):
            raise
        raise MissingDependency(f'hotset bench needs {error.name}; run: pip install "hotset[serve]"') from error
    from rich.console import Console

    log_to_stderr("%(message)s")
    raise_descriptor_limit()
    console = Console()
    report = asyncio.run(_run(url, config, console))
    if len(report.results) > 1:
        tables.print_sweep(console, report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json()) + "\n")
    if plot_file is not None:
        write_picture(plot.picture(report), report.server.model, plot_file)
    console.print(f"seed {report.seed}", style="dim", highlight=False)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(result.completed for result in report.results):
        raise typer.Exit(1)


async def _run(url: str, config: BenchConfig, console: "Console") -> "BenchReport":
    """Runs the benchmark. The first Ctrl-C ends it and keeps the results so far; the second one ends the program."""
    import asyncio

    from hotset.lab.bench.benchmark import Benchmark
    from hotset.lab.bench.results import summarize
    from hotset.lab.bench.tables import print_load

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    def on_result(report: "BenchReport") -> None:
        display.end()
        result = report.results[-1]
        print_load(console, result.load, summarize(result, config.objectives))

    display = _Display()
    async with Benchmark(url, config, stop, display.update, on_result) as benchmark:
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await benchmark.run()
        finally:
            display.end()
            loop.remove_signal_handler(signal.SIGINT)


class _Display:
    """Shows the progress of each load."""

    def __init__(self) -> None:
        self._line: StatusLine | None = None

    def update(self, tally: "Tally") -> None:
        if self._line is None:
            self._line = StatusLine(tally.load.label)
            self._line.__enter__()
        finished = tally.completed + tally.failed
        rate = tally.output_tokens / tally.seconds if tally.seconds else 0.0
        details = f"{tally.running} running, {tally.failed} failed, {rate:.1f} output tokens/s"
        if tally.total is None:
            details = f"{finished} requests, {details}"
        self._line.show(TaskProgress(tally.load.label, finished, tally.total, details=details))

    def end(self) -> None:
        """Erases the line. The next update begins a new one."""
        if self._line is not None:
            self._line.__exit__(None, None, None)
            self._line = None
