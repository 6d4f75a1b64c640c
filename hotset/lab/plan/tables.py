"""Prints a plan as tables, and draws it: requests at once and tokens per second by context length."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotset.base.units import GIB, MIB, show_bytes
from hotset.lab.bench.svg import Line, Panel, page
from hotset.lab.plan.gpus import Machine
from hotset.lab.plan.planner import Decode, Plan, SplitPlan
from hotset.lab.plan.roles import best_roles

BLUE, GREY = "#1f5fa8", "#8a8a8a"
COLUMNS = ("context", "tiers", "requests", "tiered", "missed", "swap", "bus", "ms/token", "tokens/s", "prompt s")
LEGEND = (
    "requests: as many as fit at once; missed: rows that each GPU copies from the host per step; swap: their MiB; bus: "
    "share of its bandwidth; prompt s: time of one such prompt alone"
)


def print_plan(console: Console, plan: Plan) -> None:
    """Prints the machine, all splits, the best split by context length, splits for each role, and the flags to use."""
    console.print(f"[bold]{escape(plan.model)}[/] on {describe(plan.machine)}", highlight=False)
    console.print(f"one token takes {show_bytes(plan.token_bytes)} of KV", style="dim", highlight=False)
    if len(plan.splits) > 1:
        console.print(_splits_table(plan))
    if plan.best is None:
        console.print(f"[red]nothing fits[/]: {escape(plan.splits[0].reason or '')}", highlight=False)
        return
    name = f"[bold]{plan.best.name}[/]" if plan.machine.gpu is not None else "[bold]CPU[/]"
    sizes = f"weights {show_bytes(plan.best.weight_bytes)}, KV {show_bytes(plan.best.kv_bytes)}"
    per_gpu = " on each GPU" if plan.machine.gpus > 1 else ""
    console.print(f"\n{name}: {sizes}{per_gpu}, {show_bytes(plan.best.host_kv_bytes)} of host memory", highlight=False)
    console.print(_contexts_table(plan, plan.best))
    if plan.machine.gpu is not None:
        console.print(LEGEND, style="dim", highlight=False)
    else:
        console.print("the cost model predicts tokens/s of GPUs only", style="dim", highlight=False)
    if (roles := best_roles(plan)) is not None:
        console.print("\nEngines for one role each")
        for sentence in roles.sentences:
            console.print(sentence, highlight=False)
    console.print(f"\nhotset serve {escape(' '.join([plan.model, *plan.flags()]))}", highlight=False, soft_wrap=True)


def describe(machine: Machine) -> str:
    host = f"{machine.host_bytes / GIB:.0f} GiB of free host memory"
    if machine.gpu is None:
        return f"CPUs with {host}"
    gpu = machine.gpu
    return f"{machine.gpus} x {gpu.name} ({gpu.memory_gib:g} GiB, {gpu.tb_per_s:g} TB/s), {host}"


def _splits_table(plan: Plan) -> Table:
    longest = plan.contexts[-1]
    table = Table(
        title=f"Splits, with contexts of {longest:,}; best for {plan.goal} first",
        title_justify="left",
        box=None,
        header_style="dim",
        padding=(0, 1, 0, 0),
    )
    table.add_column("split")
    for column in ("weights/GPU", "KV/GPU", "tiers off", "on", "ms/token", "tokens/s", "prompt s"):
        table.add_column(column, justify="right")
    for split in plan.splits:
        if split.reason is not None:
            table.add_row(split.name, f"does not fit: {_short(split.reason)}", style="dim")
            continue
        best = split.best(-1)
        table.add_row(
            split.name,
            show_bytes(split.weight_bytes),
            show_bytes(split.kv_bytes),
            f"{split.tiers_off[-1].requests:,}",
            f"{split.tiers_on[-1].requests:,}",
            _number(best.step_ms, 1),
            _number(best.tokens_per_s),
            _number(best.prompt_s, 1),
        )
    return table


def _contexts_table(plan: Plan, split: SplitPlan) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for off, on in zip(split.tiers_off, split.tiers_on, strict=True):
        for tiers, decode in (("off", off), ("on", on)):
            table.add_row(*_decode_cells(tiers, decode))
    return table


def _decode_cells(tiers: str, decode: Decode) -> list[str]:
    share = decode.bus_share
    return [
        f"{decode.context:,}",
        tiers,
        f"{decode.requests:,}",
        f"{decode.tiered:,}" if decode.tiered else "",
        f"{decode.missed_rows / 1e3:,.0f}k" if decode.missed_rows else "",
        f"{decode.swap_bytes / MIB:,.0f}M" if decode.swap_bytes else "",
        f"{share:.0%}" if share else "",
        _number(decode.step_ms, 1),
        _number(decode.tokens_per_s),
        _number(decode.prompt_s, 1),
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _short(reason: str) -> str:
    return reason if len(reason) <= 90 else reason[:87] + "..."


def picture(plan: Plan) -> str:
    """Returns the picture of the best split as SVG. If nothing fits, the picture has no lines."""
    names = [f"{context // 1024}k" if context % 1024 == 0 else str(context) for context in plan.contexts]
    panels = []
    for title, field in (("Requests at once", "requests"), ("Tokens per second", "tokens_per_s")):
        lines = []
        for name, colour, decodes in (
            ("tiers off", GREY, plan.best.tiers_off if plan.best else ()),
            ("with tiers", BLUE, plan.best.tiers_on if plan.best else ()),
        ):
            values = [float(getattr(decode, field) or 0.0) for decode in decodes]
            points = [(index + 1.0, value) for index, value in enumerate(values)]
            lines.append(Line(points, colour, name, dots=True, labels=[f"{value:,.0f}" for value in values]))
        panels.append(Panel(title, "context length", title.lower(), lines, x_max=len(names) + 0.5, x_names=names))
    subtitle = f"{describe(plan.machine)} · {plan.best.name if plan.best else 'nothing fits'}"
    return page(plan.model, subtitle, panels)
