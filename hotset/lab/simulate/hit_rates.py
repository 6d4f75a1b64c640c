"""Compares sizes and policies of hot buffers on one trace: tables, JSON and a picture."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotset.lab.bench.svg import Line, Panel, page
from hotset.lab.simulate.hot_buffer import SlotCounts, replay
from hotset.lab.simulate.policies import PolicyMaker
from hotset.lab.simulate.topk_trace import TopkTrace, TraceHeader

COLOURS = ("#1f5fa8", "#c0392b", "#2e8b57", "#8e5ba6", "#8a8a8a", "#d68910", "#123c6b")


@dataclass(frozen=True, slots=True)
class HitRates:
    """The counts of one policy and size, by layer."""

    policy: str
    slots: int
    layers: tuple[SlotCounts, ...]

    @property
    def total(self) -> SlotCounts:
        return sum(self.layers, SlotCounts())


def compare(
    trace: TopkTrace,
    sizes: Sequence[int],
    policies: dict[str, PolicyMaker],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[HitRates]:
    """Replays the trace with every policy and number of slots. `progress(done, total)` counts layers of requests."""
    header = trace.header
    done, total = 0, len(sizes) * len(policies) * header.layers * header.requests

    def on_layer() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return [
        HitRates(name, slots, tuple(replay(trace, slots, policy, on_layer)))
        for slots in sizes
        for name, policy in policies.items()
    ]


def to_json(header: TraceHeader, results: Sequence[HitRates]) -> dict[str, Any]:
    rows = [
        {
            "policy": result.policy,
            "slots": result.slots,
            "miss_rate": result.total.miss_rate,
            **asdict(result.total),
            "by_layer": [asdict(counts) | {"miss_rate": counts.miss_rate} for counts in result.layers],
        }
        for result in results
    ]
    return {"trace": asdict(header), "results": rows}


def print_rates(console: Console, header: TraceHeader, results: Sequence[HitRates]) -> None:
    """Prints the miss rate of every size and policy, and of every layer with the first policy."""
    policies = list(dict.fromkeys(result.policy for result in results))
    sizes = list(dict.fromkeys(result.slots for result in results))
    rates = {(result.policy, result.slots): result for result in results}
    console.print(f"[bold]{escape(header.model)}[/]: {describe(header)}", highlight=False)
    table = _table("Missing rows, % of those looked up in slots", ["slots", "of top-k", *policies])
    for slots in sizes:
        shares = (f"{rates[policy, slots].total.miss_rate:.1%}" for policy in policies)
        table.add_row(f"{slots:,}", f"{slots / header.k:g}x", *shares)
    console.print(table)
    if header.layers > 1:
        by_layer = _table(f"The same by layer, {policies[0]}", ["slots", *map(str, range(header.layers))])
        for slots in sizes:
            layers = rates[policies[0], slots].layers
            by_layer.add_row(f"{slots:,}", *(f"{counts.miss_rate:.1%}" for counts in layers))
        console.print(by_layer)


def describe(header: TraceHeader) -> str:
    longest = max(header.context_lengths) + header.steps - 1
    contexts = f"contexts of {min(header.context_lengths):,} to {longest:,} rows"
    return f"{header.requests} requests x {header.steps} steps, {header.layers} layers, top-k {header.k}, {contexts}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(escape(column), justify="right")
    return table


def picture(header: TraceHeader, results: Sequence[HitRates]) -> str:
    """Returns the miss rates by size, one line per policy, as SVG."""
    policies = list(dict.fromkeys(result.policy for result in results))
    sizes = list(dict.fromkeys(result.slots for result in results))
    lines = []
    for number, policy in enumerate(policies):
        rates = [100 * result.total.miss_rate for result in results if result.policy == policy]
        points = [(index + 1.0, rate) for index, rate in enumerate(rates)]
        lines.append(Line(points, COLOURS[number % len(COLOURS)], policy, dots=True))
    names = [f"{slots} ({slots / header.k:g}x)" for slots in sizes]
    panel = Panel("Missing rows", "slots", "% of lookups", lines, x_max=len(sizes) + 0.5, x_names=names, wide=True)
    return page(header.model, describe(header), [panel])
