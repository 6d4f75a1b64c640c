"""The command line and the output that all benchmarks share: tables, and JSON with hardware, command and date."""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]  # a row of a table: column -> value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints the description unchanged, and the defaults of options, unless a default is None, False or 0."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the option `--json`. `description` is the module docstring of the benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results as JSON to this file")
    return parser


def hardware() -> dict[str, Any]:
    """Describes the machine and the versions of Python and torch."""
    lscpu = (
        subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout if shutil.which("lscpu") else ""
    )
    models = [line.partition(":")[2].strip() for line in lscpu.splitlines() if line.startswith("Model name")]
    cpu = f"{models[0] if models else 'unknown'} ({platform.machine()})"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@dataclass(frozen=True, slots=True)
class Bar:
    """A result that a benchmark must reach, and the measured result."""

    what: str
    measured: float
    limit: float
    at_least: bool = False  # True: `limit` is a minimum; False: `limit` is a maximum

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> Row:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return {"what": self.what, "measured": self.measured, "bar": f"{sign} {self.limit:g}", "verdict": verdict}


def write_json(json_path: Path, title: str, results: Any, **extra: Any) -> None:
    """Writes `results` with title, command, date, hardware and the fields in `extra`."""
    context = {
        "title": title,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        **extra,
        "results": results,
    }
    json_path.write_text(json.dumps(context, indent=2) + "\n")


def report(title: str, rows: list[Row], json_path: Path | None, notes: str = "") -> None:
    """Prints `rows` (dicts with the same keys) as a table, then the hardware. With `json_path`, also writes JSON."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(title=title, caption=notes or None)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)
    console.print(f"{hardware()}", style="dim")
    if json_path is not None:
        write_json(json_path, title, rows)


def markdown_table(rows: list[Row]) -> str:
    """Returns `rows` (dicts with the same keys) as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(_cell, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
