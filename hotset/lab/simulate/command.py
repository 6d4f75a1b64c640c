"""`hotset record` and `hotset simulate`: records selections, replays them, and simulates traffic."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.flags import PICTURE_SUFFIXES, CliCommand, check_output_file, config_values, with_flags
from hotset.base.status_line import StatusLine, show_counts
from hotset.lab.plan.command import (
    PLANNED_SETTINGS,
    BusBandwidth,
    GpuBandwidth,
    GpuCount,
    GpuGib,
    GpuName,
    HostGib,
    ThisMachine,
    find_machine,
)

NOT_SIMULATED = tuple(
    name for name in EngineConfig.__dataclass_fields__ if name not in (*PLANNED_SETTINGS, "tiers", "prefix_cache")
)
TRAFFIC = "Traffic: a trace of requests"
SELECTIONS = "Hot buffers: a trace of selections"
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
        "[bold]hotset simulate data/topk/demo-dsa.topk[/bold]  compares lru and belady with 1, 2, 4 and 8 times top-k "
        "slots\n\n"
        "[bold]hotset simulate demo.topk --policy lru --policy mine.py --slots 256,384[/bold]  tries a policy of your "
        "own: mine.py defines victims(rows, count)\n\n"
        "[bold]hotset simulate trace.jsonl --model glm-5.2 --gpu h200 --gpus 8 --host-gib 2048[/bold]  runs the "
        "requests of a trace through the real scheduler, in simulated time",
    )(simulate)


def record(
    model: Annotated[str, typer.Argument(help="Directory or name of a sparse-attention model.")],
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    device: Annotated[
        str | None, typer.Option(help="'cpu', 'cuda' or 'cuda:N'. Default: the GPU if there is one.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests, which decode at the same time.")] = 8,
    steps: Annotated[
        int, typer.Option(help="Steps of each request: the step of its prompt's last token, then decode steps.")
    ] = 512,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt with its answer.")] = 4608,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt with its answer.")] = 8192,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of questions and sampling.")] = 0,
) -> None:
    """Record which rows a sparse-attention model selects, for `hotset simulate`."""
    check_output_file("--out", out)
    from hotset.lab.simulate.recorder import RecordConfig
    from hotset.lab.simulate.recorder import record as record_trace
    from hotset.lab.simulate.topk_trace import write_trace

    config = RecordConfig(requests, steps, shortest, longest, temperature, seed)
    command = {"command": shlex.join(["hotset", *sys.argv[1:]])}
    with StatusLine("Recording") as line:
        trace = record_trace(model, device, config, command, show_counts(line.show, "Recording tokens"))
    write_trace(out, trace)
    print(f"{out}: {trace.header.shape} selections in {out.stat().st_size:,} bytes")


@with_flags(EngineConfig, without=NOT_SIMULATED)
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            help="Trace of selections, written by hotset record, or of requests: one JSON object per line with "
            "timestamp (ms), input_length, output_length and optionally hash_ids, as Mooncake publishes them."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy of the hot buffers: lru, as in the engine; belady, the best possible one; or a Python file "
            "that defines victims(rows, count). Can be given several times. Default: lru and belady.",
            rich_help_panel=SELECTIONS,
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            help="Slots of a hot buffer, like 256,512. Default: 1, 2, 4 and 8 times the top-k.",
            rich_help_panel=SELECTIONS,
        ),
    ] = None,
    simulated_model: Annotated[
        str | None,
        typer.Option("--model", help="Model, as for hotset plan. Required.", rich_help_panel=TRAFFIC),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Use this many requests. Default: all.", min=1, rich_help_panel=TRAFFIC)
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(help="Let requests arrive this many times as fast.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    scale_lengths: Annotated[
        float, typer.Option(help="Multiply the lengths of prompts and answers by this.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Time of a step in ms, instead of the cost model's. Required without a GPU.", rich_help_panel=TRAFFIC
        ),
    ] = None,
    prompt_token_ms: Annotated[
        float, typer.Option(help="With --step-ms: additional ms for each prompt token.", rich_help_panel=TRAFFIC)
    ] = 0.0,
    decode_token_ms: Annotated[
        float, typer.Option(help="With --step-ms: additional ms for each decoding request.", rich_help_panel=TRAFFIC)
    ] = 0.0,
    gpu: GpuName = None,
    gpus: GpuCount = None,
    host_gib: HostGib = None,
    this_machine: ThisMachine = False,
    gpu_gib: GpuGib = None,
    gpu_tb_per_s: GpuBandwidth = None,
    bus_gb_per_s: BusBandwidth = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Replay selections against other hot buffers, or run requests through the scheduler in simulated time."""
    check_output_file("--plot", plot, PICTURE_SUFFIXES)
    if not _holds_requests(trace):
        if simulated_model is not None:
            raise ConfigError(f"--model is for a trace of requests, but {trace} does not begin like one")
        _replay_selections(trace, policy, slots, plot, as_json)
        return
    if policy or slots:
        raise ConfigError(f"--policy and --slots are for a trace of selections, but {trace} is one of requests")
    if simulated_model is None:
        raise ConfigError("--model is required for a trace of requests, like --model glm-5.2")
    for flag, value in (("--trace-speed", trace_speed), ("--scale-lengths", scale_lengths), ("--step-ms", step_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be a finite number above 0, got {value}")
    from hotset.lab.bench.svg import write_picture
    from hotset.lab.bench.workload import read_trace
    from hotset.lab.plan.model_configs import find_config
    from hotset.lab.plan.pipeline import SimulatedClock
    from hotset.lab.plan.planner import rank_costs
    from hotset.lab.simulate.prompts import arrivals
    from hotset.lab.simulate.step_clock import FixedCosts, GpuCosts, StepCost
    from hotset.lab.simulate.traffic import planned_split, run_traffic, simulated_engine
    from hotset.lab.simulate.traffic_report import picture, print_traffic

    machine = find_machine(gpu, gpus, host_gib, this_machine, gpu_gib, gpu_tb_per_s, bus_gb_per_s)
    if machine.gpu is None and step_ms is None:
        raise ConfigError("the cost model knows GPUs only; name one with --gpu, or give the time of a step: --step-ms")
    config = EngineConfig(**config_values(EngineConfig, values))
    files = find_config(simulated_model, config.weight_dtype)
    entries = read_trace(trace, trace_speed, scale_lengths)[:num_requests]
    capacity = planned_split(simulated_model, files, machine, config)
    cost: StepCost = FixedCosts((step_ms or 0.0) / 1e3, prompt_token_ms / 1e3, decode_token_ms / 1e3)
    if step_ms is None:
        cost = GpuCosts(rank_costs(capacity, files, machine))
    clock = SimulatedClock()
    engine = simulated_engine(capacity, files, machine.gpu is not None, clock, cost)
    with StatusLine("Simulating") as line:
        requests = arrivals(entries, scale_lengths, files.spec.vocab)
        result = run_traffic(engine, clock, requests, show_counts(line.show, "Simulating requests"))
    if plot is not None:
        write_picture(picture(simulated_model, trace.name, result), simulated_model, plot)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        from rich.console import Console

        print_traffic(Console(), result)


def _holds_requests(trace: Path) -> bool:
    """Returns whether the file begins like JSON lines. A file that cannot be read counts as a trace of selections."""
    try:
        with trace.open("rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError:
        return False


def _replay_selections(
    trace: Path, policy: list[str] | None, slots: str | None, plot: Path | None, as_json: bool
) -> None:
    from hotset.lab.bench.svg import write_picture
    from hotset.lab.simulate.hit_rates import compare, picture, print_rates, to_json
    from hotset.lab.simulate.policies import POLICIES, find_policy
    from hotset.lab.simulate.topk_trace import read_trace

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
