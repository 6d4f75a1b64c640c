"""Prints and draws simulated traffic."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hotset.lab.bench.results import percentile
from hotset.lab.bench.svg import Line, Panel, page
from hotset.lab.simulate.traffic import TrafficResult

BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d68910", "#8a8a8a", "#c0392b"


def print_traffic(console: Console, result: TrafficResult) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    refused = f", {result.refused} too long" if result.refused else ""
    table.add_row("requests", f"{result.requests:,}{refused}")
    table.add_row("simulated time", f"{result.seconds:,.1f} s, {result.steps:,} steps")
    table.add_row("requests at once", f"{result.mean_running:.1f} on average, at most {result.max_running:,}")
    table.add_row("tiered, parked", f"at most {result.max_tiered:,} tiered at once; {result.parks:,} parks")
    table.add_row("waiting", f"{result.mean_waiting:.1f} requests on average")
    table.add_row("first token after", _quantiles(result.first_token_s, 1.0, "s"))
    table.add_row("time between tokens", _quantiles(result.token_s, 1e3, "ms"))
    table.add_row("output tokens/s", f"{result.tokens_per_s:,.1f}")
    table.add_row("prompts from the cache", f"{result.reused:.1%} of their tokens")
    console.print(table, highlight=False)


def _quantiles(ordered: Sequence[float], factor: float, unit: str) -> str:
    if not ordered:
        return ""
    middle, high = (percentile(ordered, share) * factor for share in (50, 99))
    mean = sum(ordered) / len(ordered) * factor
    return f"{mean:,.2f} {unit} on average, p50 {middle:,.2f}, p99 {high:,.2f}"


def picture(title: str, subtitle: str, result: TrafficResult) -> str:
    """Returns the requests over time, and the distribution of times to the first token, as SVG."""
    lines = [
        Line([(sample.seconds, float(getattr(sample, name))) for sample in result.samples], colour, name)
        for name, colour in (("running", BLUE), ("tiered", ORANGE), ("waiting", GREY), ("parked", RED))
    ]
    over_time = Panel("Requests", "seconds", "requests", lines, x_max=result.seconds, wide=True)
    ordered = result.first_token_s
    points = [(percentile(ordered, share), float(share)) for share in range(101)] if ordered else []
    first = Panel("Time to first token", "seconds", "% that took at most this long", [Line(points, BLUE)])
    speeds = result.token_s
    between = [(percentile(speeds, share) * 1e3, float(share)) for share in range(101)] if speeds else []
    gaps = Panel("Time between tokens", "milliseconds", "% that took at most this long", [Line(between, BLUE)])
    return page(title, subtitle, [over_time, first, gaps])
