"""`hotset record` and `hotset simulate`: records selections, and replays them against other hot buffers."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hotset.base.errors import ConfigError
from hotset.base.status_line import StatusLine, show_counts
from hotset.cli.flags import CliCommand

SIZES = (1, 2, 4, 8)  # hot slots, in multiples of the top-k
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the results to this file: .svg, or .html for a browser.")
]


def add_simulate(app: typer.Typer) -> None:
    """Adds the commands `record` and `simulate` to `app`."""
    app.command(
        "record",
        cls=CliCommand,
        epilog="Example:\n\n"
        "[bold]hotset record models/demo-dsa --out demo.topk --requests 4 --steps 128 --shortest 1024 --longest 2048"
        "[/bold]  takes a few minutes on a CPU",
    )(record)
    app.command(
        "simulate",
        cls=CliCommand,
        epilog="Examples:\n\n"
        "[bold]hotset simulate data/topk/demo-dsa.topk[/bold]  compares all policies with 1, 2, 4 and 8 times top-k "
        "slots\n\n"
        "[bold]hotset simulate demo.topk --policy lru --policy mine.py --slots 256,384[/bold]  tries a policy of your "
        "own: mine.py defines victims(rows, count)",
    )(simulate)


def record(
    model: Annotated[str, typer.Argument(help="Directory or name of a sparse-attention model.")],
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    device: Annotated[
        str | None, typer.Option(help="'cpu', 'cuda' or 'cuda:N'. Default: the GPU if there is one.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests, which decode at the same time.")] = 8,
    steps: Annotated[
        int, typer.Option(help="Steps of each request: that of the last token of its prompt, then decode steps.")
    ] = 512,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt with its answer.")] = 4608,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt with its answer.")] = 8192,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of questions and sampling.")] = 0,
) -> None:
    """Record which rows a sparse-attention model selects, for `hotset simulate`."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.absolute().parent} does not exist")
    from hotset.simulate.recorder import RecordConfig
    from hotset.simulate.recorder import record as record_trace
    from hotset.simulate.topk_trace import write_trace

    config = RecordConfig(requests, steps, shortest, longest, temperature, seed)
    command = {"command": shlex.join(["hotset", *sys.argv[1:]])}
    with StatusLine("Recording") as line:
        trace = record_trace(model, device, config, command, show_counts(line.show, "Recording tokens"))
    write_trace(out, trace)
    print(f"{out}: {trace.header.shape} selections in {out.stat().st_size:,} bytes")


def simulate(
    trace: Annotated[Path, typer.Argument(help="Trace of selections, written by hotset record.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy of the hot buffers: lru, fifo, clock, lfu, belady, or a Python file that defines "
            "victims(rows, count). Can be given several times. Default: all but files."
        ),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Slots of a hot buffer, like 256,512. Default: 1, 2, 4 and 8 times the top-k.")
    ] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded selections against hot buffers of other sizes and policies."""
    from hotset.plan.plot import check_plot_file, write_picture
    from hotset.simulate.hit_rates import compare, picture, print_rates, to_json
    from hotset.simulate.policies import POLICIES, find_policy
    from hotset.simulate.topk_trace import read_trace

    if plot is not None:
        check_plot_file(plot)
    policies = {name: find_policy(name) for name in policy or POLICIES}
    read = read_trace(trace)
    sizes = parse_slots(slots) or tuple(size * read.header.k for size in SIZES)
    with StatusLine("Replaying") as line:
        results = compare(read, sizes, policies, show_counts(line.show, "Replaying layers"))
    if plot is not None:
        write_picture(picture(read.header, results), read.header.model, plot)
    if as_json:
        print(json.dumps(to_json(read.header, results), indent=2))
    else:
        from rich.console import Console

        print_rates(Console(), read.header, results)


def parse_slots(text: str | None) -> tuple[int, ...]:
    try:
        sizes = () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise ConfigError(f"--slots must be numbers of slots, like 256,512, got {text!r}")
    return sizes
