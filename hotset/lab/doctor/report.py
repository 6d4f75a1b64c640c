"""Prints the findings as a table for people, or as JSON for issue reports."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hotset import __version__
from hotset.base.host_checks import Finding
from hotset.lab.doctor.findings import LEVELS, CheckResult, worst

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"good": "green", "skipped": "dim", "slow": "yellow", "broken": "bold red"}
WIDTH = 120  # of the table where there is no terminal


def to_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    return {
        "hotset": __version__,
        "level": worst(finding for _, finding in _findings(results)),
        "checks": [asdict(result) | {"seconds": round(result.seconds, 3)} for result in results],
    }


def print_results(console: "Console", results: Sequence[CheckResult]) -> None:
    """Prints all findings, then how many there are of each level, and what is broken once more with the mend."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    named = ""
    for name, finding in _findings(results):
        text = Text(finding.what)
        if finding.mend:
            text.append(f"\n→ {finding.mend}", style="dim")
        table.add_row(Text("" if name == named else name), Text(finding.level, style=STYLES[finding.level]), text)
        named = name
    console.print(table)
    levels = [finding.level for _, finding in _findings(results)]
    counts = (f"{levels.count(level)} {level}" for level in reversed(LEVELS) if level in levels)
    console.print("\n" + ", ".join(counts), highlight=False)
    for name, finding in _findings(results):
        if finding.level == "broken":
            console.print(Text(f"\n{name}: {finding.what}", style=STYLES["broken"]))
            console.print(Text(f"→ {finding.mend}"))


def _findings(results: Sequence[CheckResult]) -> Iterator[tuple[str, Finding]]:
    return ((result.name, finding) for result in results for finding in result.findings)
