"""Tables of results for the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from hotset.lab.bench.benchmark import BenchReport
from hotset.lab.bench.config import Load
from hotset.lab.bench.results import Distribution, Summary

MAX_ERRORS_SHOWN = 5
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES = {
    "ttft": "to first token (ttft)",
    "itl": "between tokens (itl)",
    "tpot": "per token (tpot)",
    "e2e": "whole request (e2e)",
    "ttft_scheduled": "ttft from schedule",
    "e2e_scheduled": "e2e from schedule",
}


def print_load(console: Console, load: Load, summary: Summary) -> None:
    """Prints the figures of one load."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False)

    line(f"\n{load.label}: {_counts(summary)} in {summary.seconds:.1f} s", style="bold")
    line(
        f"{summary.requests_per_second:.2f} requests/s, {summary.input_tokens_per_second:.1f} input tokens/s, "
        f"{summary.output_tokens_per_second:.1f} output tokens/s"
    )
    if summary.output_tokens is not None:
        prompts = "of unknown length" if summary.input_tokens is None else f"{summary.input_tokens.mean:.1f} tokens"
        shorter = f", {summary.shorter_answers} shorter than asked for" if summary.shorter_answers else ""
        line(f"mean length: prompts {prompts}, answers {summary.output_tokens.mean:.1f} tokens{shorter}")
    if summary.cached_share:
        line(f"prefix cache: {summary.cached_share:.1%} of the input tokens were not computed again")
    if summary.drafts is not None:
        line(str(summary.drafts))
    if (goodput := summary.goodput) is not None:
        line(f"within --slo: {goodput.share:.1%} of requests, {goodput.requests_per_second:.2f} requests/s")
    if summary.completed:
        console.print(_latency_table(summary))
    for error in summary.errors[:MAX_ERRORS_SHOWN]:
        status = "no response" if error.status is None else f"status {error.status}"
        line(f"{error.count} failed, {status}: {error.message}", style="red")
    if len(summary.errors) > MAX_ERRORS_SHOWN:
        line(f"{len(summary.errors) - MAX_ERRORS_SHOWN} further kinds of errors are in --json", style="red")
    if warning := summary.generator.warning:
        line(f"warning: {warning}", style="yellow")


def print_sweep(console: Console, report: BenchReport) -> None:
    """Prints one row for each load."""
    latencies = [(name, statistic) for name in ("ttft", "tpot") for statistic in ("p50", "p99")]
    table = _table("load", "failed", "req/s", "output\ntokens/s", *(f"{name}\n{p} ms" for name, p in latencies))
    table.title = "Load: " + ("concurrency" if report.results[0].load.concurrency else "requests sent per second")
    table.title_justify = "left"
    if report.config.objectives:
        table.add_column("within\n--slo", justify="right")
    for result, summary in zip(report.results, report.summaries(), strict=True):
        cells = [str(summary.failed), f"{summary.requests_per_second:.2f}", f"{summary.output_tokens_per_second:.1f}"]
        cells += [_cell(summary.latencies_ms[name], statistic) for name, statistic in latencies]
        if report.config.objectives:
            cells.append("-" if summary.goodput is None else f"{summary.goodput.share:.1%}")
        table.add_row(result.load.value, *cells)
    console.print(table)


def _latency_table(summary: Summary) -> Table:
    table = _table("milliseconds", *STATISTICS)
    for name, distribution in summary.latencies_ms.items():
        table.add_row(LATENCIES[name], *(_cell(distribution, statistic) for statistic in STATISTICS))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cell(distribution: Distribution | None, statistic: str) -> str:
    if distribution is None:
        return "-"
    value = getattr(distribution, statistic)
    return f"{value:.0f}" if value >= 10_000 else f"{value:.1f}"


def _counts(summary: Summary) -> str:
    parts = [f"{summary.completed} requests"]
    parts += [f"{summary.failed} failed"] if summary.failed else []
    parts += [f"{summary.unfinished} cancelled"] if summary.unfinished else []
    return ", ".join(parts)
