"""`hotset plan`: predicts memory, requests at once and tokens per second of a model on a machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.flags import PICTURE_SUFFIXES, CliCommand, check_output_file, config_values, with_flags

if TYPE_CHECKING:
    from hotset.lab.plan.gpus import Machine

# The settings of the engine on which memory and speed depend. `hotset plan` predicts both with and without tiers.
PLANNED_SETTINGS = (
    *("max_model_len", "dtype", "weight_dtype", "pack_weights"),
    *("gpu_memory_utilization", "device_kv_gib", "device_kv_tokens", "host_kv_gib", "host_kv_tokens"),
    *("hot_slots", "kv_dtype", "index_dtype", "page_rows", "max_num_seqs", "max_num_batched_tokens", "cuda_graphs"),
    *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers", "data_parallel_size"),
)
OTHER_SETTINGS = tuple(name for name in EngineConfig.__dataclass_fields__ if name not in PLANNED_SETTINGS)
MACHINE = "Machine"
GpuName = Annotated[
    str | None,
    typer.Option(help="Type of the GPUs, like h200. Default: this machine's.", rich_help_panel=MACHINE),
]
GpuCount = Annotated[
    int | None,
    typer.Option("--gpus", help="Number of GPUs. Default: 1, or all of this machine.", min=1, rich_help_panel=MACHINE),
]
HostGib = Annotated[
    float | None,
    typer.Option(help="Free host memory in GiB. Default: this machine's.", rich_help_panel=MACHINE),
]
ThisMachine = Annotated[
    bool, typer.Option("--this-machine", help="Plan for this machine, the default.", rich_help_panel=MACHINE)
]
GpuGib = Annotated[
    float | None,
    typer.Option(help="Memory of one GPU in GiB. Required if the type is not known.", rich_help_panel=MACHINE),
]
GpuBandwidth = Annotated[
    float | None,
    typer.Option(
        "--gpu-tb-per-s",
        help="Bandwidth of a GPU's memory in TB/s. Required if the type is not known.",
        rich_help_panel=MACHINE,
    ),
]
BusBandwidth = Annotated[
    float | None,
    typer.Option(
        "--bus-gb-per-s", help="Bandwidth from the host to one GPU in GB/s. Default: by type.", rich_help_panel=MACHINE
    ),
]


def add_plan(app: typer.Typer) -> None:
    """Adds the command `plan` to `app`."""
    app.command(
        "plan",
        cls=CliCommand,
        epilog="Examples:\n\n"
        "[bold]hotset plan deepseek-v3.2 --gpu h200 --gpus 8 --host-gib 2048[/bold]  compares all "
        "splits over 8 GPUs\n\n"
        "[bold]hotset plan /models/GLM-5.1/config.json --gpu h200 --gpus 8 --host-gib 1024 --contexts 65536 --goal "
        "latency[/bold]  needs only the configuration, no weights\n\n"
        "[bold]hotset plan qwen3-8b --gpu mygpu --gpu-gib 48 --gpu-tb-per-s 1.2 --host-gib 128[/bold]  plans for a GPU "
        "that Hotset does not know\n\n"
        "[bold]hotset plan models/demo-dsa --this-machine --json[/bold]  prints everything as JSON",
    )(plan)


@with_flags(EngineConfig, without=OTHER_SETTINGS)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="config.json, a model directory, or one of the shipped examples: deepseek-v3.2, glm-5.2, qwen3-8b, "
            "llama-3.1-8b, llama-3.3-70b."
        ),
    ],
    gpu: GpuName = None,
    gpus: GpuCount = None,
    host_gib: HostGib = None,
    this_machine: ThisMachine = False,
    gpu_gib: GpuGib = None,
    gpu_tb_per_s: GpuBandwidth = None,
    bus_gb_per_s: BusBandwidth = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Context lengths in tokens, like 8192,65536. Default: 8192,32768,131072 if they fit."),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            help="What the best split should have: the highest 'throughput', the lowest 'latency' between tokens, or "
            "the most 'requests' at once, at the longest context."
        ),
    ] = "throughput",
    plot: Annotated[Path | None, typer.Option(help="Draw the plan to this file: .svg, or .html for a browser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
    **values: Any,
) -> None:
    """Predict requests at once and tokens per second of a model on a machine, before buying or starting it."""
    from hotset.lab.bench.svg import write_picture
    from hotset.lab.plan.model_configs import find_config
    from hotset.lab.plan.planner import GOALS, make_plan
    from hotset.lab.plan.roles import best_roles
    from hotset.lab.plan.tables import picture, print_plan

    if goal not in GOALS:
        raise ConfigError(f"--goal must be one of {', '.join(GOALS)}, got {goal!r}")
    check_output_file("--plot", plot, PICTURE_SUFFIXES)
    config = EngineConfig(**config_values(EngineConfig, values))
    files = find_config(model, config.weight_dtype)
    machine = find_machine(gpu, gpus, host_gib, this_machine, gpu_gib, gpu_tb_per_s, bus_gb_per_s)
    made = make_plan(model, files, machine, config, parse_contexts(contexts), goal)
    if plot is not None:
        write_picture(picture(made), model, plot)
    if as_json:
        roles = best_roles(made)
        names = {} if roles is None else {"prefill": roles.prefill.name, "decode": roles.decode.name}
        print(json.dumps(made.to_json() | {"roles": names}, indent=2))
    else:
        from rich.console import Console

        print_plan(Console(), made)
    if made.best is None:
        raise typer.Exit(1)


def find_machine(
    gpu: str | None,
    gpus: int | None,
    host_gib: float | None,
    this_machine: bool,
    gpu_gib: float | None,
    gpu_tb_per_s: float | None,
    bus_gb_per_s: float | None,
) -> "Machine":
    """Returns the machine that the flags describe. Raises ConfigError if they contradict each other."""
    from dataclasses import replace

    from hotset.base.host_memory import host_memory
    from hotset.base.units import GIB
    from hotset.lab.plan.gpus import Machine, find_gpu
    from hotset.lab.plan.gpus import this_machine as inspect_machine

    if host_gib is not None and not 0 < host_gib < float("inf"):
        raise ConfigError(f"--host-gib must be a finite number above 0, got {host_gib}")
    if this_machine and gpu is not None:
        raise ConfigError("--this-machine and --gpu both name a machine; leave one of them out")
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    if gpu is None and gpu_gib is not None:
        gpu = "gpu"
    if gpu is not None:
        found = find_gpu(gpu, gpu_gib, gpu_tb_per_s, bus_gb_per_s)
        return Machine(host_memory().free if host_bytes is None else host_bytes, found, gpus or 1)
    machine = inspect_machine(gpus, gpu_tb_per_s, bus_gb_per_s)
    if machine.gpu is None and gpus is not None:
        raise ConfigError("--gpus: this machine has no GPU; name its type with --gpu, like --gpu h200")
    return machine if host_bytes is None else replace(machine, host_bytes=host_bytes)


def parse_contexts(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--contexts must be numbers of tokens, like 8192,65536, got {text!r}") from None
